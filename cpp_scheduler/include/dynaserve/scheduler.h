// Scheduler decides, for each request, which instance computes which of its tokens.
//
// Not thread-safe; the owner serialises calls.  Reads no clock and no files, draws no random
// numbers: the same calls in the same order give the same placements.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "dynaserve/fleet_state.h"
#include "dynaserve/types.h"

namespace dynaserve {

class Scheduler {
 public:
  // Throws std::invalid_argument if the ratio is outside [0, 1], whatever the policy.
  explicit Scheduler(const Options& options);

  // Adds the instance, or replaces what was known about it.
  void Observe(const InstanceState& instance);

  // Forgets the instance; unknown ids are ignored.  Requests placed on it stay reserved until
  // Finish().
  void Remove(const InstanceId& instance_id);

  // Chooses the instances and the cut (see placement.h), and reserves the tokens of both
  // micro-requests.  To place a request again, Finish() it first.
  // nullopt: no instance accepts new work; nothing is reserved.
  // Throws std::invalid_argument, and reserves nothing, if the request id is already placed, a
  // token count is negative or above 2^40, or forced_split is outside
  // [0, prompt_tokens + max_output_tokens].
  std::optional<Placement> Place(const RequestSpec& request);

  // Releases what Place() reserved.  Unknown ids are ignored: a retry may finish twice.
  void Finish(const std::string& request_id);

  // Tokens of the unfinished micro-requests on the instance, also on one that was removed; 0 for
  // unknown ids.
  std::int64_t ReservedTokens(const InstanceId& instance_id) const;

  // Throws std::logic_error if a reservation is negative, orphaned or counted twice.
  void CheckInvariants() const;

 private:
  // Constant after construction.
  const Options options_;

  FleetState fleet_;
};

}  // namespace dynaserve
