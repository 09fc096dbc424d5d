#include "dynaserve/objective.h"

#include <algorithm>

namespace dynaserve {
namespace {

constexpr double kLateTtftWeight = 10.0;

double Excess(double value, double limit) { return std::max(0.0, value - limit); }

}  // namespace

double OthersWaitMs(double queue_ms, double work_ms, double arrivals_per_ms) {
  return arrivals_per_ms * work_ms * (queue_ms + 0.5 * work_ms);
}

double ObjectiveMs(const Outcome& outcome, const Slo& slo) {
  return outcome.ttft_ms + outcome.others_wait_ms + outcome.lost_prefill_ms + outcome.hand_off_ms +
         kLateTtftWeight * Excess(outcome.ttft_ms, slo.ttft_ms) +
         outcome.decode_tokens *
             (Excess(outcome.decode_step_ms, slo.tbt_ms) + outcome.decodes_late_ms) +
         Excess(outcome.gap_ms, slo.tbt_ms) + outcome.overflow_tokens * outcome.token_ms;
}

}  // namespace dynaserve
