#include "dynaserve/placement.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace dynaserve {
namespace {

using Instances = std::span<const InstanceLoad>;

struct Groups {
  Instances alpha;
  Instances beta;
};

struct Split {
  PlacementReason reason;
  std::int64_t token = 0;  // meaningful only if the reason cuts

  bool cuts() const {
    return reason == PlacementReason::kForced || reason == PlacementReason::kPolicy;
  }
};

std::int64_t ExpectedEnd(const RequestSpec& request) {
  return ComputedTokens(request.prompt_tokens,
                        std::min(request.expected_output_tokens, request.max_output_tokens));
}

std::int64_t LimitEnd(const RequestSpec& request) {
  return ComputedTokens(request.prompt_tokens, request.max_output_tokens);
}

// nullopt: the policy does not cut.
std::optional<std::int64_t> PolicySplit(const Options& options, const RequestSpec& request) {
  switch (options.policy) {
    case Policy::kColocated:
      return std::nullopt;
    case Policy::kDisaggregated:
      return request.prompt_tokens;
    case Policy::kFixed:
      return std::llround(options.ratio * static_cast<double>(ExpectedEnd(request)));
    case Policy::kDynamic:
    case Policy::kPaper:
    case Policy::kExhaustive:
      return std::nullopt;
  }
  return std::nullopt;
}

Split ChooseSplit(const Options& options, const RequestSpec& request, std::size_t num_instances) {
  using enum PlacementReason;
  const std::int64_t limit_end = LimitEnd(request);
  if (!request.may_cut) return {kNotCuttable};
  if (limit_end < 2) return {kPromptTooShort};
  if (num_instances == 1) return {kSingleInstance};

  const std::optional<std::int64_t> token =
      request.forced_split ? request.forced_split : PolicySplit(options, request);
  if (!token) return {kColocated};
  if (*token <= 0) return {kSplitAtStart};
  if (*token >= limit_end) return {kSplitAtEnd};
  return {request.forced_split ? kForced : kPolicy, *token};
}

Groups GroupsOf(const Options& options, Instances instances) {
  const bool one_way = options.policy == Policy::kDisaggregated ||
                       (options.policy == Policy::kFixed && options.prefill_instances > 0);
  if (!one_way || instances.size() == 1) {
    return {instances, instances};
  }
  const auto wanted = static_cast<std::size_t>(options.prefill_instances);
  const std::size_t num_prefilling =
      wanted > 0 ? std::min(wanted, instances.size() - 1) : instances.size() / 2;
  return {instances.first(num_prefilling), instances.subspan(num_prefilling)};
}

// nullptr: `group` holds nothing but `except`.
const InstanceLoad* LeastReserved(Instances group, const InstanceLoad* except = nullptr) {
  const InstanceLoad* best = nullptr;
  const auto key = [](const InstanceLoad& load) {
    return std::tie(load.reserved_tokens, load.last_reserved);
  };
  for (const InstanceLoad& load : group) {
    if (&load == except) continue;
    if (best == nullptr || key(load) < key(*best)) best = &load;
  }
  return best;
}

Placement Cut(const Split& split, const RequestSpec& request, const Groups& groups) {
  const InstanceLoad* alpha = LeastReserved(groups.alpha);
  const InstanceLoad* beta = LeastReserved(groups.beta, alpha);
  const std::int64_t end_token = std::max(ExpectedEnd(request), split.token + 1);
  return {{alpha->instance_id, 0, split.token},
          MicroRequest{beta->instance_id, split.token, end_token},
          split.reason,
          std::nullopt};
}

Placement Whole(const Split& split, const RequestSpec& request, const Groups& groups) {
  // Prefilling instances do not decode, unless a cut at the end says that they do.
  const bool on_alpha = split.reason == PlacementReason::kSplitAtEnd;
  const InstanceLoad* instance = LeastReserved(on_alpha ? groups.alpha : groups.beta);
  return {
      {instance->instance_id, 0, ExpectedEnd(request)}, std::nullopt, split.reason, std::nullopt};
}

}  // namespace

bool IsCut(PlacementReason reason) {
  using enum PlacementReason;
  return reason == kForced || reason == kPolicy || reason == kLevelsPrefill ||
         reason == kGathersDecodes || reason == kBalanced;
}

std::int64_t ComputedTokens(std::int64_t prompt_tokens, std::int64_t output_tokens) {
  return prompt_tokens + std::max<std::int64_t>(output_tokens - 1, 0);
}

std::optional<Placement> ChooseWholeOnly(const RequestSpec& request,
                                         std::span<const InstanceLoad> instances) {
  if (!request.fits_whole_only || (request.forced_split && request.may_cut)) return std::nullopt;
  const InstanceLoad* least = LeastReserved(instances);
  if (least == nullptr || !least->whole_only) return std::nullopt;
  return Placement{{least->instance_id, 0, ExpectedEnd(request)},
                   std::nullopt,
                   PlacementReason::kWholeOnly,
                   std::nullopt};
}

std::optional<Placement> ChoosePlacement(const Options& options, const RequestSpec& request,
                                         std::span<const InstanceLoad> instances) {
  if (instances.empty()) return std::nullopt;
  const Split split = ChooseSplit(options, request, instances.size());
  const Groups groups = GroupsOf(options, instances);
  return split.cuts() ? Cut(split, request, groups) : Whole(split, request, groups);
}

}  // namespace dynaserve
