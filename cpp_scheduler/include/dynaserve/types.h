// Values that enter and leave the core: plain, copyable, comparable.
//
// Tokens are counted as an engine computes them (vLLM's `num_computed_tokens`).  A request with P
// prompt tokens and D output tokens computes P + D - 1 of them: the last output is never fed back.
// All ranges are half-open.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dynaserve/execution_predictor.h"
#include "dynaserve/objective.h"

namespace dynaserve {

using InstanceId = std::string;

// What an instance reports about itself.
struct InstanceState {
  InstanceId instance_id;
  bool accepts_new = true;     // false: it finishes what it has (draining)
  InstanceLimits limits = {};  // read by policies that predict
  bool whole_only = false;     // it runs requests that fit it whole, and has no part in a cut one

  bool operator==(const InstanceState&) const = default;
};

// What an instance's prefix cache has of a prompt.
struct CachedPrefix {
  InstanceId instance_id;
  std::int64_t tokens = 0;

  bool operator==(const CachedPrefix&) const = default;
};

struct RequestSpec {
  std::string request_id;
  std::int64_t prompt_tokens = 0;            // P
  std::int64_t max_output_tokens = 0;        // the limit of D; decides which cuts are legal
  std::int64_t expected_output_tokens = 0;   // D; above the limit it counts as the limit
  std::optional<std::int64_t> forced_split;  // cut here, whatever the policy says
  bool may_cut = true;                       // false: always runs whole
  std::int64_t likely_output_tokens = 0;     // an upper quantile of D, for memory; 0: D
  Slo slo = {};
  std::vector<CachedPrefix> cached = {};  // read by kDynamic; not named: nothing
  bool fits_whole_only = false;           // it may run on an InstanceState::whole_only

  bool operator==(const RequestSpec&) const = default;
};

// One instance's part of a request: it computes the tokens [start_token, end_token).
struct MicroRequest {
  InstanceId instance_id;
  std::int64_t start_token = 0;
  std::int64_t end_token = 0;

  std::int64_t tokens() const { return end_token - start_token; }
  bool operator==(const MicroRequest&) const = default;
};

// Why a request was cut or runs whole.
enum class PlacementReason {
  kForced,          // cut at RequestSpec::forced_split
  kPolicy,          // cut where the policy wants it
  kColocated,       // the policy never cuts, or has no latency profile yet
  kSingleInstance,  // only one instance accepts new work
  kNotCuttable,     // RequestSpec::may_cut is false
  kSplitAtStart,    // the cut would leave alpha nothing
  kSplitAtEnd,      // the cut would leave beta nothing, even at the output limit
  kPromptTooShort,  // fewer than two tokens to compute: no cut exists
  kWholeIsBest,     // no cut has a lower objective (kDynamic)
  kLevelsPrefill,   // cut inside the prompt: prefill ends sooner, or decodes stay gathered
                    // (kDynamic)
  kGathersDecodes,  // cut at the prompt's end or later: alpha answers until decodes find room where
                    // they are gathered (kDynamic)
  kBalanced,        // cut where both instances end together (kPaper)
  kWholeOnly,       // a whole-only instance is the least reserved of all
};

// Whether a placement with this reason has a beta.
bool IsCut(PlacementReason reason);

// A placement that was predicted exactly; whole on alpha without beta.  Milliseconds.
struct Candidate {
  InstanceId alpha;
  std::optional<InstanceId> beta;
  std::int64_t split_token = 0;
  double ttft_ms = 0.0;
  double objective_ms = 0.0;

  bool operator==(const Candidate&) const = default;
};

// What a policy that predicts expected of its choice; milliseconds, from the decision on.
struct Prediction {
  double ttft_ms = 0.0;
  double hand_off_ms = 0.0;         // until beta is ready; 0 if whole
  double decode_step_ms = 0.0;      // of the decodes where it will decode, with it
  double objective_ms = 0.0;        // objective.h; |T1 - T2| under kPaper
  double whole_objective_ms = 0.0;  // of the best whole run; 0 under kPaper
  std::int64_t probes = 0;
  std::int64_t gathering = 0;              // instances that gather decodes, by the fleet plan
  std::vector<Candidate> candidates = {};  // in the order in which kDynamic tried them

  bool operator==(const Prediction&) const = default;
};

// alpha = [0, split_token()), beta = [split_token(), end).  Without beta the request runs whole and
// alpha ends at its expected end.
struct Placement {
  MicroRequest alpha;
  std::optional<MicroRequest> beta;
  PlacementReason reason = PlacementReason::kColocated;
  std::optional<Prediction> prediction = std::nullopt;

  std::int64_t split_token() const { return alpha.end_token; }
  std::int64_t end_token() const { return beta ? beta->end_token : alpha.end_token; }
  bool operator==(const Placement&) const = default;
};

enum class Policy {
  kColocated,      // never cut; the least reserved instance runs the whole request
  kDisaggregated,  // cut at P; the first instances by id prefill, the others decode
  kFixed,          // cut at Options::ratio of the expected computed tokens
  kDynamic,        // the lowest objective, whole or cut, over predicted batches (live_fleet.h)
  kPaper,          // the paper's Algorithm 1 (paper_search.h)
  kExhaustive,     // as kDynamic, but every cut is tried (exhaustive_search.h): an oracle, slow
};

// Whether the policy goes by a latency profile.
constexpr bool Predicts(Policy policy) {
  return policy == Policy::kDynamic || policy == Policy::kPaper || policy == Policy::kExhaustive;
}

struct Options {
  Policy policy = Policy::kColocated;
  double ratio = 0.5;  // in [0, 1]; read by kFixed only
  // Of kDisaggregated, 0: half of them.  Of kFixed, 0: alphas and betas run anywhere.
  std::int64_t prefill_instances = 0;
  double hand_off_ms = 5.0;       // shortest time from alpha's last token to beta's readiness
  double kv_token_ms = 0.0;       // to move the KV of one token (split_search.h, KvThereMs),
  double kv_token_work_ms = 0.0;  // and what that takes of the steps of either instance
  double tolerance_ms = 5.0;      // read by kPaper only: |T1 - T2| that is as good as 0
  // Instances that gather decodes, whatever the fleet plan would say; read by kDynamic and
  // kExhaustive.
  std::optional<std::int64_t> gathering = std::nullopt;
  std::int64_t stride_tokens = 16;  // read by kExhaustive only: between the cuts that it tries

  bool operator==(const Options&) const = default;
};

// How far a request is on an instance, as far as the caller knows.
struct Progress {
  std::string request_id;
  std::int64_t computed_tokens = 0;         // from the start of the request, this instance's or not
  std::int64_t expected_output_tokens = 0;  // D, as expected by now
  bool begun = true;                        // false: it waits for its first step

  bool operator==(const Progress&) const = default;
};

// A micro-request on an instance that another front-end has placed there, as the instance tells.
struct OtherRequest {
  std::int64_t computed_tokens = 0;  // from the start of the request, this instance's or not
  std::int64_t prompt_tokens = 0;
  std::int64_t end_token = 0;  // expected: the instance computes [computed_tokens, end_token)
  bool waits = false;          // for the KV of its first half: it holds memory, and runs later

  bool operator==(const OtherRequest&) const = default;
};

}  // namespace dynaserve
