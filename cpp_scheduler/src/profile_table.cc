#include "dynaserve/profile_table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace dynaserve {
namespace {

constexpr double kInitialSigma = 0.10;
constexpr double kLeastSigma = 0.01;
constexpr double kOutlierSigmas = 3.0;
// Of the last error in what the last few steps had in common: other tenants of a machine come and
// go within some steps.
constexpr double kRecentGain = 0.3;
// Of that, what is taken to last, with each step: it is kept where the table is.
constexpr double kLastingGain = 0.02;
constexpr double kSigmaGain = 0.02;
constexpr double kLeastBinGain = 0.05;
// What a bin that has seen some steps hears of an error, at most; and of the last one in the mean
// of what such bins hear.
constexpr double kKnownBinSigmas = 0.5;
constexpr double kBoundedGain = 0.02;
// Of a bin from what is read there, in the logarithm: a third each way.
constexpr double kMostApart = 0.4;
// Of a bin from its roofline: a factor of 150.
constexpr double kMostLogRatio = 5.0;
constexpr double kLearntWeight = 0.5;

constexpr std::size_t kTokens = kTokenBins.size();
constexpr std::size_t kDecodes = kDecodeBins.size();
constexpr std::size_t kContexts = kContextBins.size();

std::size_t IndexOf(std::size_t token, std::size_t decode, std::size_t context) {
  return (token * kDecodes + decode) * kContexts + context;
}

// The bin below a value and how far the value lies towards the next, in [0, 1].
struct Position {
  std::size_t below;
  double fraction;
};

template <std::size_t Size>
Position PositionOf(const std::array<double, Size>& bins, double value) {
  const auto above = std::upper_bound(bins.begin() + 1, bins.end() - 1, value);
  const auto index = static_cast<std::size_t>(above - bins.begin()) - 1;
  const double fraction = (value - bins[index]) / (bins[index + 1] - bins[index]);
  return {index, std::clamp(fraction, 0.0, 1.0)};
}

// Each entry becomes the `pick` of all entries at or below it (upward), or at or above it.
template <typename Pick>
void Envelope(std::vector<double>& grid, bool upward, Pick pick) {
  const auto sweep = [&](std::size_t stride, std::size_t length) {
    for (std::size_t block = 0; block < grid.size(); block += stride * length) {
      for (std::size_t step = 1; step < length; ++step) {
        const std::size_t row = block + (upward ? step : length - 1 - step) * stride;
        const std::size_t from = upward ? row - stride : row + stride;
        for (std::size_t i = 0; i < stride; ++i)
          grid[row + i] = pick(grid[row + i], grid[from + i]);
      }
    }
  };
  sweep(1, kContexts);
  sweep(kContexts, kDecodes);
  sweep(kContexts * kDecodes, kTokens);
}

// What bins that were not kept from drifting have in common; the scale has gone the other way.
double DriftOf(std::span<const ProfileBin> bins) {
  double sum = 0.0, weights = 0.0, most = 0.0;
  for (const ProfileBin& bin : bins) {
    sum += bin.weight * bin.log_ratio;
    weights += bin.weight;
    most = std::max(most, std::abs(bin.log_ratio));
  }
  return most > kMostLogRatio && weights > 0.0 ? sum / weights : 0.0;
}

}  // namespace

// Where a shape lies: between two bins of tokens, among four of decodes and context (their indices
// in the row of a token bin, and their weights); and the point inside the grid nearest to it.
struct ProfileTable::Cell {
  Position token;
  std::array<std::size_t, 4> columns;
  std::array<double, 4> weights;
  double tokens, decodes, mean_context;  // clamped to the grid
};

ProfileTable::ProfileTable(const Roofline& roofline)
    : roofline_(roofline),
      prior_ms_(kBins),
      log_ratio_(kBins, 0.0),
      weight_(kBins, 0.0),
      sigma_(kInitialSigma),
      grid_ms_(kBins),
      least_ms_(kBins),
      most_ms_(kBins) {
  Validate(roofline);
  for (std::size_t t = 0; t < kTokens; ++t) {
    for (std::size_t d = 0; d < kDecodes; ++d) {
      for (std::size_t c = 0; c < kContexts; ++c) {
        prior_ms_[IndexOf(t, d, c)] =
            roofline_.StepMs(kTokenBins[t], kDecodeBins[d], kDecodeBins[d] * kContextBins[c]);
      }
    }
  }
  value_ms_ = prior_ms_;
}

