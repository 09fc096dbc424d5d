// Cuts at the prompt's end and inside the answer: alpha answers until decodes find room where they
// are gathered, instead of waiting for it with the first token.  The hand-off shows between two
// tokens.  And the one before the prompt's last token, where beta samples the first one, beside
// whatever prompt.
#include <algorithm>
#include <cmath>
#include <limits>

#include "dynaserve/search_sketch.h"
#include "dynaserve/split_search.h"

namespace dynaserve {
namespace {

constexpr int kMostInAnswerProbes = 4;  // of kMostProbes

}  // namespace

// But for what is predicted.  Where beta's step ends is guessed too badly to count on a gap of less
// than two steps.
Outcome SplitSearch::PricedInAnswer(const Sketch& alpha, const Sketch& beta,
                                    std::int64_t split_token, const SearchRequest& request,
                                    const SearchOptions& options) {
  Outcome outcome = beta.priced;
  outcome.gap_ms = options.hand_off_ms + beta.TwoStepsMs();
  const double tokens =
      std::min(outcome.decode_tokens, static_cast<double>(split_token - request.prompt_tokens));
  if (tokens <= 0.0) return outcome;
  outcome.lost_prefill_ms = LostPrefillMs(alpha, tokens, options) +
                            LostPrefillMs(beta, outcome.decode_tokens - tokens, options);
  outcome.alpha_decode_step_ms = alpha.priced.decode_step_ms;
  outcome.alpha_decode_tokens = tokens;
  outcome.alpha_decodes_late_ms = alpha.priced.decodes_late_ms;
  outcome.decode_tokens -= tokens;
  // Until the hand-off it is alpha that needs the memory.
  const double overflow = std::max(0.0, static_cast<double>(split_token) - alpha.room_tokens);
  if (overflow * alpha.TokenMs() > outcome.overflow_tokens * outcome.token_ms) {
    outcome.overflow_tokens = overflow;
    outcome.token_ms = alpha.TokenMs();
  }
  return outcome;
}

double SplitSearch::GuessInAnswer(const Sketch& alpha, const Sketch& beta, std::int64_t split_token,
                                  const SearchRequest& request,
                                  const SearchOptions& options) const {
  const auto prompt = static_cast<double>(request.prompt_tokens - alpha.cached_tokens);
  const double work_ms = alpha.PrefillMs(prompt) + alpha.prompt_late_ms;
  const auto more = static_cast<double>(split_token - request.prompt_tokens);
  Outcome outcome = PricedInAnswer(alpha, beta, split_token, request, options);
  outcome.ttft_ms = alpha.begins_ms + work_ms;
  const double moving_ms = options.MovingMs(split_token);
  outcome.others_wait_ms =
      OthersWaitMs(alpha.begins_ms, work_ms + moving_ms, options.arrivals_per_ms) +
      beta.OthersWaitMs(moving_ms, options.arrivals_per_ms);
  outcome.hand_off_ms = options.hand_off_price_ms + options.hand_off_price_share * outcome.ttft_ms;
  const double end_ms = outcome.ttft_ms + more * alpha.decode_step_ms;
  const double last_tokens = more > 0.0 ? 1.0 : alpha.LastTokens(prompt);
  const double ready_ms = KvThereMs(alpha.begins_ms, end_ms, static_cast<double>(split_token),
                                    last_tokens, options.kv_token_ms) +
                          options.hand_off_ms;
  // The step that runs then is half over, on average.
  const double start_ms = std::max(ready_ms + 0.5 * beta.decode_step_ms, beta.beta_seat_ms);
  outcome.gap_ms = std::max(outcome.gap_ms, start_ms + beta.RunningMs() - end_ms);
  return ObjectiveMs(outcome, request.slo);
}

// Before the prompt's last token, at its end, a token later, during which the KV of the prompt
// arrives, and when beta gets a seat.
void SplitSearch::DraftInAnswer(Sketch& alpha, Sketch& beta, const SearchRequest& request,
                                const SearchOptions& options) {
  const std::int64_t prompt = request.prompt_tokens;
  if (prompt > 1) {
    const double guess_ms = GuessCut(alpha, beta, prompt - 1, request, options);
    drafts_.push_back({guess_ms, &alpha, &beta, prompt - 1, false});
  }
  const auto draft = [&](std::int64_t split) {
    if (split > prompt + request.expected_output_tokens - 2) return;  // nothing is left for beta
    const double guess_ms = GuessInAnswer(alpha, beta, split, request, options);
    drafts_.push_back({guess_ms, &alpha, &beta, split, false});
  };
  draft(prompt);
  const double gap_ms = options.hand_off_ms + beta.TwoStepsMs();
  const double first_ms = alpha.begins_ms + alpha.PromptMs(prompt) + alpha.prompt_late_ms;
  const double late_ms = beta.beta_seat_ms + beta.RunningMs() - gap_ms - first_ms;
  const double more = std::ceil(std::clamp(late_ms / alpha.decode_step_ms, 0.0, 1e9));
  if (more > 1.0) draft(prompt + static_cast<std::int64_t>(more));
  if (more > 0.0 || options.kv_token_ms > 0.0) draft(prompt + 1);
}

bool SplitSearch::WasTried(const Draft& draft) const {
  return std::ranges::any_of(tried_, [&](const Tried& tried) {
    return tried.split_token == draft.split_token && tried.alpha == draft.alpha->index &&
           tried.beta == draft.beta->index;
  });
}

void SplitSearch::TryInAnswer(std::span<const SearchInstance> instances,
                              const SearchRequest& request, const SearchOptions& options,
                              double now_ms, Choice& best, int& probes) {
  while (probes < kMostInAnswerProbes) {
    drafts_.clear();
    for (Sketch& alpha : sketches_) {
      for (Sketch& beta : sketches_) {
        if (&alpha != &beta) DraftInAnswer(alpha, beta, request, options);
      }
    }
    const Draft* next = nullptr;
    double next_ms = WorthProbingMs(best.objective_ms);
    for (const Draft& draft : drafts_) {
      if (draft.objective_ms >= next_ms || WasTried(draft)) continue;
      next = &draft;
      next_ms = draft.objective_ms;
    }
    if (next == nullptr) return;
    ++probes;
    Sketch& alpha = *next->alpha;
    Sketch& beta = *next->beta;
    const Choice tried = ExactCut(instances, alpha, beta, alpha.index, beta.index,
                                  next->split_token, request, options, now_ms);
    Note(tried);
    if (tried.objective_ms < best.objective_ms) best = tried;
    // What is known now of both, for other cuts.
    alpha.begins_ms = tried.alpha_start_ms - now_ms;
    if (tried.split_token >= request.prompt_tokens) {
      alpha.prompt_late_ms =
          tried.outcome.ttft_ms - alpha.begins_ms - alpha.PromptMs(request.prompt_tokens);
    }
    const double start_ms = tried.beta_start_ms - now_ms;
    const bool is_late = tried.beta_start_ms > tried.hand_off_ms + beta.RunningMs();
    beta.beta_seat_ms = is_late ? start_ms : std::min(beta.beta_seat_ms, start_ms);
  }
}

}  // namespace dynaserve
