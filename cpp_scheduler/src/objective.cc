#include "dynaserve/objective.h"

#include <algorithm>

namespace dynaserve {
namespace {

constexpr double kLateWeight = 10.0;
// Of so many tokens one may be late where 99 in a hundred have to be in time.
constexpr double kTokensPerLateOne = 100.0;

double Excess(double value, double limit) { return std::max(0.0, value - limit); }

}  // namespace

double OthersWaitMs(double queue_ms, double work_ms, double arrivals_per_ms) {
  return arrivals_per_ms * work_ms * (queue_ms + 0.5 * work_ms);
}

double ObjectiveMs(const Outcome& outcome, const Slo& slo) {
  const double tokens = std::max(1.0, outcome.decode_tokens + outcome.alpha_decode_tokens);
  const double late_gap_weight = kLateWeight * std::max(1.0, kTokensPerLateOne / tokens);
  return outcome.ttft_ms + outcome.others_wait_ms + outcome.lost_prefill_ms + outcome.hand_off_ms +
         kLateWeight * Excess(outcome.ttft_ms, slo.ttft_ms) +
         outcome.decode_tokens *
             (Excess(outcome.decode_step_ms, slo.tbt_ms) + outcome.decodes_late_ms) +
         outcome.alpha_decode_tokens *
             (Excess(outcome.alpha_decode_step_ms, slo.tbt_ms) + outcome.alpha_decodes_late_ms) +
         outcome.gap_ms + late_gap_weight * Excess(outcome.gap_ms, slo.tbt_ms) +
         outcome.overflow_tokens * outcome.token_ms;
}

}  // namespace dynaserve
