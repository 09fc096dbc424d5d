// Scheduler decides, for each request, which instance computes which of its tokens.
//
// Not thread-safe; the owner serialises calls.  Reads no clock and no files, draws no random
// numbers: the same calls in the same order give the same placements.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "dynaserve/fleet_state.h"
#include "dynaserve/live_fleet.h"
#include "dynaserve/profile_table.h"
#include "dynaserve/types.h"

namespace dynaserve {

class Scheduler {
 public:
  // Throws std::invalid_argument if the ratio is outside [0, 1], or a number of Options is negative
  // or not finite.  The table is copied; a policy that predicts does as kColocated until it has
  // one.
  explicit Scheduler(const Options& options, const ProfileTable* table = nullptr);

  // Adds the instance, or replaces what was known about it.  Throws std::invalid_argument for
  // impossible limits.
  void Observe(const InstanceState& instance);

  // Policies that predict do so by this table from now on, which is copied; nothing happens under
  // others.  What was placed before the first one is on no timeline, and no arrival of late.
  void Learn(const ProfileTable& table, double now_ms);

  // Forgets the instance; unknown ids are ignored.  Requests placed on it stay reserved until
  // Finish().
  void Remove(const InstanceId& instance_id);

  // Chooses the instances and the cut (see placement.h and live_fleet.h), and reserves the tokens
  // of both micro-requests.  To place a request again, Finish() it first. nullopt: no instance
  // accepts new work; nothing is reserved. Throws std::invalid_argument, and reserves nothing, if
  // the request id is already placed, a token count is negative or above 2^40, an SLO is not above
  // 0, or forced_split is outside [0, prompt_tokens + max_output_tokens]. now_ms: of any clock that
  // never goes back; read by policies that predict, here and below.
  std::optional<Placement> Place(const RequestSpec& request, double now_ms = 0.0);

  // Releases what Place() reserved.  Unknown ids are ignored: a retry may finish twice.
  void Finish(const std::string& request_id, double now_ms = 0.0);

  // An answer has ended by itself or at its limit; expected_tokens: what would be expected of it
  // now.  kDynamic plans by how much longer or shorter answers turn out.  Throws
  // std::invalid_argument unless both are in [1, 2^40].
  void LearnLength(std::int64_t output_tokens, std::int64_t expected_tokens);

  // When a placed request would end if others came as they did lately, in the time of now_ms;
  // nullopt under policies that do not predict, or where it should have ended.
  std::optional<double> PredictEndMs(const std::string& request_id, double now_ms);

  // When the alpha of a placed request would reach its cut, as instances are now, in the time of
  // now_ms; nullopt under policies that do not predict, or where it is not cut.
  std::optional<double> PredictHandOffMs(const std::string& request_id, double now_ms);

  // Actual progress on an instance replaces the predicted; nothing happens under policies that do
  // not predict.  Throws std::invalid_argument, and changes nothing, for a token count that is
  // negative or above 2^40.
  void Report(const InstanceId& instance_id, std::span<const Progress> progress, double now_ms);

  // All that other front-ends have on the instance now: it counts as reserved, and is on the
  // instance's timeline, until the next such report.  Unknown ids are ignored.  Throws
  // std::invalid_argument, and changes nothing, for a token count that is negative or above 2^40.
  void ReportOthers(const InstanceId& instance_id, std::span<const OtherRequest> others,
                    double now_ms);

  // Whether the hand-off of a request under way should come elsewhere or not at all
  // (hand_off_revision.h), or whether one that decodes whole should be cut (late_cut.h), and enters
  // the change; to be asked now and then, by policies that predict only.  nullopt: it stays as it
  // is.
  std::optional<Revision> Revise(const std::string& request_id, double now_ms);

  // The caller has moved a request's hand-off, or lifted it (nullopt); it is not revised any more.
  // Throws std::invalid_argument unless split_token is in [1, 2^40].
  void Recut(const std::string& request_id, std::optional<std::int64_t> split_token, double now_ms);

  // The caller cuts a request that runs whole; unknown ids and what was cut before are ignored.
  // Throws std::invalid_argument unless split_token is in [1, 2^40].
  void CutWhole(const std::string& request_id, const InstanceId& beta, std::int64_t split_token,
                double now_ms);

  // The alpha of a request stands at its hand-off point.
  void Parked(const std::string& request_id, std::int64_t computed_tokens, double now_ms);

  // A measured step moves the instance's cost scale; nothing happens under policies that do not
  // predict.  Throws std::invalid_argument for a step without tokens or a time that is not
  // positive.
  void ObserveStep(const InstanceId& instance_id, const BatchShape& shape, double measured_ms,
                   double now_ms);

  // Replaces Options::kv_token_ms and kv_token_work_ms.  Throws std::invalid_argument unless they
  // are finite and not negative.
  void SetKvTokenMs(double kv_token_ms, double work_ms);

  // Latency of the instance's steps over the table's, as they were observed; 1 if none was.
  double CostScale(const InstanceId& instance_id) const;

  // Tokens of the unfinished micro-requests on the instance as they were placed (what was computed,
  // handed off, moved or lifted since changes nothing), also on one that was removed, and what is
  // left of those of others that it told of; 0 for unknown ids.
  std::int64_t ReservedTokens(const InstanceId& instance_id) const;

  // Throws std::logic_error if a reservation is negative, orphaned or counted twice.
  void CheckInvariants() const;

 private:
  Options options_;  // but for kv_token_ms constant after construction

  FleetState fleet_;
  std::optional<LiveFleet> live_;  // of policies that predict, once there is a table
  std::map<InstanceId, InstanceState> unpredicted_;  // until then
};

}  // namespace dynaserve
