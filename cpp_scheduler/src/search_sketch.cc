#include "dynaserve/search_sketch.h"

#include <algorithm>
#include <cmath>

#include "dynaserve/batch_rule.h"
#include "dynaserve/placement.h"

namespace dynaserve {
namespace {

constexpr std::size_t kMostShortlisted = 8;  // instances per side of a cut
constexpr double kMostPressure = 0.8;  // beyond, a queue would take for ever to be empty again

// How much later, per step, the decodes of an instance are for one more.  Where the fleet's are
// kept level, all of them, and all that wait there, as they are going to decode: by what their step
// is longer than if the fleet's were even, and not beyond the limit, as who would make it longer
// waits.  Else the others, by what it adds to a step beyond the limit.  By the context that a
// decode of the fleet has on average: young decodes grow old together, and what is about to end is
// soon no load.
double DecodesLateMs(const ExecutionPredictor& predictor, std::int64_t decodes,
                     const SearchOptions& options) {
  const double scale = predictor.cost_scale();
  const double limit_ms = predictor.limits().MostToAdmitMs();
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
  outcome.decode_tokens = static_cast<double>(request.expected_output_tokens - 1);
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

}  // namespace dynaserve
