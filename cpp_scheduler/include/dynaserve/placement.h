// The placement decision, as pure functions over a snapshot of the fleet.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "dynaserve/types.h"

namespace dynaserve {

// What a decision knows about one instance that accepts new work.
struct InstanceLoad {
  InstanceId instance_id;
  std::int64_t reserved_tokens = 0;
  std::uint64_t last_reserved = 0;  // ordinal of its last reservation; 0: none yet
  bool whole_only = false;

  bool operator==(const InstanceLoad&) const = default;
};

// Tokens an engine computes for a request of this size; a request without output computes its
// prompt.
std::int64_t ComputedTokens(std::int64_t prompt_tokens, std::int64_t output_tokens);

// Runs the request whole on a whole-only instance, if that is the least reserved of all
// `instances`, the request fits it, and no cut is forced; nullopt otherwise.  It is asked before
// the policy, which then knows only of the other instances.
std::optional<Placement> ChooseWholeOnly(const RequestSpec& request,
                                         std::span<const InstanceLoad> instances);

// Decides whether and where `request` is cut and which instances run it.
//
// `instances` are those that accept new work and are not whole-only, in order of id.  nullopt:
// there are none.
// A cut at s is legal if 0 < s < ComputedTokens(P, max_output_tokens); an illegal one means that
// the request runs whole.  Within a group of instances the least reserved wins; among equals the
// one whose last reservation is the oldest (round robin), then the first by id.  Under
// kDisaggregated, and kFixed with prefill_instances, Options::prefill_instances of them (all but
// one at most) prefill, and a whole request runs on a decoding instance, except that a cut at the
// end keeps it on a prefilling one. beta plans at least one token, also when the cut is past the
// expected end.
std::optional<Placement> ChoosePlacement(const Options& options, const RequestSpec& request,
                                         std::span<const InstanceLoad> instances);

}  // namespace dynaserve
