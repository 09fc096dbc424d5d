// What SplitSearch is measured against: the same objective, but every whole run and every cut of
// every pair of instances is predicted exactly.  Slow: thousands of predictions for one request.
#pragma once

#include <cstdint>
#include <span>

#include "dynaserve/split_search.h"

namespace dynaserve {

// Cuts are tried at every `stride_tokens` tokens, inside the prompt (from
// SearchOptions::least_part_tokens on, and at its last token) and from its end on.  Nothing is
// reserved.  `instances` must not be empty; stride_tokens must be at least 1.
Choice FindExhaustively(SplitSearch& search, std::span<const SearchInstance> instances,
                        const SearchRequest& request, const SearchOptions& options,
                        std::int64_t stride_tokens, double now_ms);

}  // namespace dynaserve
