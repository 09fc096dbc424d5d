#include "dynaserve/batch_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace dynaserve {
namespace {

// A smaller step is also a shorter gap between tokens: it wins among equals, and the table's noise
// must not send the choice back and forth.
constexpr double kAsGood = 1.01;
// Of the step that a prompt is spared, what its last tokens may cost more for that.
constexpr double kWorthFinishing = 0.1;

void Check(std::span<const PrefillWork> waiting, const BatchLimits& limits) {
  if (std::isnan(limits.step_ms) || limits.step_ms < 0.0) {
    throw std::invalid_argument("step_ms is " + std::to_string(limits.step_ms) +
                                "; it must not be negative");
  }
  if (limits.max_tokens < 0) {
    throw std::invalid_argument("max_tokens is " + std::to_string(limits.max_tokens) +
                                "; it must not be negative");
  }
  if (limits.min_prefill_tokens < 0) {
    throw std::invalid_argument("min_prefill_tokens is " +
                                std::to_string(limits.min_prefill_tokens) +
                                "; it must not be negative");
  }
  for (const PrefillWork& work : waiting) {
    if (work.tokens < 1 || work.context_tokens < 0) {
      throw std::invalid_argument("waiting work of " + std::to_string(work.tokens) +
                                  " tokens after " + std::to_string(work.context_tokens) +
                                  "; it needs at least 1 after at least 0");
    }
  }
}

class Search {
 public:
  Search(const ProfileTable& table, const BatchShape& decodes, std::span<const PrefillWork> waiting)
      : row_(table.RowOf(decodes.decodes, decodes.decode_context_tokens)),
        decodes_(decodes),
        waiting_(waiting) {}

  double StepMs(std::int64_t tokens) const {
    const BatchShape shape = ShapeWith(decodes_, waiting_, tokens);
    return row_.StepMs(shape.prefill_tokens, shape.prefill_pairs);
  }

  // The largest budget in [0, most] whose step is within the limit; -1: not even 0 is.
  std::int64_t Largest(std::int64_t most, double limit_ms) const {
    if (StepMs(most) <= limit_ms) return most;
    if (StepMs(0) > limit_ms) return -1;
    std::int64_t fits = 0;
    std::int64_t exceeds = most;
    while (exceeds - fits > 1) {
      const std::int64_t middle = fits + (exceeds - fits) / 2;
      (StepMs(middle) <= limit_ms ? fits : exceeds) = middle;
    }
    return fits;
  }

  // The smallest candidate up to `most` that costs at most 1 % more per token than the best.
  std::int64_t Cheapest(std::int64_t most) const {
    const auto per_token = [](double step_ms, std::int64_t tokens) {
      return step_ms / static_cast<double>(tokens);
    };
    double best = per_token(StepMs(most), most);
    ForCandidates(most, [&](std::int64_t tokens, double step_ms) {
      best = std::min(best, per_token(step_ms, tokens));
      return true;
    });
    std::int64_t chosen = most;
    // Bins and ends of prompts both come in rising order: of each, the first that is good enough.
    ForCandidates(most, [&](std::int64_t tokens, double step_ms) {
      if (tokens >= chosen) return false;
      if (per_token(step_ms, tokens) > kAsGood * best) return true;
      chosen = tokens;
      return false;
    });
    return chosen;
  }

  // Whether computing all `most` tokens now, not only the `first` of them, costs little beside the
  // step for which the last ones would have to wait.
  bool PaysToFinish(std::int64_t first, std::int64_t most) const {
    const BatchShape all = ShapeWith(decodes_, waiting_, most);
    const BatchShape part = ShapeWith(decodes_, waiting_, first);
    const double rest_ms =
        row_.StepMs(decodes_.prefill_tokens + most - first,
                    decodes_.prefill_pairs + all.prefill_pairs - part.prefill_pairs);
    const double in_two_ms = StepMs(first) + rest_ms - StepMs(0);
    return StepMs(most) <= in_two_ms + kWorthFinishing * rest_ms;
  }

 private:
  // Between these points a step's latency is linear but for the pairs of attention, so its cost per
  // token is lowest at one of them, or nearly.  `visit` gets tokens and latency, and returns false
  // to skip the rest of its kind.
  template <typename Visit>
  void ForCandidates(std::int64_t most, Visit visit) const {
    for (const double bin : kTokenBins) {
      const std::int64_t tokens = static_cast<std::int64_t>(bin) - decodes_.tokens();
      if (tokens >= most) break;
      if (tokens > 0 && !visit(tokens, StepMs(tokens))) break;
    }
    // Hundreds of short prompts may wait: their sum grows with the walk.
    BatchShape shape = decodes_;
    std::int64_t end = 0;
    for (const PrefillWork& work : waiting_) {
      end += work.tokens;
      if (end >= most) break;
      shape.prefill_tokens += work.tokens;
      shape.prefill_pairs += PrefillPairs(work.tokens, work.context_tokens);
      if (!visit(end, row_.StepMs(shape.prefill_tokens, shape.prefill_pairs))) break;
    }
  }

  const StepRow row_;
  const BatchShape& decodes_;
  std::span<const PrefillWork> waiting_;
};

}  // namespace

BatchShape ShapeWith(const BatchShape& decodes, std::span<const PrefillWork> waiting,
                     std::int64_t prefill_tokens) {
  BatchShape shape = decodes;
  for (const PrefillWork& work : waiting) {
    if (prefill_tokens == 0) break;
    const std::int64_t taken = std::min(prefill_tokens, work.tokens);
    shape.prefill_tokens += taken;
    shape.prefill_pairs += PrefillPairs(taken, work.context_tokens);
    prefill_tokens -= taken;
  }
  return shape;
}

PrefillBudget ChooseBudget(const ProfileTable& table, const BatchShape& decodes,
                           std::span<const PrefillWork> waiting, const BatchLimits& limits) {
  Check(waiting, limits);
  const Search search(table, decodes, waiting);
  std::int64_t work = 0;
  for (const PrefillWork& prefill : waiting) work += prefill.tokens;
  const std::int64_t room = std::max<std::int64_t>(0, limits.max_tokens - decodes.tokens());
  const std::int64_t most = std::min(work, room);
  const std::int64_t share = std::min(most, limits.min_prefill_tokens);

  const std::int64_t largest = search.Largest(most, limits.step_ms);
  if (share > 0 && largest < 1) {
    return {share, search.StepMs(share), BudgetReason::kMinimumShare};
  }
  const std::int64_t within = std::max<std::int64_t>(largest, 0);
  std::int64_t cheapest = within > 0 ? search.Cheapest(within) : 0;
  if (within == work && cheapest < work && search.PaysToFinish(cheapest, work)) cheapest = work;
  BudgetReason reason = BudgetReason::kAllWork;
  if (cheapest < within) {
    reason = BudgetReason::kEfficiency;
  } else if (within < most) {
    reason = BudgetReason::kStepLimit;
  } else if (most < work) {
    reason = BudgetReason::kMaxTokens;
  }
  return {cheapest, search.StepMs(cheapest), reason, within};
}

bool LeavesRoomForDecode(const ProfileTable& table, const BatchShape& decodes,
                         std::int64_t context_tokens, double step_ms) {
  BatchShape shape{0, 0.0, decodes.decodes + 1, decodes.decode_context_tokens + context_tokens};
  return table.StepMs(shape) <= step_ms;
}

}  // namespace dynaserve