ProfileTable::Cell ProfileTable::Locate(const BatchShape& shape) const {
  const auto decodes = static_cast<double>(shape.decodes);
  const double mean_context =
      shape.decodes > 0 ? static_cast<double>(shape.decode_context_tokens) / decodes : 0.0;
  const auto tokens = static_cast<double>(shape.tokens());
  const Position t = PositionOf(kTokenBins, tokens);
  const Position d = PositionOf(kDecodeBins, decodes);
  const Position c = PositionOf(kContextBins, mean_context);
  Cell cell;
  cell.token = t;
  for (std::size_t corner = 0; corner < 4; ++corner) {
    const bool far_d = (corner & 2U) != 0, far_c = (corner & 1U) != 0;
    cell.columns[corner] = IndexOf(0, d.below + far_d, c.below + far_c);
    cell.weights[corner] =
        (far_d ? d.fraction : 1.0 - d.fraction) * (far_c ? c.fraction : 1.0 - c.fraction);
  }
  cell.tokens = std::min(tokens, kTokenBins.back());
  cell.decodes = std::min(decodes, kDecodeBins.back());
  cell.mean_context = std::min(mean_context, kContextBins.back());
  return cell;
}

double ProfileTable::RowMs(std::size_t token_bin, const Cell& cell) const {
  const double* row = grid_ms_.data() + IndexOf(token_bin, 0, 0);
  double sum = 0.0;
  for (std::size_t corner = 0; corner < 4; ++corner) {
    sum += cell.weights[corner] * row[cell.columns[corner]];
  }
  return sum;
}

double ProfileTable::UnscaledMs(const BatchShape& shape, const Cell& cell) const {
  if (stale_) MakeMonotonic();
  const double inside = (1.0 - cell.token.fraction) * RowMs(cell.token.below, cell) +
                        cell.token.fraction * RowMs(cell.token.below + 1, cell);
  // Added, not multiplied: a ratio of two rooflines may fall where each of them grows.
  const double beyond =
      roofline_.StepMs(static_cast<double>(shape.tokens()), static_cast<double>(shape.decodes),
                       static_cast<double>(shape.decode_context_tokens)) -
      roofline_.StepMs(std::max(cell.tokens, cell.decodes), cell.decodes,
                       cell.decodes * cell.mean_context);
  const bool outside =
      static_cast<double>(shape.tokens()) > cell.tokens ||
      static_cast<double>(shape.decodes) > cell.decodes ||
      static_cast<double>(shape.decode_context_tokens) > cell.decodes * kContextBins.back();
  return inside + (outside ? std::max(0.0, beyond) : 0.0) + roofline_.pair_ms * shape.prefill_pairs;
}

double ProfileTable::StepMs(const BatchShape& shape) const {
  if (shape.tokens() < 1) return 0.0;
  return scale_ * UnscaledMs(shape, Locate(shape));
}

double ProfileTable::DecodesMs(std::int64_t decodes, double context_tokens) const {
  return StepMs({0, 0.0, decodes, std::llround(static_cast<double>(decodes) * context_tokens)});
}

StepRow ProfileTable::RowOf(std::int64_t decodes, std::int64_t decode_context_tokens) const {
  if (stale_) MakeMonotonic();
  const Cell cell = Locate({0, 0.0, decodes, decode_context_tokens});
  StepRow row;
  row.table_ = this;
  row.decodes_ = decodes;
  row.decode_context_tokens_ = decode_context_tokens;
  row.outside_ = static_cast<double>(decodes) > cell.decodes ||
                 static_cast<double>(decode_context_tokens) > cell.decodes * kContextBins.back();
  for (std::size_t t = 0; t < kTokens; ++t) row.ms_[t] = RowMs(t, cell);
  return row;
}

