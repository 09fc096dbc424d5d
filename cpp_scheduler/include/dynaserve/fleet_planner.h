// The plan above the single request: how many instances gather the fleet's decodes, so that the
// others, without decodes, prefill in long cheap steps.  Pure.
//
// None and all are the same plan: every instance decodes what it prefills (colocation).  One where
// the gathering instances have no prefill to spare is disaggregation.
#pragma once

#include <cstdint>
#include <optional>

#include "dynaserve/execution_predictor.h"
#include "dynaserve/profile_table.h"

namespace dynaserve {

// What the fleet has to do now; decodes are those that run once the queues of prefill are done.
struct FleetDemand {
  std::int64_t instances = 0;
  double decodes = 0.0;                // on average
  double mean_context_tokens = 0.0;    // of a decode
  std::int64_t prompt_tokens = 1024;   // of a typical request
  double prefill_rate = 0.0;           // prompt tokens per millisecond that arrive, 0: not known,
  double output_rate = 0.0;            // output tokens per millisecond that they will have,
  double output_rate_error = 0.0;      // its standard error,
  double answer_context_tokens = 0.0;  // and the mean context of a decode of these
  double kv_token_ms = 0.0;            // to move the KV of one token; 0: at once
  double recent_prefill_rate = 0.0;    // as prefill_rate, of the last seconds, if that is more
  // In (0, 1]: of a step of those that gather now, over the fleet's.  Steps of decodes may exceed
  // the table by less than those of prefill, which the others have.
  double gathering_cost = 1.0;
};

struct FleetPlan {
  std::int64_t gathering = 0;     // instances; 0: none in particular
  bool is_short_of_room = false;  // they will not hold all decodes that arrive
  // Nor generate their tokens within the TBT SLO, while colocation would prefill all that arrives.
  bool is_short_of_steps = false;
  double prefill_rate = 0.0;    // tokens per millisecond of the whole fleet
  double colocated_rate = 0.0;  // of the same fleet without gathering
  double lost_share = 0.0;      // of an instance's rate, lost to its first decode

  bool operator==(const FleetPlan&) const = default;
};

// Gains are parts of what the fleet would prefill without any decodes, so that they mean the same
// beside a few decodes and beside so many that hardly any prefill is left.
struct PlannerOptions {
  double least_gain = 0.03;   // over the plan there is, to change it
  double least_kept = 0.005;  // over colocation, to go on gathering
  // Of the same, what has to arrive, to begin gathering and to go on: where prompts are few beside
  // their answers, there is nothing to gain by full steps of decodes.
  double least_pressure = 0.08;
  double least_kept_pressure = 0.05;
  // Of an instance's KV memory, for the decodes it gathers.  More than there is: the decodes
  // counted run in steps that prefill makes long; those that are gathered run in shorter ones, and
  // so are fewer at a time.
  double most_kv_share = 1.2;
  // Times that many decodes, those with which it goes on gathering.  Under an overload they swing
  // around what one instance holds: without this the plan is left at the first swing, and not
  // entered again, since a colocated fleet has more of them.
  double kept_room = 1.25;
  // Output tokens that arrive, over what the gathering instances generate in steps of decodes
  // alone.  More than they can: the others take some, and steps of fewer decodes are shorter.
  // Beyond, by more than chance explains, answers are what the fleet lacks.
  double most_decode_load = 1.5;
  double kept_decode_load = 1.25;  // times that, to go on gathering: few answers tell little
  // Of the time, what the links may be busy that move the KV of prompts to where decodes are
  // gathered: beyond, transfers wait for each other.
  double most_link_load = 0.9;
  std::optional<std::int64_t> forced;  // so many gather, whatever they gain
};

// Prefill tokens per millisecond of one instance beside these decodes; 0 where they leave no room.
double PrefillRate(const ProfileTable& table, const InstanceLimits& limits, std::int64_t decodes,
                   double mean_context_tokens, std::int64_t prompt_tokens);

// The plan of the highest prefill rate.  A gathering instance holds as many decodes as it has seats
// and KV memory for, and as a step of them alone takes at most limits.MostToAdmitMs(); those beyond
// run on the others.  Its steps are as short as its seats and memory ask for, to generate what
// arrives. Nothing is gathered where those instances would not keep up with the answers, in steps
// of at most limits.MostToAdmitMs(); they are short of room where seats and KV memory do not
// suffice to generate what arrives, and short of steps where such steps do not, of decodes alone,
// and prompts are not what the fleet lacks.  No number of them is taken which answers fill to nine
// tenths if the fleet prefills all that arrives with one more.  What the others prefill has to be
// moved to the gathering instances: no more of it counts than the links carry. `current` (its
// number of gathering instances) stays unless another plan gains least_gain, or it gains less than
// least_kept itself. Above 32 instances the numbers tried are 32, spread geometrically.
FleetPlan PlanFleet(const ProfileTable& table, const InstanceLimits& limits,
                    const FleetDemand& demand, std::int64_t current,
                    const PlannerOptions& options = {});

}  // namespace dynaserve
