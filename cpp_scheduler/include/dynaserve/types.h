// Values that enter and leave the core: plain, copyable, comparable.
//
// Tokens are counted as an engine computes them (vLLM's `num_computed_tokens`).  A request with P
// prompt tokens and D output tokens computes P + D - 1 of them: the last output is never fed back.
// All ranges are half-open.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace dynaserve {

using InstanceId = std::string;

// What an instance reports about itself.
struct InstanceState {
  InstanceId instance_id;
  bool accepts_new = true;  // false: it finishes what it has (draining)

  bool operator==(const InstanceState&) const = default;
};

struct RequestSpec {
  std::string request_id;
  std::int64_t prompt_tokens = 0;            // P
  std::int64_t max_output_tokens = 0;        // the limit of D; decides which cuts are legal
  std::int64_t expected_output_tokens = 0;   // D; above the limit it counts as the limit
  std::optional<std::int64_t> forced_split;  // cut here, whatever the policy says
  bool may_cut = true;                       // false: always runs whole

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

// Why a request was cut (the first two) or runs whole.
enum class PlacementReason {
  kForced,          // cut at RequestSpec::forced_split
  kPolicy,          // cut where the policy wants it
  kColocated,       // the policy never cuts
  kSingleInstance,  // only one instance accepts new work
  kNotCuttable,     // RequestSpec::may_cut is false
  kSplitAtStart,    // the cut would leave alpha nothing
  kSplitAtEnd,      // the cut would leave beta nothing, even at the output limit
  kPromptTooShort,  // fewer than two tokens to compute: no cut exists
};

// alpha = [0, split_token()), beta = [split_token(), end).  Without beta the request runs whole and
// alpha ends at its expected end.
struct Placement {
  MicroRequest alpha;
  std::optional<MicroRequest> beta;
  PlacementReason reason = PlacementReason::kColocated;

  std::int64_t split_token() const { return alpha.end_token; }
  bool operator==(const Placement&) const = default;
};

enum class Policy {
  kColocated,      // never cut; the least reserved instance runs the whole request
  kDisaggregated,  // cut at P; the first half of the instances by id prefills, the others decode
  kFixed,          // cut at Options::ratio of the expected computed tokens
};

struct Options {
  Policy policy = Policy::kColocated;
  double ratio = 0.5;  // in [0, 1]; read by kFixed only

  bool operator==(const Options&) const = default;
};

}  // namespace dynaserve