double StepRow::StepMs(std::int64_t prefill_tokens, double prefill_pairs) const {
  const auto tokens = static_cast<double>(prefill_tokens + decodes_);
  if (outside_ || tokens > kTokenBins.back() || tokens < 1.0) {
    return table_->StepMs({prefill_tokens, prefill_pairs, decodes_, decode_context_tokens_});
  }
  const Position t = PositionOf(kTokenBins, tokens);
  const double inside = (1.0 - t.fraction) * ms_[t.below] + t.fraction * ms_[t.below + 1];
  return table_->scale_ * (inside + table_->roofline_.pair_ms * prefill_pairs);
}

void ProfileTable::Observe(const BatchShape& shape, double measured_ms) {
  if (shape.tokens() < 1 || !(measured_ms > 0.0) || !std::isfinite(measured_ms)) {
    throw std::invalid_argument("a step of " + std::to_string(shape.tokens()) + " tokens took " +
                                std::to_string(measured_ms) + " ms; both must be positive");
  }
  const Cell cell = Locate(shape);
  const double predicted_ms = scale_ * UnscaledMs(shape, cell);
  ++observed_;
  if (!(predicted_ms > 0.0)) return;  // nor would it with any factor
  const double error = std::log(measured_ms / predicted_ms);
  const double usual = kOutlierSigmas * sigma_;
  const double surprise = std::clamp(error, -usual, usual);
  LearnInBins(cell, surprise);
  log_recent_ += kRecentGain * surprise;
  scale_ = std::exp(log_scale_ + log_recent_);
  const double lasting = kLastingGain * log_recent_;
  log_scale_ += lasting;
  log_recent_ -= lasting;
  sigma_ = std::max(kLeastSigma, std::sqrt((1.0 - kSigmaGain) * sigma_ * sigma_ +
                                           kSigmaGain * surprise * surprise));
  stale_ = true;
}

// Bins learn only what the steps just before do not explain: budgets are larger while the machine
// is fast, and large steps would else seem to be fast ones, and small ones slow.
void ProfileTable::LearnInBins(const Cell& cell, double surprise) {
  const double bound = kKnownBinSigmas * sigma_;
  const std::array<double, 2> token_weights = {1.0 - cell.token.fraction, cell.token.fraction};
  double squares = 0.0;
  for (const double token_weight : token_weights) {
    for (const double weight : cell.weights)
      squares += token_weight * token_weight * weight * weight;
  }
  for (std::size_t corner = 0; corner < 8; ++corner) {
    const std::size_t far_t = corner / 4;
    const std::size_t bin = IndexOf(cell.token.below + far_t, 0, 0) + cell.columns[corner % 4];
    const double weight = token_weights[far_t] * cell.weights[corner % 4];
    weight_[bin] += weight;
    const double gain = std::max(kLeastBinGain, 1.0 / (1.0 + weight_[bin]));
    // The step with which the machine turns slow is a large one, as it was fast before: a bin that
    // has seen some steps goes by how many are above and below it, hardly by how far.
    const double most = std::max(bound, kOutlierSigmas * sigma_ / (1.0 + weight_[bin]));
    const double told = std::clamp(surprise, -most, most) - (most > bound ? 0.0 : bounded_mean_);
    // Divided by the squares, a step at a bin and one between bins move the prediction alike.
    Learn(bin, NotFarFromRead(bin, log_ratio_[bin] + gain * weight / squares * told));
  }
  // Pauses are long and rare: without its mean, what is bounded would make all bins fall for ever,
  // and the scale grow.
  bounded_mean_ += kBoundedGain * (std::clamp(surprise, -bound, bound) - bounded_mean_);
}

// Bins that contradict each other are read at the middle between them: their errors never end, and
// without a bound they would drift apart, and the scale with them, as long as steps are observed.
double ProfileTable::NotFarFromRead(std::size_t bin, double log_ratio) const {
  if (!(prior_ms_[bin] > 0.0) || !(grid_ms_[bin] > 0.0)) return log_ratio;
  const double read = std::log(grid_ms_[bin] / prior_ms_[bin]);
  const double near = std::clamp(log_ratio, read - kMostApart, read + kMostApart);
  return std::clamp(near, -kMostLogRatio, kMostLogRatio);
}

