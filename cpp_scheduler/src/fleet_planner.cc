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
      : table_(table),
        limits_(limits),
        demand_(demand),
        options_(options),
        free_(Beside(0)),
        most_(MostDecodes()) {}

  double Beside(std::int64_t decodes) const {
    return PrefillRate(table_, limits_, decodes, demand_.mean_context_tokens,
                       demand_.prompt_tokens);
  }

  double Free() const { return free_; }

  double Colocated() const {
    const std::int64_t decodes = DividedUp(demand_.decodes, demand_.instances);
    return static_cast<double>(demand_.instances) * Beside(decodes);
  }

  // Of the fleet with so many of its instances gathering; 0 where they would not keep up.
  double Gathered(std::int64_t gathering) const {
    const std::int64_t free = demand_.instances - gathering;
    const std::int64_t held = std::min(DividedUp(demand_.decodes, gathering), most_);
    const std::int64_t left = std::max<std::int64_t>(0, demand_.decodes - gathering * held);
    const double others = left == 0 ? free_ : Beside(DividedUp(left, free));
    const double rate =
        static_cast<double>(gathering) * Beside(held) + static_cast<double>(free) * others;
    return KeepUp(gathering, rate) ? rate : 0.0;
  }

 private:
  // Whether they generate, in steps of decodes alone, what so much prefill brings.
  bool KeepUp(std::int64_t gathering, double prefill_rate) const {
    if (most_ == 0) return false;
    const double context = static_cast<double>(most_) * demand_.mean_context_tokens;
    const double step_ms = table_.StepMs({0, 0.0, most_, std::llround(context)});
    const double generated = static_cast<double>(gathering * most_) / step_ms;
    const double part =
        demand_.prefill_rate > prefill_rate ? prefill_rate / demand_.prefill_rate : 1.0;
    return part * demand_.output_rate <= options_.most_decode_load * generated;
  }

  // Of one instance: as many as seats, KV memory and a step of them alone allow.
  std::int64_t MostDecodes() const {
    const double context = std::max(1.0, demand_.mean_context_tokens);
    const double room = options_.most_kv_share * static_cast<double>(limits_.kv_tokens) / context;
    std::int64_t least = 0;
    auto most =
        static_cast<std::int64_t>(std::min(room, static_cast<double>(limits_.max_requests)));
    while (least < most) {
      const std::int64_t middle = DividedUp(least + most, 2);
      const double tokens = static_cast<double>(middle) * context;
      const bool fits = table_.StepMs({0, 0.0, middle, std::llround(tokens)}) <= limits_.step_ms;
      (fits ? least : most) = fits ? middle : middle - 1;
    }
    return least;
  }

  const ProfileTable& table_;
  const InstanceLimits& limits_;
  const FleetDemand& demand_;
  const PlannerOptions& options_;
  const double free_;
  const std::int64_t most_;
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
  FleetPlan plan;
  if (demand.instances == 0) return plan;
  const Rates rates(table, limits, demand, options);
  const double free = rates.Free();
  const double unit = static_cast<double>(demand.instances) * free;
  plan.lost_share = free > 0.0 ? std::max(0.0, 1.0 - rates.Beside(1) / free) : 0.0;
  plan.colocated_rate = plan.prefill_rate = rates.Colocated();

  // What there is, while it is worth it; else colocation.
  if (current > 0 && current < demand.instances) {
    const double rate = rates.Gathered(current);
    if (demand.decodes == 0 || rate > plan.colocated_rate + options.least_kept * unit) {
      plan.gathering = current;
      plan.prefill_rate = rate;
    }
  }
  const double wanted = plan.prefill_rate + options.least_gain * unit;
  const double step =
      std::max(1.0 + 1e-9, std::pow(static_cast<double>(demand.instances), 1.0 / (kMostTried - 1)));
  std::int64_t last = 0;
  for (double next = 1.0; demand.decodes > 0; next *= step) {
    const std::int64_t gathering = std::max<std::int64_t>(last + 1, std::llround(next));
    if (gathering >= demand.instances) break;
    last = gathering;
    const double rate = rates.Gathered(gathering);
    if (rate > wanted && rate > plan.prefill_rate) {
      plan.gathering = gathering;
      plan.prefill_rate = rate;
    }
  }
  return plan;
}

}  // namespace dynaserve
