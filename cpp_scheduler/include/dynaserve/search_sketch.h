// One instance as the closed forms of SplitSearch see it.  Only for its own sources.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "dynaserve/split_search.h"

namespace dynaserve {

// The two micro-requests of a cut before that token, of which `end_token` are computed in all.
inline VirtualRequest AlphaOf(const SearchRequest& request, std::int64_t split_token,
                              std::int64_t cached_tokens, double now_ms) {
  const std::int64_t prefill_end = std::min(split_token, request.prompt_tokens);
  const std::int64_t cached = std::min(cached_tokens, prefill_end - 1);
  return {0, cached, prefill_end - cached, split_token - prefill_end, now_ms};
}

inline VirtualRequest BetaOf(const SearchRequest& request, std::int64_t split_token,
                             std::int64_t end_token, double ready_ms) {
  const std::int64_t prefill = std::max<std::int64_t>(0, request.prompt_tokens - split_token);
  return {.context_tokens = split_token,
          .prefill_tokens = prefill,
          .decode_tokens = end_token - std::max(split_token, request.prompt_tokens),
          .ready_ms = ready_ms,
          .is_beta = true};
}

// What has to be guessed below, to be predicted.  The objective is mostly queue where a fleet is
// busy: a share of it alone would be more than most cuts gain.
inline double WorthProbingMs(double best_ms) {
  constexpr double kLeastGainShare = 0.002, kLeastGainMs = 2.0;
  return best_ms - std::min(kLeastGainShare * best_ms, kLeastGainMs);
}

struct SplitSearch::Sketch {
  std::size_t index = 0;
  bool keeps_free = false;
  std::int64_t behind = 0;
  double queue_ms = 0.0;        // until the prefills are done that are there
  double begins_ms = 0.0;       // until a newcomer would begin, as far as is known,
  double beta_begins_ms = 0.0;  // and one that has begun elsewhere: before those that wait,
  double overtaken = 0.0;       // which are so many,
  double seat_ms = 0.0;         // and wait so much longer for a seat that it takes
  double full_step_ms = 0.0;    // a step with as much prefill as pays
  double empty_step_ms = 0.0;   // one with a single token of it
  double full_step_tokens = 1.0;
  double decode_step_ms = 0.0;   // of decodes alone, with one more
  double decodes_late_ms = 0.0;  // per step, with one more
  double beta_seat_ms = 0.0;     // until a beta that resumes gets a seat, as far as is known
  double limit_ms = 0.0;         // of a step with decodes; 0: none
  double room_tokens = 0.0;      // of KV, at the likely ends of all its requests
  std::int64_t cached_tokens = 0;
  double prompt_late_ms = 0.0;  // that a prompt turned out to take longer
  Outcome priced;               // of decoding there
  std::optional<StepRow> row;   // of steps beside its decodes

  double PrefillMs(double tokens) const {
    if (tokens <= 0.0) return 0.0;
    const double steps = std::floor(tokens / full_step_tokens);
    const double rest = tokens - steps * full_step_tokens;
    const double last_ms =
        rest > 0.0 ? empty_step_ms + (full_step_ms - empty_step_ms) * (rest / full_step_tokens)
                   : 0.0;
    return steps * full_step_ms + last_ms;
  }
  // Of all of a prompt that is not cached.
  double PromptMs(std::int64_t prompt_tokens) const {
    return PrefillMs(static_cast<double>(prompt_tokens - cached_tokens));
  }
  // Of the last step of so many tokens.
  double LastTokens(double tokens) const {
    return tokens - full_step_tokens * std::max(0.0, std::ceil(tokens / full_step_tokens) - 1.0);
  }
  // A step of its decodes.  Beside prefill where anything runs now: until a beta is there, prompts
  // may be, and a gap is late where they were not counted.
  double RunningMs() const { return queue_ms > 0.0 ? full_step_ms : decode_step_ms; }
  // Within two steps, one that runs and one of its own, a decode that comes has a token.
  double TwoStepsMs() const { return 2.0 * RunningMs(); }
  // When a beta with so much of the prompt left would begin.
  double BetaBeginsMs(std::int64_t rest_tokens) const {
    return rest_tokens <= 1 ? beta_seat_ms : beta_begins_ms;
  }
  // Of a beta with so much of the prompt left, `took_ms` of it: one that resumes shares a step that
  // the decodes take anyway.
  double BetaWorkMs(std::int64_t rest_tokens, double took_ms) const {
    return rest_tokens <= 1 ? std::min(took_ms, TokenMs()) : took_ms;
  }
  // What a beta of so much work makes others wait: those that come, and those it overtakes.
  double OthersWaitMs(double work_ms, double arrivals_per_ms) const {
    return dynaserve::OthersWaitMs(queue_ms, work_ms, arrivals_per_ms) +
           overtaken * (work_ms + seat_ms);
  }
  double TokenMs() const { return full_step_ms / full_step_tokens; }
  double PartOfStepMs(double whole_ms, std::int64_t tokens, std::int64_t most,
                      std::int64_t context_tokens) const;
};

}  // namespace dynaserve
