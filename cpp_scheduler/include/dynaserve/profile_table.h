// ProfileTable predicts the latency of an engine step, and learns from every step that is measured
// (the paper's latency profile table, section 4.2).
//
// A roofline says what no step has measured yet.  Over it lies a grid of bins (tokens in the step x
// decodes x mean context of a decode); each learns by how much the steps near it differ from the
// roofline, and one factor, shared by all, follows what changes the whole machine at once: what the
// last few steps had in common, and the part of it that has lasted, which is kept.
// Between bins the prediction is linear, beyond the last one it grows as the roofline does.
//
// The prediction never falls when any argument grows, whatever was measured (a decode more whose
// context is below the others' lowers their mean, and may lower it): where bins contradict that, it
// is read from the mean of the lowest monotonic grid above them and the highest below.
//
// Not thread-safe.  No clock: the caller measures.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dynaserve/cost_model.h"

namespace dynaserve {

inline constexpr std::array<double, 24> kTokenBins = {
    1,   8,   16,  32,  64,   96,   128,  192,  256,  320,  384,  448,
    512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 8192, 16384};
inline constexpr std::array<double, 13> kDecodeBins = {0,  1,  2,   4,   8,   16, 32,
                                                       64, 96, 128, 192, 256, 512};
inline constexpr std::array<double, 8> kContextBins = {0, 256, 512, 1024, 2048, 4096, 8192, 32768};

// What one bin has learnt. log_ratio: natural logarithm of measured over roofline.
struct ProfileBin {
  std::uint32_t index = 0;  // in [0, ProfileTable::kBins)
  double log_ratio = 0.0;
  double weight = 0.0;  // steps it has seen, each by its nearness in (0, 1]

  bool operator==(const ProfileBin&) const = default;
};

// A bin whose own latency is not what is read there, since latency never falls where steps grow.
struct Contradiction {
  std::uint32_t index = 0;
  double factor = 1.0;  // between the two, at least 1
};

class ProfileTable;

// Steps with the same decodes: asking for many prefills beside them costs one look into the table.
// The latencies are those of ProfileTable::StepMs(), to the last bit.
class StepRow {
 public:
  double StepMs(std::int64_t prefill_tokens, double prefill_pairs) const;

 private:
  friend class ProfileTable;
  StepRow() = default;

  const ProfileTable* table_ = nullptr;  // must not change or end before the row does
  std::int64_t decodes_ = 0;
  std::int64_t decode_context_tokens_ = 0;
  bool outside_ = false;
  std::array<double, kTokenBins.size()> ms_;  // at each bin, before the scale
};

class ProfileTable {
 public:
  static constexpr std::size_t kBins = kTokenBins.size() * kDecodeBins.size() * kContextBins.size();

  // Throws std::invalid_argument as Validate() does.
  explicit ProfileTable(const Roofline& roofline);

  // Milliseconds; at least 0.  A shape without tokens takes 0.
  double StepMs(const BatchShape& shape) const;
  // Of so many decodes alone, each of the same context.
  double DecodesMs(std::int64_t decodes, double context_tokens) const;

  // Valid until the table learns or ends.
  StepRow RowOf(std::int64_t decodes, std::int64_t decode_context_tokens) const;

  // Learns from a step, unless none is predicted whatever the factor.  A step far outside the usual
  // error moves the table only as far as the largest usual error would: a pause of the machine does
  // not poison it, a lasting change moves it.
  // Throws std::invalid_argument, and learns nothing, for a step without tokens or a time that is
  // not positive.
  void Observe(const BatchShape& shape, double measured_ms);

  // Standard deviation of the logarithm of measured over predicted, over the last hundred steps or
  // so.  Aiming at SLO * exp(-2.33 * sigma) keeps 99 steps in 100 within the SLO.
  double sigma() const { return sigma_; }

  const Roofline& roofline() const { return roofline_; }
  double log_scale() const { return log_scale_; }

  // The bins that have learnt something, by index.
  std::vector<ProfileBin> Bins() const;

  // Of the bins, the one that others contradict most.  What noise does to bins stays small.
  Contradiction WorstContradiction() const;

  // Replaces what was learnt.  Throws std::invalid_argument, and changes nothing, if an index is
  // outside [0, kBins) or not larger than the one before it, a number is not finite, or a weight or
  // sigma is negative.
  void Restore(std::span<const ProfileBin> bins, double log_scale, double sigma);

  // Steps per call of Observe() since construction or Restore().
  std::int64_t observed() const { return observed_; }

 private:
  friend class StepRow;
  struct Cell;

  double RowMs(std::size_t token_bin, const Cell& cell) const;
  Cell Locate(const BatchShape& shape) const;
  double UnscaledMs(const BatchShape& shape, const Cell& cell) const;
  void LearnInBins(const Cell& cell, double surprise);
  double NotFarFromRead(std::size_t bin, double log_ratio) const;
  void Learn(std::size_t bin, double log_ratio);
  void MakeMonotonic() const;

  // Constant after construction.
  const Roofline roofline_;
  std::vector<double> prior_ms_;  // the roofline at each bin

  std::vector<double> log_ratio_;
  std::vector<double> weight_;
  std::vector<double> value_ms_;  // prior_ms_ * exp(log_ratio_)
  double log_scale_ = 0.0;
  double log_recent_ = 0.0;
  double bounded_mean_ = 0.0;  // of the surprises, as bins that have seen some steps hear them
  double scale_ = 1.0;         // the exponential of both
  double sigma_;
  std::int64_t observed_ = 0;

  // Derived from the bins on the first read after a change.
  mutable std::vector<double> grid_ms_;
  mutable std::vector<double> least_ms_;
  mutable std::vector<double> most_ms_;
  mutable bool stale_ = true;
};

}  // namespace dynaserve
