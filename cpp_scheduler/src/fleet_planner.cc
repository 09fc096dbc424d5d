#include "dynaserve/fleet_planner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "dynaserve/batch_rule.h"

namespace dynaserve {
namespace {

constexpr std::int64_t kMostTried = 32;
constexpr std::size_t kMostPrompts = 32;

std::int64_t DividedUp(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

class Rates {
 public:
  Rates(const ProfileTable& table, const InstanceLimits& limits, const FleetDemand& demand,
        const PlannerOptions& options)
      : table_(table), limits_(limits), demand_(demand), options_(options) {}

  double Beside(std::int64_t decodes) const {
    return PrefillRate(table_, limits_, decodes, demand_.mean_context_tokens,
                       demand_.prompt_tokens);
  }

  // Of the fleet with this many instances gathering.
  double Of(std::int64_t gathering) const {
    const auto n = static_cast<double>(gathering);
    const auto free = static_cast<double>(demand_.instances - gathering);
    return n * Beside(DividedUp(demand_.decodes, gathering)) + free * Beside(0);
  }

  bool Hold(std::int64_t gathering) const {
    const std::int64_t decodes = DividedUp(demand_.decodes, gathering);
    if (decodes == 0) return true;
    const double context = static_cast<double>(decodes) * demand_.mean_context_tokens;
    const BatchShape shape{0, 0.0, decodes, std::llround(context)};
    return decodes <= limits_.max_requests &&
           context <= options_.most_kv_share * static_cast<double>(limits_.kv_tokens) &&
           table_.StepMs(shape) <= limits_.step_ms;
  }

 private:
  const ProfileTable& table_;
  const InstanceLimits& limits_;
  const FleetDemand& demand_;
  const PlannerOptions& options_;
};

}  // namespace

double PrefillRate(const ProfileTable& table, const InstanceLimits& limits, std::int64_t decodes,
                   double mean_context_tokens, std::int64_t prompt_tokens) {
  const BatchShape shape{0, 0.0, decodes,
                         std::llround(static_cast<double>(decodes) * mean_context_tokens)};
  // Prompts like this one, as many as fill a step; of short ones, some to measure by.
  std::array<PrefillWork, kMostPrompts> prompts;
  const std::int64_t prompt = std::max<std::int64_t>(1, prompt_tokens);
  const auto count = static_cast<std::size_t>(
      std::min<std::int64_t>(kMostPrompts, DividedUp(limits.max_step_tokens, prompt)));
  prompts.fill({prompt, 0});
  const std::span<const PrefillWork> work(prompts.data(), count);
  const double limit_ms = decodes > 0 ? limits.step_ms : std::numeric_limits<double>::infinity();
  const PrefillBudget budget =
      ChooseBudget(table, shape, work, {limit_ms, limits.max_step_tokens, 0});
  return budget.tokens == 0 ? 0.0 : static_cast<double>(budget.tokens) / budget.step_ms;
}

FleetPlan PlanFleet(const ProfileTable& table, const InstanceLimits& limits,
                    const FleetDemand& demand, std::int64_t current,
                    const PlannerOptions& options) {
  FleetPlan best;
  if (demand.instances == 0) return best;
  const Rates rates(table, limits, demand, options);
  const double free_rate = rates.Beside(0);
  best.lost_share = free_rate > 0.0 ? std::max(0.0, 1.0 - rates.Beside(1) / free_rate) : 0.0;
  best.colocated_rate = rates.Of(demand.instances);
  const double least = 1.0 + options.least_gain;

  // What there is, if it still can be; else colocation.
  const bool stays = current > 0 && current < demand.instances && rates.Hold(current);
  best.gathering = stays ? current : 0;
  best.prefill_rate = stays ? rates.Of(current) : best.colocated_rate;
  FleetPlan found = best;
  if (stays && best.colocated_rate > found.prefill_rate * least) {
    found.gathering = 0;
    found.prefill_rate = best.colocated_rate;
  }
  const double step =
      std::max(1.0 + 1e-9, std::pow(static_cast<double>(demand.instances), 1.0 / (kMostTried - 1)));
  std::int64_t last = 0;
  for (double next = 1.0; demand.decodes > 0; next *= step) {
    const std::int64_t gathering = std::max<std::int64_t>(last + 1, std::llround(next));
    if (gathering >= demand.instances) break;
    last = gathering;
    if (!rates.Hold(gathering)) continue;
    const double rate = rates.Of(gathering);
    if (rate > best.prefill_rate * least && rate > found.prefill_rate) {
      found.gathering = gathering;
      found.prefill_rate = rate;
    }
  }
  return found;
}

}  // namespace dynaserve