void ProfileTable::Learn(std::size_t bin, double log_ratio) {
  log_ratio_[bin] = log_ratio;
  value_ms_[bin] = prior_ms_[bin] * std::exp(log_ratio);
}

std::vector<ProfileBin> ProfileTable::Bins() const {
  std::vector<ProfileBin> bins;
  for (std::size_t i = 0; i < kBins; ++i) {
    if (weight_[i] > 0.0)
      bins.push_back({static_cast<std::uint32_t>(i), log_ratio_[i], weight_[i]});
  }
  return bins;
}

Contradiction ProfileTable::WorstContradiction() const {
  if (stale_) MakeMonotonic();
  Contradiction worst;
  for (std::size_t i = 0; i < kBins; ++i) {
    if (weight_[i] < kLearntWeight || !(grid_ms_[i] > 0.0)) continue;
    const double apart = std::abs(std::log(value_ms_[i] / grid_ms_[i]));
    if (apart > std::log(worst.factor)) worst = {static_cast<std::uint32_t>(i), std::exp(apart)};
  }
  return worst;
}

void ProfileTable::Restore(std::span<const ProfileBin> bins, double log_scale, double sigma) {
  if (!std::isfinite(log_scale)) throw std::invalid_argument("log_scale is not finite");
  if (!std::isfinite(sigma) || sigma < 0.0) {
    throw std::invalid_argument("sigma is " + std::to_string(sigma) + "; it must not be negative");
  }
  std::int64_t last = -1;
  for (const ProfileBin& bin : bins) {
    const std::string name = "bin " + std::to_string(bin.index);
    if (bin.index >= kBins || bin.index <= last) {
      throw std::invalid_argument(name + " after bin " + std::to_string(last) +
                                  ": indices must grow and stay below " + std::to_string(kBins));
    }
    if (!std::isfinite(bin.log_ratio))
      throw std::invalid_argument(name + ": log_ratio is not finite");
    if (!std::isfinite(bin.weight) || bin.weight < 0.0) {
      throw std::invalid_argument(name + ": weight is " + std::to_string(bin.weight) +
                                  "; it must not be negative");
    }
    last = bin.index;
  }
  std::fill(log_ratio_.begin(), log_ratio_.end(), 0.0);
  std::fill(weight_.begin(), weight_.end(), 0.0);
  value_ms_ = prior_ms_;
  const double drift = DriftOf(bins);
  for (const ProfileBin& bin : bins) {
    Learn(bin.index, drift == 0.0
                         ? bin.log_ratio
                         : std::clamp(bin.log_ratio - drift, -kMostLogRatio, kMostLogRatio));
    weight_[bin.index] = bin.weight;
  }
  log_scale_ = log_scale + drift;
  log_recent_ = 0.0;
  bounded_mean_ = 0.0;
  scale_ = std::exp(log_scale_);
  sigma_ = std::max(kLeastSigma, sigma);
  observed_ = 0;
  stale_ = true;
}

// A bin that has learnt keeps its value where that breaks no order, and the middle of what its
// neighbours ask where it does; any other bin keeps the roofline's, moved between the learnt ones.
void ProfileTable::MakeMonotonic() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < kBins; ++i) {
    const bool learnt = weight_[i] >= kLearntWeight;
    least_ms_[i] = learnt ? value_ms_[i] : -kInfinity;
    most_ms_[i] = learnt ? value_ms_[i] : kInfinity;
  }
  Envelope(least_ms_, true, [](double a, double b) { return std::max(a, b); });
  Envelope(most_ms_, false, [](double a, double b) { return std::min(a, b); });
  for (std::size_t i = 0; i < kBins; ++i) {
    const double low = std::max(least_ms_[i], std::min(prior_ms_[i], most_ms_[i]));
    const double high = std::min(most_ms_[i], std::max(prior_ms_[i], least_ms_[i]));
    // The geometric one, as bins learn logarithms: by another, two that pull it apart move it.
    grid_ms_[i] = std::sqrt(low * high);
  }
  stale_ = false;
}

}  // namespace dynaserve
