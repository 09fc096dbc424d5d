// What LiveFleet takes from a request: its lengths, and what is left of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dynaserve/execution_predictor.h"
#include "dynaserve/split_search.h"
#include "dynaserve/types.h"

namespace dynaserve {

inline std::int64_t OutputsOf(const RequestSpec& request) {
  return std::min(request.expected_output_tokens, request.max_output_tokens);
}

inline std::int64_t LikelyOutputs(const RequestSpec& request) {
  return std::min(std::max(request.likely_output_tokens, request.expected_output_tokens),
                  request.max_output_tokens);
}

inline SearchRequest Wanted(const RequestSpec& request) {
  SearchRequest wanted;
  wanted.prompt_tokens = std::max<std::int64_t>(1, request.prompt_tokens);
  wanted.expected_output_tokens = std::max<std::int64_t>(1, OutputsOf(request));
  wanted.likely_output_tokens = std::max<std::int64_t>(1, LikelyOutputs(request));
  wanted.may_cut = request.may_cut;
  wanted.slo = request.slo;
  return wanted;
}

inline std::int64_t EndToken(const SearchRequest& request) {
  return ComputedTokens(request.prompt_tokens, request.expected_output_tokens);
}

// Of its tokens [computed, end_token).
inline VirtualRequest RestUpTo(const SearchRequest& request, std::int64_t end_token,
                               std::int64_t computed) {
  const std::int64_t prefill_end = std::min(end_token, request.prompt_tokens);
  return {0, computed, std::max<std::int64_t>(0, prefill_end - computed),
          std::max<std::int64_t>(0, end_token - std::max(computed, request.prompt_tokens)), 0.0};
}

// Others' requests have the keys from here on; ours never come so far.
constexpr std::uint64_t kFirstOther = std::uint64_t{1} << 62;

// On the timeline of an instance; side: 0 is alpha or the whole request, 1 beta.
inline std::uint64_t KeyOf(std::uint64_t ordinal, std::size_t side) { return 2 * ordinal + side; }

}  // namespace dynaserve
