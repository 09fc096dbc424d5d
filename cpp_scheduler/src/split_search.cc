#include "dynaserve/split_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "dynaserve/batch_rule.h"
#include "dynaserve/placement.h"
#include "dynaserve/search_sketch.h"

namespace dynaserve {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kMostShortlisted = 8;  // instances per side of a cut
constexpr std::size_t kKeptPairs = 6;
constexpr int kUsualCharts = 2;          // pairs whose steps are looked at,
constexpr int kMostCharts = 4;           // and where none of them is of use
constexpr double kWorthCharting = 1.25;  // of the best so far
constexpr double kBeatTolerance = 1e-6;  // of a step
constexpr double kLeastBeat =
    1.0 / 16.0;                         // of alpha's step: shorter ones of beta make no difference
constexpr double kWaitsForASeat = 1.2;  // steps: for less, it waits for the one that runs
constexpr double kMostPressure = 0.8;   // beyond, a queue would take for ever to be empty again

VirtualRequest AlphaOf(const SearchRequest& request, std::int64_t split_token,
                       std::int64_t cached_tokens, double now_ms) {
  const std::int64_t prefill_end = std::min(split_token, request.prompt_tokens);
  const std::int64_t cached = std::min(cached_tokens, prefill_end - 1);
  return {0, cached, prefill_end - cached, split_token - prefill_end, now_ms};
}

VirtualRequest BetaOf(const SearchRequest& request, std::int64_t split_token,
                      std::int64_t end_token, double ready_ms) {
  const std::int64_t prefill = std::max<std::int64_t>(0, request.prompt_tokens - split_token);
  return {.context_tokens = split_token,
          .prefill_tokens = prefill,
          .decode_tokens = end_token - std::max(split_token, request.prompt_tokens),
          .ready_ms = ready_ms,
          .is_beta = true};
}

// How much later, per step, the decodes of an instance are for one more.  Where the fleet's are
// kept level, all of them, and all that wait there, as they are going to decode: by what their step
// is longer than if the fleet's were even, and not beyond the limit, as who would make it longer
// waits.  Else the others, by what it adds to a step beyond the limit.  By the context that a
// decode of the fleet has on average: young decodes grow old together, and what is about to end is
// soon no load.
double DecodesLateMs(const ExecutionPredictor& predictor, std::int64_t decodes,
                     const SearchOptions& options) {
  const double scale = predictor.cost_scale();
  const double limit_ms = predictor.limits().step_ms;
  const auto step_ms = [&](std::int64_t count) {
    return scale * predictor.table().DecodesMs(count, options.mean_context_tokens);
  };
  if (std::isfinite(options.level_step_ms)) {
    const double excess_ms =
        std::min(step_ms(decodes + 1), limit_ms) - scale * options.level_step_ms;
    return static_cast<double>(decodes + 1) * std::max(0.0, excess_ms);
  }
  const auto excess_ms = [&](std::int64_t count) {
    return std::max(0.0, step_ms(count) - limit_ms);
  };
  return static_cast<double>(decodes) * (excess_ms(decodes + 1) - excess_ms(decodes));
}

}  // namespace

SplitSearch::SplitSearch() = default;
SplitSearch::~SplitSearch() = default;
SplitSearch::SplitSearch(SplitSearch&&) noexcept = default;

// What a cached token saves on an instance without decodes; 0 where nothing is cached.
double SplitSearch::CachedTokenMs(std::span<const SearchInstance> instances,
                                  const SearchRequest& request) {
  const auto has_some = [](const SearchInstance& instance) { return instance.cached_tokens > 0; };
  const auto found = std::find_if(instances.begin(), instances.end(), has_some);
  if (found == instances.end()) return 0.0;
  ExecutionPredictor& predictor = *found->predictor;
  const PrefillBudget budget = predictor.BudgetBeside({}, {request.prompt_tokens, 0});
  if (budget.tokens == 0) return 0.0;
  return predictor.cost_scale() * budget.step_ms / static_cast<double>(budget.tokens);
}

