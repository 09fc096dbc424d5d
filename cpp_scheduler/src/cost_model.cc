#include "dynaserve/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <string>

namespace dynaserve {
namespace {

// Overhead, tokens above the knee, pairs, decodes, decode context.
constexpr std::size_t kTerms = 5;
using Terms = std::array<double, kTerms>;

constexpr int kHalfOctaves = 26;  // knees up to 2^13 tokens

Terms FeaturesOf(const BatchShape& shape, double knee_tokens) {
  return {1.0, std::max(knee_tokens, static_cast<double>(shape.tokens())), shape.prefill_pairs,
          static_cast<double>(shape.decodes), static_cast<double>(shape.decode_context_tokens)};
}

// Normal equations of the relative error, each column scaled to a largest entry of 1.
struct LeastSquares {
  std::array<Terms, kTerms> matrix{};
  Terms right{};
  Terms scale{};
  double constant = 0.0;  // the error of all coefficients being 0

  LeastSquares(std::span<const StepSample> samples, double knee_tokens) {
    for (const StepSample& sample : samples) {
      const Terms row = FeaturesOf(sample.shape, knee_tokens);
      for (std::size_t i = 0; i < kTerms; ++i) {
        scale[i] = std::max(scale[i], row[i] / sample.measured_ms);
      }
    }
    for (const StepSample& sample : samples) Add(sample, knee_tokens);
  }

  void Add(const StepSample& sample, double knee_tokens) {
    Terms row = FeaturesOf(sample.shape, knee_tokens);
    for (std::size_t i = 0; i < kTerms; ++i) {
      row[i] = scale[i] > 0.0 ? row[i] / sample.measured_ms / scale[i] : 0.0;
    }
    for (std::size_t i = 0; i < kTerms; ++i) {
      right[i] += row[i];
      for (std::size_t j = 0; j < kTerms; ++j) matrix[i][j] += row[i] * row[j];
    }
    constant += 1.0;
  }

  double ErrorOf(const Terms& x) const {
    double error = constant;
    for (std::size_t i = 0; i < kTerms; ++i) {
      error -= 2.0 * right[i] * x[i];
      for (std::size_t j = 0; j < kTerms; ++j) error += matrix[i][j] * x[i] * x[j];
    }
    return error;
  }
};

// Solves for the terms in `subset` (a bit each), the others 0; false: no unique solution.
bool SolveSubset(const LeastSquares& problem, unsigned subset, Terms& x) {
  std::array<std::size_t, kTerms> index{};
  std::size_t n = 0;
  for (std::size_t i = 0; i < kTerms; ++i) {
    if (subset >> i & 1U) index[n++] = i;
  }
  std::array<std::array<double, kTerms + 1>, kTerms> a{};
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) a[i][j] = problem.matrix[index[i]][index[j]];
    a[i][n] = problem.right[index[i]];
  }
  for (std::size_t column = 0; column < n; ++column) {
    std::size_t pivot = column;
    for (std::size_t row = column + 1; row < n; ++row) {
      if (std::abs(a[row][column]) > std::abs(a[pivot][column])) pivot = row;
    }
    if (std::abs(a[pivot][column]) < 1e-10 * problem.constant) return false;
    std::swap(a[pivot], a[column]);
    for (std::size_t row = 0; row < n; ++row) {
      if (row == column) continue;
      const double factor = a[row][column] / a[column][column];
      for (std::size_t j = column; j <= n; ++j) a[row][j] -= factor * a[column][j];
    }
  }
  x = {};
  for (std::size_t i = 0; i < n; ++i) x[index[i]] = a[i][n] / a[i][i];
  return true;
}

struct Fitted {
  Terms x{};
  double error = std::numeric_limits<double>::infinity();
};

// Five non-negative terms: trying every subset is exact, and cheap enough.
Fitted FitNonNegative(const LeastSquares& problem) {
  Fitted best;
  for (unsigned subset = 1; subset < 1U << kTerms; ++subset) {
    Terms x;
    if (!SolveSubset(problem, subset, x)) continue;
    if (std::any_of(x.begin(), x.end(), [](double value) { return value < 0.0; })) continue;
    // A term more must earn its place, or noise would choose among equals.
    const double error = problem.ErrorOf(x);
    if (error < best.error - 1e-9 * problem.constant) best = {x, error};
  }
  for (std::size_t i = 0; i < kTerms; ++i) {
    if (problem.scale[i] > 0.0) best.x[i] /= problem.scale[i];
  }
  return best;
}

void CheckSamples(std::span<const StepSample> samples) {
  if (samples.empty()) throw std::invalid_argument("a cost model needs at least one measured step");
  for (const StepSample& sample : samples) {
    if (sample.shape.tokens() < 1 || !(sample.measured_ms > 0.0) ||
        !std::isfinite(sample.measured_ms)) {
      throw std::invalid_argument("a step of " + std::to_string(sample.shape.tokens()) +
                                  " tokens took " + std::to_string(sample.measured_ms) +
                                  " ms; both must be positive");
    }
  }
}

}  // namespace

double PrefillPairs(std::int64_t tokens, std::int64_t context_tokens) {
  const auto n = static_cast<double>(tokens);
  return n * (static_cast<double>(context_tokens) + 0.5 * (n + 1.0));
}

double Roofline::StepMs(const BatchShape& shape) const {
  return StepMs(static_cast<double>(shape.tokens()), static_cast<double>(shape.decodes),
                static_cast<double>(shape.decode_context_tokens)) +
         pair_ms * shape.prefill_pairs;
}

double Roofline::StepMs(double tokens, double decodes, double decode_context_tokens) const {
  return overhead_ms + token_ms * std::max(knee_tokens, tokens) + decode_ms * decodes +
         context_ms * decode_context_tokens;
}

void Validate(const Roofline& roofline) {
  const auto check = [](const char* field, double value, double least) {
    if (!(value >= least) || !std::isfinite(value)) {
      throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) +
                                  "; it must be finite and at least " +
                                  std::to_string(static_cast<int>(least)));
    }
  };
  check("overhead_ms", roofline.overhead_ms, 0.0);
  check("token_ms", roofline.token_ms, 0.0);
  check("knee_tokens", roofline.knee_tokens, 1.0);
  check("pair_ms", roofline.pair_ms, 0.0);
  check("decode_ms", roofline.decode_ms, 0.0);
  check("context_ms", roofline.context_ms, 0.0);
}

Roofline FitRoofline(std::span<const StepSample> samples) {
  CheckSamples(samples);
  Fitted best;
  double best_knee = 1.0;
  double knee = 1.0;
  for (int step = 0; step <= kHalfOctaves; ++step, knee *= std::numbers::sqrt2) {
    const Fitted fitted = FitNonNegative(LeastSquares(samples, knee));
    if (fitted.error < best.error) {
      best = fitted;
      best_knee = knee;
    }
  }
  return {best.x[0], best.x[1], best_knee, best.x[2], best.x[3], best.x[4]};
}

}  // namespace dynaserve
