#include "dynaserve/split_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "dynaserve/placement.h"
#include "dynaserve/search_sketch.h"

namespace dynaserve {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

SplitSearch::SplitSearch() = default;
SplitSearch::~SplitSearch() = default;
SplitSearch::SplitSearch(SplitSearch&&) noexcept = default;

double SplitSearch::GuessWhole(const Sketch& sketch, const SearchRequest& request,
                               const SearchOptions& options) const {
  const double work_ms = sketch.PromptMs(request.prompt_tokens);
  Outcome outcome = sketch.priced;
  outcome.ttft_ms = sketch.begins_ms + work_ms;
  outcome.others_wait_ms = OthersWaitMs(sketch.begins_ms, work_ms, options.arrivals_per_ms);
  return ObjectiveMs(outcome, request.slo);
}

double SplitSearch::GuessCut(const Sketch& alpha, const Sketch& beta, std::int64_t split_token,
                             const SearchRequest& request, const SearchOptions& options) const {
  const auto cached = static_cast<double>(std::min(alpha.cached_tokens, split_token - 1));
  const auto split = static_cast<double>(split_token);
  const double alpha_ms = alpha.PrefillMs(split - cached);
  const double beta_ms = beta.PrefillMs(static_cast<double>(request.prompt_tokens - split_token));
  const double there_ms = KvThereMs(alpha.begins_ms, alpha.begins_ms + alpha_ms, split,
                                    alpha.LastTokens(split - cached), options.kv_token_ms);
  const double ready_ms = there_ms + options.hand_off_ms;
  // A beta waits for the step that runs when it becomes ready: half a step on average.
  const std::int64_t rest = request.prompt_tokens - split_token;
  const double start_ms = std::max(beta.BetaBeginsMs(rest), ready_ms + 0.5 * beta.decode_step_ms);
  const double work_ms = beta.BetaWorkMs(rest, beta_ms);
  return PriceCut({.alpha_queue_ms = alpha.begins_ms,
                   .alpha_ms = alpha_ms,
                   .beta_work_ms = work_ms,
                   .moving_ms = options.MovingMs(split_token),
                   .ttft_ms = start_ms + beta_ms},
                  beta, request, options);
}

double SplitSearch::PriceCut(const CutTimes& times, const Sketch& beta,
                             const SearchRequest& request, const SearchOptions& options) const {
  Outcome outcome = beta.priced;
  outcome.ttft_ms = times.ttft_ms;
  outcome.others_wait_ms =
      OthersWaitMs(times.alpha_queue_ms, times.alpha_ms + times.moving_ms,
                   options.arrivals_per_ms) +
      beta.OthersWaitMs(times.beta_work_ms + times.moving_ms, options.arrivals_per_ms);
  outcome.hand_off_ms = options.hand_off_price_ms + options.hand_off_price_share * outcome.ttft_ms;
  return ObjectiveMs(outcome, request.slo);
}

SplitSearch::PairGuess SplitSearch::GuessPair(Sketch& alpha, Sketch& beta,
                                              const SearchRequest& request,
                                              const SearchOptions& options) const {
  const std::int64_t most = request.prompt_tokens - 1;
  PairGuess guess{kNever, &alpha, &beta, most};
  for (const std::int64_t token : CutsWorthTrying(alpha, beta, request, options)) {
    const std::int64_t split = std::clamp(token, options.least_part_tokens, most);
    const double guess_ms = GuessCut(alpha, beta, split, request, options);
    if (guess_ms < guess.objective_ms) {
      guess.objective_ms = guess_ms;
      guess.split_token = split;
    }
  }
  return guess;
}

std::array<std::int64_t, 5> SplitSearch::CutsWorthTrying(const Sketch& alpha, const Sketch& beta,
                                                         const SearchRequest& request,
                                                         const SearchOptions& options) const {
  const auto prompt = static_cast<double>(request.prompt_tokens);
  // Where both queues of prefill end together.
  const double levelled = (beta.beta_begins_ms - alpha.begins_ms + prompt * beta.TokenMs()) /
                          (alpha.TokenMs() + beta.TokenMs());
  // Where alpha is done just as beta's queue is.
  const double seamless =
      (beta.beta_begins_ms - alpha.begins_ms - options.hand_off_ms) / alpha.TokenMs();
  // Where beta takes one cheap step, or one full one.
  // Where steps take no time there is no such token.
  const auto at = [](double tokens) {
    return tokens > 0.0 ? static_cast<std::int64_t>(std::min(tokens, 1e15)) : std::int64_t{0};
  };
  return {request.prompt_tokens - 1, at(levelled), at(seamless),
          request.prompt_tokens - at(beta.full_step_tokens),
          at(std::floor(levelled / alpha.full_step_tokens) * alpha.full_step_tokens)};
}

Choice SplitSearch::TryWhole(std::span<const SearchInstance> instances, std::size_t index,
                             const SearchRequest& request, const SearchOptions& options,
                             double now_ms) {
  SketchAll(instances.subspan(index, 1), request, options, now_ms);
  return ExactWhole(instances, index, sketches_.front(), request, options, now_ms);
}

Choice SplitSearch::ExactWhole(std::span<const SearchInstance> instances, std::size_t index,
                               const Sketch& sketch, const SearchRequest& request,
                               const SearchOptions& options, double now_ms) const {
  ExecutionPredictor& predictor = *instances[index].predictor;
  const std::int64_t end = ComputedTokens(request.prompt_tokens, request.expected_output_tokens);
  VirtualRequest whole = AlphaOf(request, request.prompt_tokens, sketch.cached_tokens, now_ms);
  whole.decode_tokens = end - request.prompt_tokens;
  const Forecast forecast = predictor.Predict(whole, now_ms, Horizon::kPrefillEnd);
  Choice choice;
  choice.alpha = index;
  choice.split_token = end;
  choice.alpha_start_ms = forecast.start_ms;
  choice.outcome = sketch.priced;
  choice.outcome.ttft_ms = forecast.prefill_end_ms - now_ms;
  choice.outcome.others_wait_ms =
      OthersWaitMs(forecast.start_ms - now_ms, forecast.prefill_end_ms - forecast.start_ms,
                   options.arrivals_per_ms);
  choice.objective_ms = ObjectiveMs(choice.outcome, request.slo);
  choice.whole_objective_ms = choice.objective_ms;
  return choice;
}

Choice SplitSearch::TryCut(std::span<const SearchInstance> instances, std::size_t alpha,
                           std::size_t beta, std::int64_t split_token, const SearchRequest& request,
                           const SearchOptions& options, double now_ms) {
  Sketch first;
  if (split_token >= request.prompt_tokens) {
    SketchAll(instances.subspan(alpha, 1), request, options, now_ms);
    first = sketches_.front();
  }
  SketchAll(instances.subspan(beta, 1), request, options, now_ms);
  return ExactCut(instances, first, sketches_.front(), alpha, beta, split_token, request, options,
                  now_ms);
}

Choice SplitSearch::ExactCut(std::span<const SearchInstance> instances, const Sketch& prefilling,
                             const Sketch& decoding, std::size_t alpha, std::size_t beta,
                             std::int64_t split_token, const SearchRequest& request,
                             const SearchOptions& options, double now_ms) const {
  const VirtualRequest first =
      AlphaOf(request, split_token, instances[alpha].cached_tokens, now_ms);
  const bool in_answer = split_token >= request.prompt_tokens;
  const Forecast computed = instances[alpha].predictor->Predict(first, now_ms, Horizon::kEnd);
  const double ready_ms =
      KvThereMs(computed, split_token, options.kv_token_ms) + options.hand_off_ms;
  const std::int64_t end = std::max(
      ComputedTokens(request.prompt_tokens, request.expected_output_tokens), split_token + 1);
  const Forecast continued = instances[beta].predictor->Predict(
      BetaOf(request, split_token, end, ready_ms), now_ms, Horizon::kPrefillEnd);
  Choice choice;
  choice.alpha = alpha;
  choice.beta = beta;
  choice.split_token = split_token;
  choice.alpha_start_ms = computed.start_ms;
  choice.hand_off_ms = ready_ms;
  choice.beta_start_ms = continued.start_ms;
  choice.outcome = in_answer ? PricedInAnswer(prefilling, decoding, split_token, request, options)
                             : decoding.priced;
  const double first_token_ms = in_answer ? computed.prefill_end_ms : continued.prefill_end_ms;
  choice.outcome.ttft_ms = first_token_ms - now_ms;
  choice.outcome.hand_off_ms =
      options.hand_off_price_ms + options.hand_off_price_share * choice.outcome.ttft_ms;
  if (in_answer) {
    choice.outcome.gap_ms = std::max(choice.outcome.gap_ms,
                                     continued.start_ms + decoding.RunningMs() - computed.end_ms);
  }
  const double beta_ms = decoding.BetaWorkMs(request.prompt_tokens - split_token,
                                             continued.prefill_end_ms - continued.start_ms);
  const double alpha_ms = std::min(computed.prefill_end_ms, computed.end_ms) - computed.start_ms;
  const double moving_ms = options.MovingMs(split_token);
  choice.outcome.others_wait_ms =
      OthersWaitMs(computed.start_ms - now_ms, alpha_ms + moving_ms, options.arrivals_per_ms) +
      decoding.OthersWaitMs(beta_ms + moving_ms, options.arrivals_per_ms);
  choice.objective_ms = ObjectiveMs(choice.outcome, request.slo);
  choice.whole_objective_ms = kNever;
  return choice;
}

Choice SplitSearch::Find(std::span<const SearchInstance> instances, const SearchRequest& request,
                         const SearchOptions& options, double now_ms) {
  tried_.clear();
  SketchAll(instances, request, options, now_ms);
  Choice best = BestWhole(instances, request, options, now_ms);
  const double whole_ms = best.objective_ms;
  const bool may_cut = request.may_cut && instances.size() > 1;
  int probes = 0;
  if (may_cut) TryInAnswer(instances, request, options, now_ms, best, probes);
  if (may_cut && request.prompt_tokens >= options.least_cut_prompt_tokens)
    Refine(instances, request, options, now_ms, best, probes);
  best.whole_objective_ms = whole_ms;
  best.probes = probes;
  return best;
}

Choice SplitSearch::BestWhole(std::span<const SearchInstance> instances,
                              const SearchRequest& request, const SearchOptions& options,
                              double now_ms) {
  std::array<std::pair<double, Sketch*>, kWholeProbes> guesses;
  guesses.fill({kNever, nullptr});
  for (Sketch& sketch : sketches_) {
    std::pair<double, Sketch*> guess{GuessWhole(sketch, request, options), &sketch};
    for (auto& kept : guesses) {
      if (kept.second == nullptr || guess.first < kept.first) std::swap(kept, guess);
      if (guess.second == nullptr) break;
    }
  }
  Choice best;
  best.objective_ms = kNever;
  for (const auto& [guess_ms, sketch] : guesses) {
    // The second one says in the record what the first one is better than.
    if (sketch == nullptr || (tried_.size() > 1 && guess_ms >= best.objective_ms)) break;
    const Choice tried = ExactWhole(instances, sketch->index, *sketch, request, options, now_ms);
    Note(tried);
    sketch->begins_ms = tried.alpha_start_ms - now_ms;
    if (tried.objective_ms < best.objective_ms) best = tried;
  }
  return best;
}

void SplitSearch::Note(const Choice& tried) {
  tried_.push_back(
      {tried.alpha, tried.beta, tried.split_token, tried.outcome.ttft_ms, tried.objective_ms});
}

void SplitSearch::Refine(std::span<const SearchInstance> instances, const SearchRequest& request,
                         const SearchOptions& options, double now_ms, Choice& best, int& probes) {
  if (request.prompt_tokens - 1 < options.least_part_tokens) return;
  ChartPairs(instances, request, options, now_ms, best.objective_ms, probes);
  while (probes < kMostProbes) {
    Draft* next = nullptr;
    double next_ms = WorthProbingMs(best.objective_ms);
    for (Draft& draft : drafts_) {
      if (draft.objective_ms < next_ms && !draft.is_probed && !WasTried(draft)) {
        next = &draft;
        next_ms = draft.objective_ms;
      }
    }
    if (next == nullptr) break;
    ++probes;
    for (Draft& draft : drafts_) {
      draft.is_probed |= draft.alpha == next->alpha && draft.beta == next->beta &&
                         draft.split_token == next->split_token;
    }
    const Choice tried = ExactCut(instances, *next->alpha, *next->beta, next->alpha->index,
                                  next->beta->index, next->split_token, request, options, now_ms);
    Note(tried);
    if (tried.objective_ms < best.objective_ms) best = tried;
  }
}

}  // namespace dynaserve