void SplitSearch::SketchAll(std::span<const SearchInstance> instances, const SearchRequest& request,
                            const SearchOptions& options, double now_ms) {
  // Of many instances, those of the shortest queues on either side of a cut; what one has cached of
  // the prompt is as good as a shorter queue.
  ranked_.clear();
  const double token_ms = CachedTokenMs(instances, request);
  for (std::size_t i = 0; i < instances.size(); ++i) {
    const double queue_ms = instances[i].predictor->PrefillFreeMs(now_ms) - now_ms;
    const double cached_ms = token_ms * static_cast<double>(instances[i].cached_tokens);
    ranked_.push_back({queue_ms, queue_ms - cached_ms, i});
  }
  const auto shorter = [&](bool keeps_free) {
    return [&instances, keeps_free](const Ranked& a, const Ranked& b) {
      const bool first = instances[a.index].keeps_free == keeps_free;
      const bool second = instances[b.index].keeps_free == keeps_free;
      if (first != second) return first;
      return a.rank_ms != b.rank_ms ? a.rank_ms < b.rank_ms : a.index < b.index;
    };
  };
  std::size_t taken = ranked_.size();
  if (taken > 2 * kMostShortlisted) {
    for (const bool keeps_free : {true, false}) {
      const auto from = ranked_.begin() + (keeps_free ? 0 : kMostShortlisted);
      std::partial_sort(from, from + kMostShortlisted, ranked_.end(), shorter(keeps_free));
    }
    taken = 2 * kMostShortlisted;
  }
  sketches_.clear();
  for (std::size_t k = 0; k < taken; ++k) {
    const SearchInstance& instance = instances[ranked_[k].index];
    ExecutionPredictor& predictor = *instance.predictor;
    const InstanceLimits& limits = predictor.limits();
    const ExecutionPredictor::Load load = predictor.LoadThen(now_ms, instance.own_key);
    const double scale = predictor.cost_scale();
    const StepRow row = predictor.table().RowOf(load.decodes, load.decode_context_tokens);
    const PrefillBudget budget =
        predictor.BudgetBeside(load, {request.prompt_tokens + load.prefill_tokens, 0});
    Sketch sketch;
    sketch.index = ranked_[k].index;
    sketch.keeps_free = instance.keeps_free;
    sketch.behind = instance.behind;
    sketch.queue_ms = ranked_[k].queue_ms;
    sketch.full_step_tokens = static_cast<double>(std::max<std::int64_t>(1, budget.tokens));
    sketch.full_step_ms = std::max(budget.step_ms, row.StepMs(1, 0.0)) * scale;
    sketch.empty_step_ms = std::min(sketch.full_step_ms, row.StepMs(1, 0.0) * scale);
    sketch.decode_step_ms =
        scale * predictor.table().StepMs(
                    {0, 0.0, load.decodes + 1, load.decode_context_tokens + request.prompt_tokens});
    const bool levels = std::isfinite(options.level_step_ms);
    sketch.decodes_late_ms = DecodesLateMs(
        predictor, levels ? predictor.Answers(now_ms, instance.own_key) : load.decodes, options);
    sketch.limit_ms = std::isfinite(limits.step_ms) ? limits.step_ms : 0.0;
    sketch.room_tokens = static_cast<double>(limits.kv_tokens - instance.promised_tokens);
    sketch.row = row;
    const double ahead_steps =
        std::floor(static_cast<double>(load.prefill_tokens) / sketch.full_step_tokens);
    const double seat_ms = predictor.AdmittedMs(now_ms, request.prompt_tokens) - now_ms;
    sketch.begins_ms = std::max(sketch.queue_ms + ahead_steps * sketch.full_step_ms, seat_ms);
    const ExecutionPredictor::Overtaken before = predictor.BeforeBeta(now_ms);
    const double before_steps =
        std::ceil(static_cast<double>(before.prefill_tokens) / sketch.full_step_tokens);
    const double admitted_ms = predictor.AdmittedMs(now_ms, request.prompt_tokens, true);
    sketch.beta_seat_ms = admitted_ms - now_ms;
    sketch.beta_begins_ms =
        std::max(before.step_ms - now_ms + before_steps * sketch.full_step_ms, sketch.beta_seat_ms);
    sketch.overtaken = static_cast<double>(before.requests);
    sketch.seat_ms = predictor.SeatMs(admitted_ms, request.expected_output_tokens);
    sketch.cached_tokens = std::min(instance.cached_tokens, request.prompt_tokens - 1);
    sketch.priced = Priced(sketch, request, options);
    sketches_.push_back(sketch);
  }
}

