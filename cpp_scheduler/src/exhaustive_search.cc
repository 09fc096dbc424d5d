#include "dynaserve/exhaustive_search.h"

#include <algorithm>
#include <cassert>
#include <limits>

#include "dynaserve/placement.h"

namespace dynaserve {

Choice FindExhaustively(SplitSearch& search, std::span<const SearchInstance> instances,
                        const SearchRequest& request, const SearchOptions& options,
                        std::int64_t stride_tokens, double now_ms) {
  assert(!instances.empty() && stride_tokens >= 1);
  Choice best;
  best.objective_ms = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < instances.size(); ++i) {
    const Choice whole = search.TryWhole(instances, i, request, options, now_ms);
    if (i == 0 || whole.objective_ms < best.objective_ms) best = whole;
  }
  const double whole_ms = best.objective_ms;
  const std::int64_t prompt = request.prompt_tokens;
  const std::int64_t end = ComputedTokens(prompt, request.expected_output_tokens);
  int probes = 0;
  const auto probe = [&](std::size_t alpha, std::size_t beta, std::int64_t split) {
    ++probes;
    const Choice cut = search.TryCut(instances, alpha, beta, split, request, options, now_ms);
    if (cut.objective_ms < best.objective_ms) best = cut;
  };
  for (std::size_t alpha = 0; alpha < instances.size() && request.may_cut; ++alpha) {
    for (std::size_t beta = 0; beta < instances.size(); ++beta) {
      if (alpha == beta) continue;
      for (std::int64_t split = options.least_part_tokens; split < prompt; split += stride_tokens) {
        probe(alpha, beta, split);
      }
      if (prompt > 1) probe(alpha, beta, prompt - 1);
      for (std::int64_t split = prompt; split < end; split += stride_tokens) {
        probe(alpha, beta, split);
      }
    }
  }
  best.whole_objective_ms = whole_ms;
  best.probes = probes;
  return best;
}

}  // namespace dynaserve
