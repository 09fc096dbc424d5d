// What a prediction of each side tells of all cuts between two instances (SplitSearch::Chart).
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <utility>

#include "dynaserve/batch_rule.h"
#include "dynaserve/search_sketch.h"

namespace dynaserve {
namespace {

constexpr std::size_t kKeptPairs = 6;
constexpr int kUsualCharts = 2;          // pairs whose steps are looked at,
constexpr int kMostCharts = 4;           // and where none of them is of use
constexpr double kWorthCharting = 1.25;  // of the best so far
constexpr double kBeatTolerance = 1e-6;  // of a step
constexpr double kLeastBeat =
    1.0 / 16.0;                         // of alpha's step: shorter ones of beta make no difference
constexpr double kWaitsForASeat = 1.2;  // steps: for less, it waits for the one that runs

}  // namespace

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

}  // namespace dynaserve
