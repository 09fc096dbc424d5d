// Live elasticity of requests that were placed whole: should one that decodes on an instance which
// the fleet plan keeps free of decodes go on where decodes are gathered?
//
// When it was placed the instance was not kept free yet, or its answer was expected to be short.
// One decode that stays holds all prefill beside it to steps within the TBT SLO, for as long as its
// answer lasts.  Staying and going are compared by the one objective (objective.h); nothing is
// entered.
#pragma once

#include <cstdint>
#include <optional>

#include "dynaserve/hand_off_revision.h"
#include "dynaserve/split_search.h"

namespace dynaserve {

// Tokens that alpha still decodes at the least: meanwhile beta is told, and gets the KV.
inline constexpr std::int64_t kLateCutTokens = 8;

// A whole request that decodes on `alpha`, which is kept free, as it stands on its timeline; beta
// is not kept free.  promised_tokens of alpha: without what this request was promised.
struct DecodingWhole {
  SearchInstance alpha, beta;
  VirtualRequest standing;
  double emitted_tokens = 0.0;
};

// Where it is cut, and when beta is ready; nullopt: it stays, or is about to end.
std::optional<Revision> GatherDecode(SplitSearch& search, const DecodingWhole& decoding,
                                     const SearchRequest& request, const SearchOptions& options,
                                     const RevisionOptions& revision, double now_ms);

}  // namespace dynaserve
