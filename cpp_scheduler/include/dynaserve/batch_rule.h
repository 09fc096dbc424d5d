// The batch rule (the paper's Algorithm 2): how many prefill tokens the next step takes beside the
// decodes that it runs anyway.  Pure; milliseconds and tokens.
//
// Among the budgets that keep the predicted step within its limit the cheapest per prefill token
// wins, not the largest: where latency jumps (GEMM tiles), a step of 384 tokens can cost 46 ms and
// one of 512 tokens 67 ms.
#pragma once

#include <cstdint>
#include <span>

#include "dynaserve/cost_model.h"
#include "dynaserve/profile_table.h"

namespace dynaserve {

// A prompt, or the rest of one, that waits to be computed.
struct PrefillWork {
  std::int64_t tokens = 0;          // still to compute
  std::int64_t context_tokens = 0;  // computed or cached before them

  bool operator==(const PrefillWork&) const = default;
};

struct BatchLimits {
  double step_ms = 0.0;                 // of the predicted step; infinity: none
  std::int64_t max_tokens = 0;          // decodes and prefill of one step together
  std::int64_t min_prefill_tokens = 0;  // taken when not one token of prefill fits

  bool operator==(const BatchLimits&) const = default;
};

enum class BudgetReason {
  kAllWork,       // everything that waits fits
  kMaxTokens,     // BatchLimits::max_tokens
  kStepLimit,     // more would take longer than BatchLimits::step_ms
  kEfficiency,    // more would fit, and cost more per token
  kMinimumShare,  // not one token fits: BatchLimits::min_prefill_tokens, over the limit
};

struct PrefillBudget {
  std::int64_t tokens = 0;
  double step_ms = 0.0;  // predicted, decodes included
  BudgetReason reason = BudgetReason::kAllWork;
  std::int64_t within = 0;  // the largest budget within the limits; 0: none is

  bool operator==(const PrefillBudget&) const = default;
};

// Of several prefills in one step, in arrival order, each takes what is left of the budget.
BatchShape ShapeWith(const BatchShape& decodes, std::span<const PrefillWork> waiting,
                     std::int64_t prefill_tokens);

// decodes: what the step runs anyway; its own prefill fields count too (work that cannot wait).
// The largest budget within the limits is found exactly; efficiency is compared where the table has
// its bins and where one waiting prompt ends and the next begins, and a smaller budget wins if its
// cost per token is at most 1 % above the best.  If all that waits fits, its last tokens are not
// put off: all is taken at once, unless a step more for them is cheaper by a tenth of that step.
// Throws std::invalid_argument, naming the field, for a limit that is negative or not a number, or
// for waiting work without tokens.
PrefillBudget ChooseBudget(const ProfileTable& table, const BatchShape& decodes,
                           std::span<const PrefillWork> waiting, const BatchLimits& limits);

// Whether a step of these decodes alone, with one more of `context_tokens`, stays within `step_ms`:
// a prompt whose decode would push it over is better left waiting (the paper's
// latency-constrained-utilization point, section 4.2).
bool LeavesRoomForDecode(const ProfileTable& table, const BatchShape& decodes,
                         std::int64_t context_tokens, double step_ms);

}  // namespace dynaserve
