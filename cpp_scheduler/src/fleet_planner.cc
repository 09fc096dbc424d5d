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
// Of the time without decodes: beyond, how many there are in the rest of it is lost in rounding.
constexpr double kAlways = 1.0 - 1e-9;
// Of what gathering instances generate: beyond, requests wait for a seat there.
constexpr double kFull = 0.9;
// Standard errors, which what is measured exceeds by chance once in ten times.
constexpr double kByChance = 1.28;

std::int64_t DividedUp(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

class Rates {
 public:
  Rates(const ProfileTable& table, const InstanceLimits& limits, const FleetDemand& demand,
        const PlannerOptions& options)
      : table_(table),
        limits_(limits),
        demand_(demand),
        gathering_ms_(limits.MostToAdmitMs() / demand.gathering_cost),
        free_(Beside(0, limits.step_ms)),
        most_(
            MostInAStep(Room(options.most_kv_share * limits.kv_tokens, demand.mean_context_tokens),
                        std::max(demand.mean_context_tokens, demand.answer_context_tokens))),
        most_kept_(static_cast<std::int64_t>(options.kept_room * static_cast<double>(most_))),
        generated_(Generated(MostInAStep(limits.max_requests, demand.answer_context_tokens))),
        most_load_(options.most_decode_load),
        kept_load_(options.kept_decode_load),
        most_seated_(Room(limits.kv_tokens, demand.answer_context_tokens)),
        most_held_(Generated(most_seated_)),
        most_moved_(demand.kv_token_ms > 0.0 ? options.most_link_load / demand.kv_token_ms
                                             : std::numeric_limits<double>::infinity()),
        colocated_(Colocate()) {}

  double Free() const { return free_; }

  // Of the rate of an instance without decodes, what is lost beside one.
  double LostToTheFirst() const {
    return free_ > 0.0 ? std::max(0.0, 1.0 - Beside(1, limits_.step_ms) / free_) : 0.0;
  }

  double Colocated() const { return colocated_; }

  // Of the fleet with so many of its instances gathering, as they do already if that is `kept`.
  double Gathered(std::int64_t gathering, bool kept = false) const {
    if (most_ == 0) return 0.0;
    const auto gatherers = static_cast<double>(gathering);
    const auto free = static_cast<double>(demand_.instances - gathering);
    const auto most = static_cast<double>(kept ? most_kept_ : most_);
    const double held = std::min(demand_.decodes / gatherers, most);
    const double left = std::max(0.0, demand_.decodes - gatherers * held);
    const double others = free * BesideOnAverage(left / free, limits_.step_ms);
    // The decodes that stay need no links.
    const double share = demand_.decodes > 0.0 ? gatherers * held / demand_.decodes : 1.0;
    const double carried = std::min(gatherers, free) * most_moved_;
    return gatherers * BesideOnAverage(held, GatheringStepMs(gatherers)) +
           (others * share > carried ? carried / share : others);
  }

  // The same; 0 where they would not keep up, or are as good as full while the fleet would prefill
  // all that arrives with one more of them.
  double Sustained(std::int64_t gathering, bool kept = false) const {
    const double rate = Gathered(gathering, kept);
    const double generated = static_cast<double>(gathering) * generated_;
    const double most = most_load_ * generated;
    const bool may_be_more = gathering + 1 < demand_.instances;
    if (may_be_more && Brought(Sure(), rate) > kFull * generated &&
        Gathered(gathering + 1) >= demand_.prefill_rate) {
      return 0.0;
    }
    return Brought(Sure(), rate) <= (kept ? kept_load_ * most : most) ? rate : 0.0;
  }

  bool IsShortOfRoom(std::int64_t gathering, double prefill_rate) const {
    return Brought(demand_.output_rate, prefill_rate) > static_cast<double>(gathering) * most_held_;
  }

  bool IsShortOfSteps(std::int64_t gathering) const {
    return demand_.prefill_rate <= colocated_ &&
           demand_.output_rate > static_cast<double>(gathering) * generated_;
  }

 private:
  double Colocate() const {
    const auto instances = static_cast<double>(demand_.instances);
    return instances * BesideOnAverage(demand_.decodes / instances, limits_.step_ms);
  }

  // In steps of at most step_ms.
  double Beside(std::int64_t decodes, double step_ms) const {
    InstanceLimits limits = limits_;
    limits.step_ms = step_ms;
    return PrefillRate(table_, limits, decodes, demand_.mean_context_tokens, demand_.prompt_tokens);
  }

  // Of an instance that has so many decodes on average.  They come and go: for e^-mean of the time
  // it has none, and prefills in long steps without anybody's plan.
  double BesideOnAverage(double mean, double step_ms) const {
    const double without = std::exp(-mean);
    if (without > kAlways) return free_;
    const std::int64_t decodes = std::max<std::int64_t>(1, std::llround(mean / (1.0 - without)));
    return without * free_ + (1.0 - without) * Beside(decodes, step_ms);
  }

  // With all seats or memory taken these steps generate what arrives; in longer ones those
  // instances would not keep up, and the seats and memory of the others stay empty.
  double GatheringStepMs(double gatherers) const {
    const double each = Brought(Sure(), colocated_) / gatherers;
    const auto most = static_cast<double>(most_seated_);
    return each > 0.0 ? std::min(limits_.step_ms, most / each) : limits_.step_ms;
  }

  // Output tokens per millisecond, less what may be chance.
  double Sure() const {
    return std::max(0.0, demand_.output_rate - kByChance * demand_.output_rate_error);
  }

  // Of the output tokens per millisecond that arrive, those that so much prefill brings.
  double Brought(double output_rate, double prefill_rate) const {
    const bool is_behind = demand_.prefill_rate > prefill_rate;
    return output_rate * (is_behind ? prefill_rate / demand_.prefill_rate : 1.0);
  }

  // Decodes of one instance for which it has seats and memory.
  std::int64_t Room(double kv_tokens, double context_tokens) const {
    return static_cast<std::int64_t>(std::min(kv_tokens / std::max(1.0, context_tokens),
                                              static_cast<double>(limits_.max_requests)));
  }

  // Up to `most` decodes, as long as a step of them alone takes one that gathers at most
  // limits.MostToAdmitMs().
  std::int64_t MostInAStep(std::int64_t most, double context_tokens) const {
    std::int64_t least = 0;
    while (least < most) {
      const std::int64_t middle = DividedUp(least + most, 2);
      const bool fits = table_.DecodesMs(middle, context_tokens) <= gathering_ms_;
      (fits ? least : most) = fits ? middle : middle - 1;
    }
    return least;
  }

  // Output tokens per millisecond, in steps of so many decodes alone of those that arrive, of an
  // instance that gathers.
  double Generated(std::int64_t decodes) const {
    if (decodes == 0) return 0.0;
    return static_cast<double>(decodes) /
           (demand_.gathering_cost * table_.DecodesMs(decodes, demand_.answer_context_tokens));
  }

  const ProfileTable& table_;
  const InstanceLimits& limits_;
  const FleetDemand& demand_;
  const double
      gathering_ms_;   // limits_.MostToAdmitMs(), by the table's time where decodes are gathered
  const double free_;  // of an instance without decodes
  const std::int64_t most_;         // decodes that one instance gathers,
  const std::int64_t most_kept_;    // and with how many it goes on
  const double generated_;          // output tokens per millisecond, in steps of decodes alone,
  const double most_load_;          // times that may be asked of it,
  const double kept_load_;          // and times that, where it gathers already
  const std::int64_t most_seated_;  // decodes of those that arrive, in its memory and seats,
  const double most_held_;          // and that it generates with all its memory or seats taken
  const double most_moved_;         // tokens per millisecond over the link of one instance
  const double colocated_;          // of the fleet where nothing is gathered
};

bool GathersSome(std::int64_t gathering, const FleetDemand& demand) {
  return gathering > 0 && gathering < demand.instances;
}

// What gains enough over colocation, which the plan is so far.
void PlanGathering(FleetPlan& plan, const Rates& rates, const FleetDemand& demand,
                   std::int64_t current, const PlannerOptions& options) {
  const double least_pressure =
      GathersSome(current, demand) ? options.least_kept_pressure : options.least_pressure;
  const bool is_known = demand.prefill_rate > 0.0;
  const double unit = static_cast<double>(demand.instances) * rates.Free();
  const double pressing = std::max(demand.prefill_rate, demand.recent_prefill_rate);
  if (is_known && pressing < least_pressure * unit) return;
  // What there is, while it is worth it; else colocation.
  if (GathersSome(current, demand)) {
    const double rate = rates.Sustained(current, true);
    const double least = plan.colocated_rate + options.least_kept * unit;
    if (rate > least) {
      plan.gathering = current;
      plan.prefill_rate = rate;
    }
  }
  const double wanted = plan.prefill_rate + options.least_gain * unit;
  const double step =
      std::max(1.0 + 1e-9, std::pow(static_cast<double>(demand.instances), 1.0 / (kMostTried - 1)));
  std::int64_t last = 0;
  for (double next = 1.0;; next *= step) {
    const std::int64_t gathering = std::max<std::int64_t>(last + 1, std::llround(next));
    if (gathering >= demand.instances) break;
    last = gathering;
    const double rate = rates.Sustained(gathering);
    if (rate > wanted && rate > plan.prefill_rate) {
      plan.gathering = gathering;
      plan.prefill_rate = rate;
    }
  }
}

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
  plan.lost_share = rates.LostToTheFirst();
  plan.colocated_rate = plan.prefill_rate = rates.Colocated();
  if (options.forced) {
    if (GathersSome(*options.forced, demand)) {
      plan.gathering = *options.forced;
      plan.prefill_rate = rates.Gathered(plan.gathering);
    }
  } else {
    PlanGathering(plan, rates, demand, current, options);
  }
  if (plan.gathering == 0) return plan;
  plan.is_short_of_room = rates.IsShortOfRoom(plan.gathering, plan.prefill_rate);
  plan.is_short_of_steps = rates.IsShortOfSteps(plan.gathering);
  return plan;
}

}  // namespace dynaserve
