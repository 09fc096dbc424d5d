#include "dynaserve/split_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "dynaserve/batch_rule.h"
#include "dynaserve/placement.h"

namespace dynaserve {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kMostShortlisted = 8;  // instances per side of a cut
constexpr double kMostPressure = 0.8;  // beyond, a queue would take for ever to be empty again

VirtualRequest AlphaOf(const SearchRequest& request, std::int64_t split_token,
                       std::int64_t cached_tokens, double now_ms) {
  const std::int64_t prefill_end = std::min(split_token, request.prompt_tokens);
  const std::int64_t cached = std::min(cached_tokens, prefill_end - 1);
  return {0, cached, prefill_end - cached, split_token - prefill_end, now_ms};
}

VirtualRequest BetaOf(const SearchRequest& request, std::int64_t split_token,
                      std::int64_t end_token, double ready_ms) {
  const std::int64_t prefill = std::max<std::int64_t>(0, request.prompt_tokens - split_token);
  return {0, split_token, prefill, end_token - std::max(split_token, request.prompt_tokens),
          ready_ms};
}

}  // namespace

// One instance as the closed forms see it.
struct SplitSearch::Sketch {
  std::size_t index = 0;
  bool keeps_free = false;
  double queue_ms = 0.0;       // until a newcomer's prefill could begin
  double full_step_ms = 0.0;   // a step with as much prefill as pays
  double empty_step_ms = 0.0;  // one with a single token of it
  double full_step_tokens = 1.0;
  double decode_step_ms = 0.0;  // of decodes alone, with one more
  double limit_ms = 0.0;        // of a step with decodes; 0: none
  double room_tokens = 0.0;     // of KV, at the likely ends of all its requests
  std::int64_t cached_tokens = 0;

  double PrefillMs(double tokens) const {
    if (tokens <= 0.0) return 0.0;
    const double steps = std::floor(tokens / full_step_tokens);
    const double rest = tokens - steps * full_step_tokens;
    const double last_ms =
        rest > 0.0 ? empty_step_ms + (full_step_ms - empty_step_ms) * (rest / full_step_tokens)
                   : 0.0;
    return steps * full_step_ms + last_ms;
  }
  double TokenMs() const { return full_step_ms / full_step_tokens; }
};

SplitSearch::SplitSearch() = default;
SplitSearch::~SplitSearch() = default;
SplitSearch::SplitSearch(SplitSearch&&) noexcept = default;

