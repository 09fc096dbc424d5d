// How long one engine step takes, from the composition of its batch: a roofline of five terms and
// its fit to measured steps.  Pure functions; milliseconds and tokens.
//
// A step of T tokens reads the weights once and multiplies by them T times, so up to a knee it
// costs the same however small it is.  Attention adds a cost per (new, visible) pair of tokens of
// prefill and per token of context that a decode reads; every running decode adds its own
// (sampling, block tables).
#pragma once

#include <cstdint>
#include <span>

namespace dynaserve {

// What one step computes.  Tokens that a speculative decode verifies beyond the first count as
// prefill tokens.
struct BatchShape {
  std::int64_t prefill_tokens = 0;
  double prefill_pairs = 0.0;  // see PrefillPairs(), summed over the prefills of the step
  std::int64_t decodes = 0;
  std::int64_t decode_context_tokens = 0;  // summed over the decodes

  std::int64_t tokens() const { return prefill_tokens + decodes; }
  bool operator==(const BatchShape&) const = default;
};

// Pairs of (new token, token it attends to) when `tokens` follow `context_tokens` computed ones.
double PrefillPairs(std::int64_t tokens, std::int64_t context_tokens);

struct StepSample {
  BatchShape shape;
  double measured_ms = 0.0;
};

// Non-decreasing in every field of the shape: no coefficient is negative.
struct Roofline {
  double overhead_ms = 0.0;  // of every step
  double token_ms = 0.0;     // per token, and for `knee_tokens` of them in a smaller step
  double knee_tokens = 1.0;  // at least 1: where compute begins to cost more than reading weights
  double pair_ms = 0.0;      // per prefill pair
  double decode_ms = 0.0;    // per decode
  double context_ms = 0.0;   // per token of decode context

  double StepMs(const BatchShape& shape) const;
  // The same for real-valued arguments, without the pairs.
  double StepMs(double tokens, double decodes, double decode_context_tokens) const;
  bool operator==(const Roofline&) const = default;
};

// Throws std::invalid_argument, naming the field, for a coefficient that is negative or not finite,
// or a knee below 1.
void Validate(const Roofline& roofline);

// The least mean squared *relative* error over the samples; the knee is searched among powers of
// the square root of 2.  Samples that say nothing about a term leave it 0.
// Throws std::invalid_argument if there is no sample, or one has no token or a time that is not
// positive.
Roofline FitRoofline(std::span<const StepSample> samples);

}  // namespace dynaserve
