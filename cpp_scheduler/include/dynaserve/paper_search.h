// The paper's Algorithm 1 as written, kept as a baseline: a bounded binary search over the share of
// the request that goes to the first instance of a pair, for equal completion times of all work on
// both.  It begins at pure disaggregation; the two parts do not wait for each other in it.
#pragma once

#include <cstdint>

#include "dynaserve/execution_predictor.h"

namespace dynaserve {

inline constexpr int kPaperProbes = 6;

struct BalancedSplit {
  std::int64_t split_token = 0;  // in [0, end_token]
  double imbalance_ms = 0.0;     // |T1 - T2| there
  int probes = 0;
};

// end_token: tokens that the request computes in all.
BalancedSplit FindBalancedSplit(ExecutionPredictor& alpha, ExecutionPredictor& beta,
                                std::int64_t prompt_tokens, std::int64_t end_token,
                                double tolerance_ms, double now_ms);

}  // namespace dynaserve