void SplitSearch::SketchAll(std::span<const SearchInstance> instances, const SearchRequest& request,
                            double now_ms) {
  // Of many instances, those of the shortest queues on either side of a cut.
  ranked_.clear();
  for (std::size_t i = 0; i < instances.size(); ++i) {
    ranked_.push_back({instances[i].predictor->PrefillFreeMs(now_ms) - now_ms, i});
  }
  const auto shorter = [&](bool keeps_free) {
    return [&instances, keeps_free](const Ranked& a, const Ranked& b) {
      const bool first = instances[a.index].keeps_free == keeps_free;
      const bool second = instances[b.index].keeps_free == keeps_free;
      if (first != second) return first;
      return a.queue_ms != b.queue_ms ? a.queue_ms < b.queue_ms : a.index < b.index;
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
    const ExecutionPredictor::Load load = predictor.LoadThen(now_ms);
    const double scale = predictor.cost_scale();
    const StepRow row = predictor.table().RowOf(load.decodes, load.decode_context_tokens);
    const PrefillBudget budget = predictor.BudgetBeside(load, {request.prompt_tokens, 0});
    Sketch sketch;
    sketch.index = ranked_[k].index;
    sketch.keeps_free = instance.keeps_free;
    sketch.queue_ms = ranked_[k].queue_ms;
    sketch.full_step_tokens = static_cast<double>(std::max<std::int64_t>(1, budget.tokens));
    sketch.full_step_ms = std::max(budget.step_ms, row.StepMs(1, 0.0)) * scale;
    sketch.empty_step_ms = std::min(sketch.full_step_ms, row.StepMs(1, 0.0) * scale);
    sketch.decode_step_ms =
        scale * predictor.table().StepMs(
                    {0, 0.0, load.decodes + 1, load.decode_context_tokens + request.prompt_tokens});
    sketch.limit_ms = std::isfinite(limits.step_ms) ? limits.step_ms : 0.0;
    sketch.room_tokens = static_cast<double>(limits.kv_tokens - instance.promised_tokens);
    sketch.cached_tokens = std::min(instance.cached_tokens, request.prompt_tokens - 1);
    sketches_.push_back(sketch);
  }
}

Outcome SplitSearch::Priced(const Sketch& decoding, const SearchRequest& request,
                            const SearchOptions& options) const {
  Outcome outcome;
  outcome.decode_step_ms = decoding.decode_step_ms;
  outcome.decode_tokens = static_cast<double>(request.expected_output_tokens);
  outcome.token_ms = decoding.TokenMs();
  const auto likely_end =
      static_cast<double>(ComputedTokens(request.prompt_tokens, request.likely_output_tokens));
  outcome.overflow_tokens = std::max(0.0, likely_end - decoding.room_tokens);
  if (decoding.keeps_free) {
    // A step beside prefill lasts as long as it may.  What is lost delays everyone who comes before
    // the queue is empty again, which takes the longer the busier the fleet is.
    const double step_ms = std::max(decoding.decode_step_ms, decoding.limit_ms);
    const double lost_ms =
        options.prefill_pressure * options.lost_share * outcome.decode_tokens * step_ms;
    outcome.lost_prefill_ms =
        (lost_ms + OthersWaitMs(decoding.queue_ms, lost_ms, options.arrivals_per_ms)) /
        (1.0 - std::min(options.prefill_pressure, kMostPressure));
  }
  return outcome;
}

Outcome SplitSearch::PriceDecoding(const SearchInstance& instance, const SearchRequest& request,
                                   const SearchOptions& options, double now_ms) {
  SketchAll({&instance, 1}, request, now_ms);
  return Priced(sketches_.front(), request, options);
}

double SplitSearch::GuessWhole(const Sketch& sketch, const SearchRequest& request,
                               const SearchOptions& options) const {
  const double work_ms =
      sketch.PrefillMs(static_cast<double>(request.prompt_tokens - sketch.cached_tokens));
  Outcome outcome = Priced(sketch, request, options);
  outcome.ttft_ms = sketch.queue_ms + work_ms;
  outcome.others_wait_ms = OthersWaitMs(sketch.queue_ms, work_ms, options.arrivals_per_ms);
  return ObjectiveMs(outcome, request.slo);
}

double SplitSearch::GuessCut(const Sketch& alpha, const Sketch& beta, std::int64_t split_token,
                             const SearchRequest& request, const SearchOptions& options) const {
  const auto cached = static_cast<double>(std::min(alpha.cached_tokens, split_token - 1));
  const auto split = static_cast<double>(split_token);
  const double alpha_ms = alpha.PrefillMs(split - cached);
  const double beta_ms = beta.PrefillMs(static_cast<double>(request.prompt_tokens - split_token));
  const double moved_ms = options.kv_token_ms * split;
  const double ready_ms = alpha.queue_ms + std::max(alpha_ms, moved_ms) + options.hand_off_ms;
  Outcome outcome = Priced(beta, request, options);
  // A beta waits for the step that runs when it becomes ready: half a step on average.
  const double start_ms = std::max(beta.queue_ms, ready_ms + 0.5 * beta.decode_step_ms);
  outcome.ttft_ms = start_ms + beta_ms;
  outcome.others_wait_ms = OthersWaitMs(alpha.queue_ms, alpha_ms, options.arrivals_per_ms) +
                           OthersWaitMs(beta.queue_ms, beta_ms, options.arrivals_per_ms);
  outcome.hand_off_ms = options.hand_off_price_ms + options.hand_off_price_share * outcome.ttft_ms;
  return ObjectiveMs(outcome, request.slo);
}

Choice SplitSearch::TryWhole(std::span<const SearchInstance> instances, std::size_t index,
                             const SearchRequest& request, const SearchOptions& options,
                             double now_ms) {
  SketchAll(instances.subspan(index, 1), request, now_ms);
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
  choice.outcome = Priced(sketch, request, options);
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
  SketchAll(instances.subspan(beta, 1), request, now_ms);
  return ExactCut(instances, alpha, beta, sketches_.front(), split_token, request, options, now_ms);
}

Choice SplitSearch::ExactCut(std::span<const SearchInstance> instances, std::size_t alpha,
                             std::size_t beta, const Sketch& decoding, std::int64_t split_token,
                             const SearchRequest& request, const SearchOptions& options,
                             double now_ms) const {
  const VirtualRequest first =
      AlphaOf(request, split_token, instances[alpha].cached_tokens, now_ms);
  const bool in_answer = split_token >= request.prompt_tokens;
  const Forecast computed = instances[alpha].predictor->Predict(first, now_ms, Horizon::kEnd);
  const double moved_ms =
      computed.start_ms + options.kv_token_ms * static_cast<double>(split_token);
  const double ready_ms = std::max(computed.end_ms, moved_ms) + options.hand_off_ms;
  const std::int64_t end = std::max(
      ComputedTokens(request.prompt_tokens, request.expected_output_tokens), split_token + 1);
  const Forecast continued = instances[beta].predictor->Predict(
      BetaOf(request, split_token, end, ready_ms), now_ms, Horizon::kPrefillEnd);
  Choice choice;
  choice.alpha = alpha;
  choice.beta = beta;
  choice.split_token = split_token;
  choice.hand_off_ms = ready_ms;
  choice.beta_start_ms = continued.start_ms;
  choice.outcome = Priced(decoding, request, options);
  const double first_token_ms = in_answer ? computed.prefill_end_ms : continued.prefill_end_ms;
  choice.outcome.ttft_ms = first_token_ms - now_ms;
  choice.outcome.hand_off_ms =
      options.hand_off_price_ms + options.hand_off_price_share * choice.outcome.ttft_ms;
  if (in_answer) {
    choice.outcome.gap_ms = continued.start_ms + decoding.decode_step_ms - computed.end_ms;
  }
  choice.outcome.others_wait_ms =
      OthersWaitMs(computed.start_ms - now_ms,
                   std::min(computed.prefill_end_ms, computed.end_ms) - computed.start_ms,
                   options.arrivals_per_ms) +
      OthersWaitMs(decoding.queue_ms, continued.prefill_end_ms - continued.start_ms,
                   options.arrivals_per_ms);
  choice.objective_ms = ObjectiveMs(choice.outcome, request.slo);
  choice.whole_objective_ms = kNever;
  return choice;
}

Choice SplitSearch::Find(std::span<const SearchInstance> instances, const SearchRequest& request,
                         const SearchOptions& options, double now_ms) {
  tried_.clear();
  SketchAll(instances, request, now_ms);
  Choice best = BestWhole(instances, request, options, now_ms);
  const double whole_ms = best.objective_ms;
  const bool cuts = request.may_cut && instances.size() > 1 &&
                    request.prompt_tokens >= options.least_cut_prompt_tokens;
  int probes = 0;
  if (cuts) Refine(instances, request, options, now_ms, best, probes);
  best.whole_objective_ms = whole_ms;
  best.probes = probes;
  return best;
}

Choice SplitSearch::BestWhole(std::span<const SearchInstance> instances,
                              const SearchRequest& request, const SearchOptions& options,
                              double now_ms) {
  std::array<std::pair<double, const Sketch*>, kWholeProbes> guesses;
  guesses.fill({kNever, nullptr});
  for (const Sketch& sketch : sketches_) {
    std::pair<double, const Sketch*> guess{GuessWhole(sketch, request, options), &sketch};
    for (auto& kept : guesses) {
      if (kept.second == nullptr || guess.first < kept.first) std::swap(kept, guess);
      if (guess.second == nullptr) break;
    }
  }
  Choice best;
  best.objective_ms = kNever;
  for (const auto& [guess_ms, sketch] : guesses) {
    if (sketch == nullptr) break;
    const Choice tried = ExactWhole(instances, sketch->index, *sketch, request, options, now_ms);
    Note(tried);
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
  const std::int64_t least = options.least_part_tokens;
  const std::int64_t most = request.prompt_tokens - 1;
  if (most < least) return;
  struct Guess {
    double objective_ms = kNever;
    const Sketch* alpha = nullptr;
    const Sketch* beta = nullptr;
    std::int64_t split_token = 0;
  };
  constexpr std::size_t kKept = 3;
  std::array<Guess, kKept> kept;
  for (const Sketch& alpha : sketches_) {
    for (const Sketch& beta : sketches_) {
      if (alpha.index == beta.index) continue;
      Guess guess{kNever, &alpha, &beta, most};
      for (const std::int64_t token : CutsWorthTrying(alpha, beta, request, options)) {
        const std::int64_t split = std::clamp(token, least, most);
        const double guess_ms = GuessCut(alpha, beta, split, request, options);
        if (guess_ms < guess.objective_ms) {
          guess.objective_ms = guess_ms;
          guess.split_token = split;
        }
      }
      for (Guess& one : kept) {
        if (guess.objective_ms < one.objective_ms) std::swap(one, guess);
      }
    }
  }
  // Guesses err by steps that start late; a pair that is far behind is not worth a probe.
  const Guess* chosen = nullptr;
  Choice centre;
  const auto probe = [&](const Guess& guess, std::int64_t split) {
    split = std::clamp(split, least, most);
    for (const Tried& one : tried_) {
      if (one.alpha == guess.alpha->index && one.beta == guess.beta->index &&
          one.split_token == split) {
        return false;
      }
    }
    ++probes;
    const Choice tried = ExactCut(instances, guess.alpha->index, guess.beta->index, *guess.beta,
                                  split, request, options, now_ms);
    Note(tried);
    if (tried.objective_ms < best.objective_ms) best = tried;
    if (chosen != nullptr && tried.objective_ms >= centre.objective_ms) return false;
    chosen = &guess;
    centre = tried;
    return true;
  };
  for (const Guess& guess : kept) {
    if (guess.alpha == nullptr || guess.objective_ms > 1.25 * best.objective_ms) continue;
    if (probes < kMostProbes / 2) probe(guess, guess.split_token);
  }
  if (chosen == nullptr) return;
  // While beta would wait for its own queue, alpha computes for nothing more.
  while (probes < kMostProbes - 1) {
    const double spare_ms =
        centre.beta_start_ms - centre.hand_off_ms - chosen->beta->decode_step_ms;
    const auto spare_tokens = static_cast<std::int64_t>(spare_ms / chosen->alpha->TokenMs());
    if (spare_tokens < 1 || !probe(*chosen, centre.split_token + spare_tokens)) break;
  }
  // Around the best cut: whole steps of either side are where the objective bends.
  std::int64_t stride = std::max<std::int64_t>(
      1, std::min(request.prompt_tokens / 4,
                  static_cast<std::int64_t>(chosen->beta->full_step_tokens) / 2));
  while (probes < kMostProbes && stride > 0) {
    if (probe(*chosen, centre.split_token - stride)) continue;
    if (probes < kMostProbes && probe(*chosen, centre.split_token + stride)) continue;
    stride /= 2;
  }
}

std::array<std::int64_t, 5> SplitSearch::CutsWorthTrying(const Sketch& alpha, const Sketch& beta,
                                                         const SearchRequest& request,
                                                         const SearchOptions& options) const {
  const auto prompt = static_cast<double>(request.prompt_tokens);
  // Where both queues of prefill end together.
  const double levelled = (beta.queue_ms - alpha.queue_ms + prompt * beta.TokenMs()) /
                          (alpha.TokenMs() + beta.TokenMs());
  // Where alpha is done just as beta's queue is.
  const double seamless = (beta.queue_ms - alpha.queue_ms - options.hand_off_ms) / alpha.TokenMs();
  // Where beta takes one cheap step, or one full one.
  const auto at = [](double tokens) {
    return static_cast<std::int64_t>(std::clamp(tokens, 0.0, 1e15));
  };
  return {request.prompt_tokens - 1, at(levelled), at(seamless),
          request.prompt_tokens - at(beta.full_step_tokens),
          at(std::floor(levelled / alpha.full_step_tokens) * alpha.full_step_tokens)};
}

}  // namespace dynaserve