Outcome SplitSearch::Priced(const Sketch& decoding, const SearchRequest& request,
                            const SearchOptions& options) const {
  Outcome outcome;
  outcome.decode_step_ms = decoding.decode_step_ms;
  outcome.decode_tokens = static_cast<double>(request.expected_output_tokens);
  outcome.token_ms = decoding.TokenMs();
  outcome.decodes_late_ms = decoding.decodes_late_ms;
  const auto likely_end =
      static_cast<double>(ComputedTokens(request.prompt_tokens, request.likely_output_tokens));
  outcome.overflow_tokens = std::max(0.0, likely_end - decoding.room_tokens);
  outcome.lost_prefill_ms = LostPrefillMs(decoding, outcome.decode_tokens, options);
  return outcome;
}

double SplitSearch::LostPrefillMs(const Sketch& decoding, double decode_tokens,
                                  const SearchOptions& options) {
  if (!decoding.keeps_free || !(decode_tokens > 0.0)) return 0.0;
  // A step beside prefill lasts as long as it may.  What is lost delays everyone who comes before
  // the queue is empty again, which takes the longer the busier the fleet is.
  const double step_ms = std::max(decoding.decode_step_ms, decoding.limit_ms);
  const double lasts_ms = decode_tokens * step_ms;
  // It prefills for as long as its queue lasts, whoever comes.
  const double pressure =
      std::max(options.prefill_pressure, std::min(1.0, decoding.queue_ms / lasts_ms));
  const double lost_ms = pressure * options.lost_share * lasts_ms;
  const double others_ms =
      std::max(static_cast<double>(decoding.behind) * lost_ms,
               OthersWaitMs(decoding.queue_ms, lost_ms, options.arrivals_per_ms));
  return (lost_ms + others_ms) / (1.0 - std::min(options.prefill_pressure, kMostPressure));
}

Outcome SplitSearch::PriceDecoding(const SearchInstance& instance, const SearchRequest& request,
                                   const SearchOptions& options, double now_ms) {
  SketchAll({&instance, 1}, request, options, now_ms);
  return sketches_.front().priced;
}

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

// Drafts the cuts of the pairs that are guessed to be the best.
void SplitSearch::ChartPairs(std::span<const SearchInstance> instances,
                             const SearchRequest& request, const SearchOptions& options,
                             double now_ms, double best_ms, int& probes) {
  std::array<PairGuess, kKeptPairs> kept;
  for (Sketch& alpha : sketches_) {
    for (Sketch& beta : sketches_) {
      if (alpha.index == beta.index) continue;
      PairGuess guess = GuessPair(alpha, beta, request, options);
      for (PairGuess& one : kept) {
        if (guess.objective_ms < one.objective_ms) std::swap(one, guess);
      }
    }
  }
  drafts_.clear();
  for (int charts = 0; charts < kMostCharts && probes < kMostProbes; ++charts) {
    PairGuess* next = nullptr;
    for (PairGuess& guess : kept) {
      if (guess.alpha == nullptr) continue;
      // What the chart of one pair has told of an instance holds for its other pairs.
      if (charts > 0) guess = GuessPair(*guess.alpha, *guess.beta, request, options);
      if (next == nullptr || guess.objective_ms < next->objective_ms) next = &guess;
    }
    if (next == nullptr || next->objective_ms > kWorthCharting * best_ms) return;
    ++probes;
    Chart(instances, *next->alpha, *next->beta, next->split_token, request, options, now_ms);
    *next = {};
    const auto is_better = [&](const Draft& draft) { return draft.objective_ms < best_ms; };
    if (charts + 1 >= kUsualCharts && std::any_of(drafts_.begin(), drafts_.end(), is_better))
      return;
  }
}

