#include "dynaserve/paper_search.h"

#include <algorithm>
#include <cmath>

namespace dynaserve {
namespace {

// When everything on the instance has ended if it computes [start, end) of the request as well.
double DrainMs(ExecutionPredictor& predictor, std::int64_t prompt_tokens, std::int64_t start,
               std::int64_t end, double now_ms) {
  if (start >= end) return predictor.PredictDrainMs(nullptr, now_ms);
  const std::int64_t prefill = std::max<std::int64_t>(0, std::min(prompt_tokens, end) - start);
  const VirtualRequest part{0, start, prefill, end - start - prefill, now_ms};
  return predictor.PredictDrainMs(&part, now_ms);
}

}  // namespace

BalancedSplit FindBalancedSplit(ExecutionPredictor& alpha, ExecutionPredictor& beta,
                                std::int64_t prompt_tokens, std::int64_t end_token,
                                double tolerance_ms, double now_ms) {
  const auto length = static_cast<double>(end_token);
  double low = 0.0, high = 1.0;
  double ratio = static_cast<double>(std::min(prompt_tokens, end_token)) / length;
  BalancedSplit split;
  while (true) {
    split.split_token = std::llround(ratio * length);
    const double first_ms = DrainMs(alpha, prompt_tokens, 0, split.split_token, now_ms);
    const double second_ms = DrainMs(beta, prompt_tokens, split.split_token, end_token, now_ms);
    split.imbalance_ms = std::abs(first_ms - second_ms);
    split.probes += 1;
    if (split.imbalance_ms <= tolerance_ms || split.probes == kPaperProbes) return split;
    (first_ms > second_ms ? high : low) = ratio;
    ratio = 0.5 * (low + high);
  }
}

}  // namespace dynaserve
