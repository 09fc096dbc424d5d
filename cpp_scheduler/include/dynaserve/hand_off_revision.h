// Live elasticity: should a hand-off that is still to come happen elsewhere, or not at all, now
// that more is known than when the request was placed?
//
// What may have changed is everything around the request: answers that grew past what was expected
// of them, new requests, instances that turned out slower.  Both instances are predicted as they
// stand now, with the request in its place on them; keeping the cut, lifting it and moving it are
// compared by the one objective (objective.h).  Nothing is entered.
//
// Hysteresis: a change must gain more than what a prediction errs by, so that the same fleet asked
// again keeps what it has just chosen.
#pragma once

#include <cstdint>
#include <optional>

#include "dynaserve/split_search.h"
#include "dynaserve/types.h"

namespace dynaserve {

inline constexpr int kMostRevisionProbes = 8;

// A cut request whose alpha still computes its prompt, up to a cut inside it.
struct PendingHandOff {
  SearchInstance alpha, beta;  // promised_tokens: without what this request was promised
  std::uint64_t alpha_key = 0, beta_key = 0;
  std::int64_t split_token = 0;
  double waited_ms = 0.0;  // since the request came
};

enum class RevisionReason {
  kAloneIsBetter,    // alpha finishes the request by itself
  kLaterIsBetter,    // alpha computes more of the prompt
  kEarlierIsBetter,  // beta does
  kGathersDecodes,   // of a request that ran whole: it is cut in its answer (late_cut.h)
};

struct Revision {
  std::optional<std::int64_t> split_token;        // nullopt: the hand-off is lifted
  std::optional<InstanceId> beta = std::nullopt;  // of a request that ran whole
  RevisionReason reason = RevisionReason::kAloneIsBetter;
  double objective_ms = 0.0;
  double kept_objective_ms = 0.0;  // of leaving the cut where it is
  double hand_off_ms = 0.0;        // absolute time at which beta is ready; 0 if lifted
  int probes = 0;

  bool operator==(const Revision&) const = default;
};

struct RevisionOptions {
  double least_gain_ms = 20.0;    // of the objective, to change anything,
  double least_gain_share = 0.1;  // and this share of what is left until the first token
};

// nullopt: the cut stays, or cannot be changed any more: alpha is predicted to have computed it.
std::optional<Revision> ReviseHandOff(SplitSearch& search, const PendingHandOff& pending,
                                      const SearchRequest& request, const SearchOptions& options,
                                      const RevisionOptions& revision, double now_ms);

// What keeping the cut (its own split_token), moving or lifting it (nullopt) would cost; infinity:
// it cannot be done any more.  split_token: in (computed, prompt_tokens).
double RevisedObjectiveMs(SplitSearch& search, const PendingHandOff& pending,
                          std::optional<std::int64_t> split_token, const SearchRequest& request,
                          const SearchOptions& options, double now_ms);

}  // namespace dynaserve