// How long a step takes that computes only the first `tokens` of the `most` that one of `whole_ms`
// does, after `context_tokens`.
double SplitSearch::Sketch::PartOfStepMs(double whole_ms, std::int64_t tokens, std::int64_t most,
                                         std::int64_t context_tokens) const {
  const double part_ms = row->StepMs(tokens, PrefillPairs(tokens, context_tokens));
  const double full_ms = row->StepMs(most, PrefillPairs(most, context_tokens));
  return full_ms > 0.0 ? std::min(whole_ms, whole_ms * part_ms / full_ms) : whole_ms;
}

// A prefill's steps on one instance, as a prediction tells them; a shorter one has the same.
struct SplitSearch::Prefilling {
  const Sketch& sketch;
  std::span<const PrefillStep> steps;
  std::int64_t first_token;
  double start_ms;

  struct Took {
    double ms;
    std::int64_t last_tokens;  // of the step that computes the last one
  };
  double TookMs(std::int64_t token) const { return UpTo(token).ms; }
  Took UpTo(std::int64_t token) const {
    const auto ends_before = [](const PrefillStep& step, std::int64_t t) {
      return step.computed_tokens < t;
    };
    auto step = std::lower_bound(steps.begin(), steps.end(), token, ends_before);
    if (step == steps.end()) --step;
    const bool is_first = step == steps.begin();
    const double began_ms = is_first ? start_ms : std::prev(step)->end_ms;
    const std::int64_t began = is_first ? first_token : std::prev(step)->computed_tokens;
    const std::int64_t until = std::clamp(token, began + 1, step->computed_tokens);
    const double part_ms = sketch.PartOfStepMs(step->end_ms - began_ms, until - began,
                                               step->computed_tokens - began, began);
    return {began_ms - start_ms + part_ms, until - began};
  }
};

// What the charts of both sides tell of a pair.
struct SplitSearch::PairChart {
  Prefilling alpha, beta;
  double hand_off_ms, kv_token_ms;
  double now_ms;

  double BeatMs() const { return beta.sketch.decode_step_ms; }
  double ReadyMs(std::int64_t split) const {
    const Prefilling::Took took = alpha.UpTo(split);
    return KvThereMs(alpha.start_ms, alpha.start_ms + took.ms, static_cast<double>(split),
                     static_cast<double>(took.last_tokens), kv_token_ms) +
           hand_off_ms;
  }
  // A beta that waits for no queue starts as the step ends that runs when it is ready: these follow
  // each other from one that is known.
  double StartMs(double ready_ms, std::int64_t rest_tokens) const {
    const double least_start_ms = now_ms + beta.sketch.BetaBeginsMs(rest_tokens);
    if (ready_ms <= least_start_ms || BeatMs() <= 0.0) return std::max(ready_ms, least_start_ms);
    const double beats = std::ceil((ready_ms - beta.start_ms) / BeatMs() - kBeatTolerance);
    return std::max(beta.start_ms + beats * BeatMs(), least_start_ms);
  }
};

