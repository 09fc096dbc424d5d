// The plan of the fleet, and where a request goes by it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dynaserve/exhaustive_search.h"
#include "dynaserve/live_fleet.h"
#include "dynaserve/live_requests.h"
#include "dynaserve/paper_search.h"

namespace dynaserve {
namespace {

constexpr double kPlanEveryMs = 1000.0;
// Half-lives of smoothed numbers.  While some gather, few decodes may all be over for a second or
// two.
constexpr double kHalfLifeMs = 1000.0;
constexpr double kGatheredHalfLifeMs = 5000.0;
// While nothing gathers. A plan looks at every instance, and so not with each request of a large
// fleet.
constexpr double kBeginEveryMs = 10.0;
// Of the KV memory or the steps of instances that are short of it, what may be taken before one
// takes another request.
constexpr double kMostHeld = 0.9;

Placement WholeOn(const InstanceId& instance_id, std::int64_t end_token, PlacementReason reason,
                  Prediction prediction) {
  return {{instance_id, 0, end_token}, std::nullopt, reason, std::move(prediction)};
}

// What each of the instances is up to.
InstanceLimits Least(const InstanceLimits& a, const InstanceLimits& b) {
  return {std::min(a.max_requests, b.max_requests),
          std::min(a.max_step_tokens, b.max_step_tokens),
          std::min(a.min_prefill_tokens, b.min_prefill_tokens),
          std::min(a.kv_tokens, b.kv_tokens),
          std::min(a.step_ms, b.step_ms),
          std::min(a.MostToAdmitMs(), b.MostToAdmitMs())};
}

}  // namespace

// With one decode more.
double LiveFleet::EvenStepMs() const {
  const auto decodes = static_cast<std::int64_t>(
      std::ceil(smoothed_answers_ / static_cast<double>(planned_instances_)) + 1.0);
  return table_->DecodesMs(decodes, mean_context_tokens_);
}

// Sooner while nothing gathers: decodes that are placed before a plan stay where they are for as
// long as their answers last.
bool LiveFleet::IsPlanDue(std::size_t accepting, double now_ms) const {
  const double every_ms = plan_.gathering == 0 ? kBeginEveryMs : kPlanEveryMs;
  return now_ms - planned_ms_ >= every_ms || accepting != planned_instances_;
}

LiveFleet::Census LiveFleet::TakeCensus(std::span<const InstanceLoad> accepting, double now_ms) {
  Census census;
  census.limits = instances_.at(accepting.front().instance_id).limits;
  double gathering_scale = 0.0, gatherers = 0.0;
  for (const InstanceLoad& load : accepting) {
    Instance& instance = instances_.at(load.instance_id);
    const ExecutionPredictor::Load then = instance.predictor->LoadThen(now_ms);
    census.decodes += then.decodes;
    census.context_tokens += then.decode_context_tokens;
    census.answers += instance.predictor->Answers(now_ms);
    census.members.push_back({&instance, then.decodes});
    const double own = instance.predictor->cost_scale();
    census.cost_scale += own;
    if (instance.gathers && instance.has_told_steps) {
      gathering_scale += own;
      gatherers += 1.0;
    }
    census.limits = Least(census.limits, instance.limits);
  }
  census.cost_scale /= static_cast<double>(census.members.size());
  // Not above the fleet's, by which gathering begins: it would end at once, and begin again.
  if (gatherers > 0.0) {
    census.gathering_cost = std::min(1.0, gathering_scale / gatherers / census.cost_scale);
  }
  return census;
}

void LiveFleet::Smooth(const Census& census, double now_ms) {
  const double since_ms = now_ms - smoothed_ms_;
  const double kept_answers = std::exp2(-since_ms / kHalfLifeMs);
  const double kept =
      plan_.gathering == 0 ? kept_answers : std::exp2(-since_ms / kGatheredHalfLifeMs);
  smoothed_ms_ = now_ms;
  smoothed_decodes_ = kept * smoothed_decodes_ + (1.0 - kept) * static_cast<double>(census.decodes);
  smoothed_answers_ =
      kept_answers * smoothed_answers_ + (1.0 - kept_answers) * static_cast<double>(census.answers);
}

// By the table's time: in that of a fleet that is slower, steps may take less and more arrives.
FleetDemand LiveFleet::DemandOf(const Census& census, double now_ms) const {
  const bool begins = plan_.gathering == 0;
  FleetDemand demand;
  demand.instances = static_cast<std::int64_t>(census.members.size());
  const auto decodes = static_cast<double>(census.decodes);
  demand.decodes = begins ? std::max(smoothed_decodes_, decodes) : smoothed_decodes_;
  demand.answer_context_tokens = lasting_.MeanContextTokens();
  demand.mean_context_tokens = census.decodes > 0
                                   ? static_cast<double>(census.context_tokens) / decodes
                                   : demand.answer_context_tokens;
  if (const double prompt = lasting_.MeanPrefillTokens(); prompt > 0.0) {
    demand.prompt_tokens = std::max<std::int64_t>(1, std::llround(prompt));
  }
  demand.gathering_cost = census.gathering_cost;
  const double scale = census.cost_scale;
  // What has only begun to come is not in the last minute yet.
  demand.recent_prefill_rate = scale * recent_.PrefillTokens(now_ms);
  const bool is_new = begins && recent_.PrefillTokens(now_ms) > lasting_.PrefillTokens(now_ms);
  const ArrivalRates& rates = is_new ? recent_ : lasting_;
  demand.prefill_rate = scale * rates.PrefillTokens(now_ms);
  demand.output_rate = scale * rates.OutputTokens(now_ms);
  demand.output_rate_error = scale * rates.OutputTokensError(now_ms);
  demand.kv_token_ms = options_.kv_token_ms / scale;
  return demand;
}

// Those that gather already stay; then whoever has the most decodes.
void LiveFleet::LetGather(Census& census) {
  std::ranges::stable_sort(census.members, [](const Member& a, const Member& b) {
    if (a.instance->gathers != b.instance->gathers) return a.instance->gathers;
    return a.decodes > b.decodes;
  });
  std::int64_t left = plan_.gathering;
  // One that takes no new requests for a moment is not kept free of those that it has.
  for (const Member& member : census.members) member.instance->gathers = left-- > 0;
}

void LiveFleet::Plan(std::span<const InstanceLoad> accepting, double now_ms) {
  if (!IsPlanDue(accepting.size(), now_ms)) return;
  planned_ms_ = now_ms;
  planned_instances_ = accepting.size();
  if (plan_.gathering == 0) {
    // Those that gathered once may have been away for long.
    for (const InstanceLoad& load : accepting) instances_.at(load.instance_id).gathers = false;
  }
  Census census = TakeCensus(accepting, now_ms);
  Smooth(census, now_ms);
  const FleetDemand demand = DemandOf(census, now_ms);
  census.limits.step_ms /= census.cost_scale;
  census.limits.admit_ms /= census.cost_scale;
  PlannerOptions planner;
  planner.forced = options_.gathering;
  plan_ = PlanFleet(*table_, census.limits, demand, plan_.gathering, planner);
  // What it begins with it goes on from.
  if (plan_.gathering > 0) smoothed_decodes_ = demand.decodes;
  plan_.prefill_rate /= census.cost_scale;
  plan_.colocated_rate /= census.cost_scale;
  mean_context_tokens_ = demand.mean_context_tokens;
  level_step_ms_ = plan_.gathering > 0 ? std::numeric_limits<double>::infinity() : EvenStepMs();
  LetGather(census);
}

Placement LiveFleet::Choose(const RequestSpec& request, std::span<const InstanceLoad> accepting,
                            double now_ms) {
  now_ms = At(now_ms);
  return options_.policy == Policy::kPaper ? ChoosePaper(request, accepting, now_ms)
                                           : ChooseDynamic(request, accepting, now_ms);
}

SearchInstance LiveFleet::Seen(Instance& instance, std::int64_t own_promise) const {
  const bool keeps_free = plan_.gathering > 0 && !instance.gathers && instance.accepts_new;
  return {instance.predictor.get(), keeps_free, 0, instance.promised_tokens - own_promise};
}

// Where the gathering instances are short of room or steps and none has any for this prompt, it
// costs nothing to decode on the others.
bool LiveFleet::GathererHasRoom(std::int64_t prompt_tokens, double now_ms) {
  if (!plan_.is_short_of_room && !plan_.is_short_of_steps) return true;
  return std::ranges::any_of(instances_, [&](auto& known) {
    Instance& instance = known.second;
    return instance.gathers && instance.accepts_new && HasRoom(instance, prompt_tokens, now_ms);
  });
}

// Of steps, where its kind is short of these, and of memory and seats, where it is short of any.
bool LiveFleet::HasRoom(Instance& gatherer, std::int64_t prompt_tokens, double now_ms) {
  if (!plan_.is_short_of_room && !plan_.is_short_of_steps) return true;
  const InstanceLimits& limits = gatherer.limits;
  const ExecutionPredictor::Load load = gatherer.predictor->LoadThen(now_ms);
  if (plan_.is_short_of_steps &&
      AtMeanAgeMs(gatherer, load.decodes + 1) > kMostHeld * limits.MostToAdmitMs()) {
    return false;
  }
  return load.decodes < limits.max_requests &&
         static_cast<double>(load.kv_tokens + prompt_tokens) <=
             kMostHeld * static_cast<double>(limits.kv_tokens);
}

// A step of so many decodes there, each as old as the fleet's are.
double LiveFleet::AtMeanAgeMs(const Instance& instance, std::int64_t decodes) const {
  return instance.predictor->cost_scale() * table_->DecodesMs(decodes, mean_context_tokens_);
}

SearchOptions LiveFleet::Circumstances(std::size_t instances, double now_ms) const {
  SearchOptions options;
  options.hand_off_ms = options_.hand_off_ms;
  options.kv_token_ms = options_.kv_token_ms;
  options.kv_token_work_ms = options_.kv_token_work_ms;
  options.arrivals_per_ms = recent_.Requests(now_ms) / static_cast<double>(instances);
  options.lost_share = plan_.lost_share;
  const double rate = plan_.prefill_rate;
  options.prefill_pressure = rate > 0.0 ? std::min(1.0, recent_.PrefillTokens(now_ms) / rate) : 1.0;
  options.mean_context_tokens = mean_context_tokens_;
  options.level_step_ms = level_step_ms_;
  return options;
}

Placement LiveFleet::ChooseDynamic(const RequestSpec& request,
                                   std::span<const InstanceLoad> accepting, double now_ms) {
  Plan(accepting, now_ms);
  // By instance: a common prefix may be cached on each.
  std::unordered_map<std::string_view, std::int64_t> cached;
  for (const CachedPrefix& prefix : request.cached) cached[prefix.instance_id] = prefix.tokens;
  candidates_.clear();
  for (const InstanceLoad& load : accepting) {
    candidates_.push_back(Seen(instances_.at(load.instance_id)));
    const auto found = cached.find(load.instance_id);
    if (found != cached.end()) candidates_.back().cached_tokens = found->second;
  }
  if (!GathererHasRoom(request.prompt_tokens, now_ms)) {
    for (SearchInstance& instance : candidates_) instance.keeps_free = false;
  }
  const SearchRequest wanted = Wanted(request);
  const SearchOptions options = Circumstances(accepting.size(), now_ms);
  const Choice choice =
      options_.policy == Policy::kExhaustive
          ? FindExhaustively(search_, candidates_, wanted, options, options_.stride_tokens, now_ms)
          : search_.Find(candidates_, wanted, options, now_ms);

  Prediction prediction;
  prediction.ttft_ms = choice.outcome.ttft_ms;
  prediction.decode_step_ms = choice.outcome.decode_step_ms;
  prediction.objective_ms = choice.objective_ms;
  prediction.whole_objective_ms = choice.whole_objective_ms;
  prediction.probes = choice.probes;
  prediction.gathering = plan_.gathering;
  prediction.candidates.reserve(search_.tried().size());
  for (const Tried& tried : search_.tried()) {
    Candidate& candidate = prediction.candidates.emplace_back();
    candidate.alpha = accepting[tried.alpha].instance_id;
    if (tried.beta) candidate.beta = accepting[*tried.beta].instance_id;
    candidate.split_token = tried.split_token;
    candidate.ttft_ms = tried.ttft_ms;
    candidate.objective_ms = tried.objective_ms;
  }
  const std::int64_t end_token = ComputedTokens(request.prompt_tokens, OutputsOf(request));
  const InstanceId& first = accepting[choice.alpha].instance_id;
  if (!choice.beta) {
    const PlacementReason reason = !request.may_cut        ? PlacementReason::kNotCuttable
                                   : accepting.size() == 1 ? PlacementReason::kSingleInstance
                                                           : PlacementReason::kWholeIsBest;
    return WholeOn(first, end_token, reason, std::move(prediction));
  }
  prediction.hand_off_ms = choice.hand_off_ms - now_ms;
  const std::int64_t split = choice.split_token;
  return {{first, 0, split},
          MicroRequest{accepting[*choice.beta].instance_id, split, std::max(end_token, split + 1)},
          split < request.prompt_tokens ? PlacementReason::kLevelsPrefill
                                        : PlacementReason::kGathersDecodes,
          std::move(prediction)};
}

Placement LiveFleet::ChoosePaper(const RequestSpec& request,
                                 std::span<const InstanceLoad> accepting, double now_ms) {
  using enum PlacementReason;
  const std::size_t first = num_pairs_++ % accepting.size();
  const std::size_t second = (first + 1) % accepting.size();
  const std::int64_t end_token = ComputedTokens(request.prompt_tokens, OutputsOf(request));
  Prediction prediction;
  const InstanceId& alpha = accepting[first].instance_id;
  if (!request.may_cut) return WholeOn(alpha, end_token, kNotCuttable, prediction);
  if (end_token < 2) return WholeOn(alpha, end_token, kPromptTooShort, prediction);
  if (accepting.size() == 1) return WholeOn(alpha, end_token, kSingleInstance, prediction);
  const InstanceId& beta = accepting[second].instance_id;
  const BalancedSplit split =
      FindBalancedSplit(*instances_.at(alpha).predictor, *instances_.at(beta).predictor,
                        request.prompt_tokens, end_token, options_.tolerance_ms, now_ms);
  prediction.objective_ms = split.imbalance_ms;
  prediction.probes = split.probes;
  if (split.split_token <= 0) return WholeOn(beta, end_token, kSplitAtStart, prediction);
  if (split.split_token >= end_token) return WholeOn(alpha, end_token, kSplitAtEnd, prediction);
  return {{alpha, 0, split.split_token},
          MicroRequest{beta, split.split_token, end_token},
          kBalanced,
          std::move(prediction)};
}

}  // namespace dynaserve
