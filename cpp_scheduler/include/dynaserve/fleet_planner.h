// The plan above the single request: how many instances gather the fleet's decodes, so that the
// others, without decodes, prefill in long cheap steps.  Pure.
//
// None and all are the same plan: every instance decodes what it prefills (colocation).  One where
// the gathering instances have no prefill to spare is disaggregation.
#pragma once

#include <cstdint>

#include "dynaserve/execution_predictor.h"
#include "dynaserve/profile_table.h"

namespace dynaserve {

// What the fleet has to do now; decodes are those that run or have been promised.
struct FleetDemand {
  std::int64_t instances = 0;
  std::int64_t decodes = 0;
  double mean_context_tokens = 0.0;   // of a decode
  std::int64_t prompt_tokens = 1024;  // of a typical request
};

struct FleetPlan {
  std::int64_t gathering = 0;   // instances; 0: none in particular
  double prefill_rate = 0.0;    // tokens per millisecond of the whole fleet
  double colocated_rate = 0.0;  // of the same fleet without gathering
  double lost_share = 0.0;      // of an instance's rate, lost to its first decode

  bool operator==(const FleetPlan&) const = default;
};

struct PlannerOptions {
  double least_gain = 0.03;    // in rate, to leave the plan there is
  double most_kv_share = 0.7;  // of an instance's KV memory, for the decodes it gathers
};

// Prefill tokens per millisecond of one instance beside these decodes; 0 where they leave no room.
double PrefillRate(const ProfileTable& table, const InstanceLimits& limits, std::int64_t decodes,
                   double mean_context_tokens, std::int64_t prompt_tokens);

// The plan of the highest prefill rate among those whose gathering instances hold the decodes:
// seats, KV memory, and a step of decodes alone within limits.step_ms.  `current` (its number of
// gathering instances) stays unless another is better by least_gain, or it has become impossible.
// Above 32 instances the numbers tried are 32, spread geometrically.
FleetPlan PlanFleet(const ProfileTable& table, const InstanceLimits& limits,
                    const FleetDemand& demand, std::int64_t current,
                    const PlannerOptions& options = {});

}  // namespace dynaserve