// One prediction of each side tells where its steps end: a cut just beyond such an end costs nearly
// a whole step more, which is what the objective jumps by.  All such cuts are drafts.
void SplitSearch::Chart(std::span<const SearchInstance> instances, Sketch& alpha, Sketch& beta,
                        std::int64_t split_token, const SearchRequest& request,
                        const SearchOptions& options, double now_ms) {
  const std::int64_t most = request.prompt_tokens - 1;
  const VirtualRequest first = AlphaOf(request, most, alpha.cached_tokens, now_ms);
  const double alpha_start_ms =
      instances[alpha.index].predictor->PredictPrefill(first, now_ms, alpha_steps_).start_ms;
  if (alpha_steps_.empty()) return;
  alpha.begins_ms = alpha_start_ms - now_ms;
  PairChart chart{{alpha, alpha_steps_, first.context_tokens, alpha_start_ms},
                  {beta, {}, split_token, 0.0},
                  options.hand_off_ms,
                  options.kv_token_ms,
                  now_ms};
  const double ready_ms = chart.ReadyMs(split_token);
  VirtualRequest rest = BetaOf(request, split_token, request.prompt_tokens + 1, ready_ms);
  rest.prefill_tokens = request.prompt_tokens - options.least_part_tokens;  // as long as any may be
  chart.beta.start_ms =
      instances[beta.index].predictor->PredictPrefill(rest, now_ms, beta_steps_).start_ms;
  if (beta_steps_.empty()) return;
  chart.beta.steps = beta_steps_;
  const double waited_ms = chart.beta.start_ms - std::max(ready_ms, now_ms + beta.beta_begins_ms);
  if (waited_ms > kWaitsForASeat * chart.BeatMs()) {
    beta.beta_begins_ms = chart.beta.start_ms - now_ms;
  }

  const auto draft = [&](std::int64_t token) {
    const std::int64_t split = std::clamp(token, options.least_part_tokens, most);
    const std::int64_t rest_tokens = request.prompt_tokens - split;
    const double start_ms = chart.StartMs(chart.ReadyMs(split), rest_tokens);
    const double beta_ms = chart.beta.TookMs(split_token + request.prompt_tokens - split);
    const CutTimes times{.alpha_queue_ms = alpha.begins_ms,
                         .alpha_ms = chart.alpha.TookMs(split),
                         .beta_work_ms = beta.BetaWorkMs(rest_tokens, beta_ms),
                         .moving_ms = options.MovingMs(split),
                         .ttft_ms = start_ms + beta_ms - now_ms};
    const double objective_ms = PriceCut(times, beta, request, options);
    drafts_.push_back({objective_ms, &alpha, &beta, split, false});
  };
  draft(split_token);
  draft(most);
  DraftAlphaSteps(chart, draft);
  for (const PrefillStep& step : beta_steps_) {
    draft(request.prompt_tokens - (step.computed_tokens - split_token));
  }
}

// At the ends of alpha's steps; and within them, just so many tokens that beta is ready for a step
// of its own, not for the one after it.
template <typename Drafted>
void SplitSearch::DraftAlphaSteps(const PairChart& chart, Drafted draft) {
  double began_ms = chart.alpha.start_ms;
  std::int64_t began = chart.alpha.first_token;
  for (const PrefillStep& step : chart.alpha.steps) {
    const std::int64_t tokens = step.computed_tokens - began;
    const double whole_ms = step.end_ms - began_ms;
    const auto ready_with = [&](std::int64_t part) {
      return began_ms + chart.hand_off_ms + chart.kv_token_ms * static_cast<double>(part) +
             chart.alpha.sketch.PartOfStepMs(whole_ms, part, tokens, began);
    };
    const double beat_ms = chart.BeatMs();
    if (beat_ms > kLeastBeat * whole_ms) {
      const double beats = std::ceil((ready_with(1) - chart.beta.start_ms) / beat_ms);
      const double first_ms = chart.beta.start_ms + beats * beat_ms;
      const double last_ms = ready_with(tokens);
      // Where KV moves slowly there are more beats than are worth a draft.
      const double stride_ms = std::max(beat_ms, kLeastBeat * (last_ms - first_ms));
      for (double at_ms = first_ms; at_ms < last_ms; at_ms += stride_ms) {
        std::int64_t enough = 1, too_many = tokens;
        while (too_many - enough > 1) {
          const std::int64_t middle = enough + (too_many - enough) / 2;
          (ready_with(middle) <= at_ms ? enough : too_many) = middle;
        }
        draft(began + enough);
      }
    }
    draft(step.computed_tokens);
    began_ms = step.end_ms;
    began = step.computed_tokens;
  }
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
  const auto at = [](double tokens) {
    return static_cast<std::int64_t>(std::clamp(tokens, 0.0, 1e15));
  };
  return {request.prompt_tokens - 1, at(levelled), at(seamless),
          request.prompt_tokens - at(beta.full_step_tokens),
          at(std::floor(levelled / alpha.full_step_tokens) * alpha.full_step_tokens)};
}

}  // namespace dynaserve
