#include "dynaserve/live_fleet.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "dynaserve/exhaustive_search.h"
#include "dynaserve/late_cut.h"
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
// Of a step's error in the cost scale, which tells the timelines once it has moved this far.
constexpr double kScaleGain = 0.05;
constexpr double kMostScaleStep = 0.5;
constexpr double kScaleTold = 0.01;
// Of the time of decodes that prefill takes: what so little experience says, and a bound.
constexpr double kNoShareMs = 500.0;
constexpr double kMostPrefillShare = 0.8;

std::int64_t OutputsOf(const RequestSpec& request) {
  return std::min(request.expected_output_tokens, request.max_output_tokens);
}

std::int64_t LikelyOutputs(const RequestSpec& request) {
  return std::min(std::max(request.likely_output_tokens, request.expected_output_tokens),
                  request.max_output_tokens);
}

// Requests are at different places of their answers: half of one is what it holds on average.
std::int64_t PromisedTokens(const RequestSpec& request) {
  return request.prompt_tokens + (LikelyOutputs(request) + 1) / 2;
}

SearchRequest Wanted(const RequestSpec& request) {
  SearchRequest wanted;
  wanted.prompt_tokens = std::max<std::int64_t>(1, request.prompt_tokens);
  wanted.expected_output_tokens = std::max<std::int64_t>(1, OutputsOf(request));
  wanted.likely_output_tokens = std::max<std::int64_t>(1, LikelyOutputs(request));
  wanted.may_cut = request.may_cut;
  wanted.slo = request.slo;
  return wanted;
}

std::int64_t EndToken(const SearchRequest& request) {
  return ComputedTokens(request.prompt_tokens, request.expected_output_tokens);
}

// Of its tokens [computed, end_token).
VirtualRequest RestUpTo(const SearchRequest& request, std::int64_t end_token,
                        std::int64_t computed) {
  const std::int64_t prefill_end = std::min(end_token, request.prompt_tokens);
  return {0, computed, std::max<std::int64_t>(0, prefill_end - computed),
          std::max<std::int64_t>(0, end_token - std::max(computed, request.prompt_tokens)), 0.0};
}

std::int64_t CachedOn(const RequestSpec& request, const InstanceId& instance_id) {
  for (const CachedPrefix& prefix : request.cached) {
    if (prefix.instance_id == instance_id) return prefix.tokens;
  }
  return 0;
}

// Others' requests have the keys from here on; ours never come so far.
constexpr std::uint64_t kFirstOther = std::uint64_t{1} << 62;

std::uint64_t KeyOf(std::uint64_t ordinal, std::size_t side) { return 2 * ordinal + side; }

Placement WholeOn(const InstanceId& instance_id, std::int64_t end_token, PlacementReason reason,
                  Prediction prediction) {
  return {{instance_id, 0, end_token}, std::nullopt, reason, std::move(prediction)};
}

// What each of the instances is up to.
InstanceLimits Least(const InstanceLimits& a, const InstanceLimits& b) {
  return {std::min(a.max_requests, b.max_requests), std::min(a.max_step_tokens, b.max_step_tokens),
          std::min(a.min_prefill_tokens, b.min_prefill_tokens), std::min(a.kv_tokens, b.kv_tokens),
          std::min(a.step_ms, b.step_ms)};
}

}  // namespace

LiveFleet::LiveFleet(const Options& options, const ProfileTable& table)
    : options_(options), table_(std::make_unique<ProfileTable>(table)) {}

double LiveFleet::At(double now_ms) { return now_ms_ = std::max(now_ms_, now_ms); }

void LiveFleet::Observe(const InstanceState& instance) {
  const auto found = instances_.find(instance.instance_id);
  if (found != instances_.end()) {
    // One may have taken the other's place.
    if (found->second.accepts_new != instance.accepts_new) planned_ms_ = kNeverPlanned;
    found->second.accepts_new = instance.accepts_new;
    if (found->second.limits == instance.limits) return;
  }
  auto predictor = std::make_unique<ExecutionPredictor>(*table_, instance.limits);
  if (found == instances_.end()) planned_ms_ = kNeverPlanned;  // for others
  Instance& known = instances_[instance.instance_id];
  known.limits = instance.limits;
  known.accepts_new = instance.accepts_new;
  Install(known, std::move(predictor));
}

void LiveFleet::Learn(const ProfileTable& table, double now_ms) {
  At(now_ms);
  auto learnt = std::make_unique<const ProfileTable>(table);
  // What all instances have in common is in the table now; what one has beside it stays.
  double common = 0.0, telling = 0.0;
  for (const auto& [id, instance] : instances_) {
    if (!instance.has_told_steps) continue;
    common += instance.log_scale;
    telling += 1.0;
  }
  for (auto& [id, instance] : instances_) {
    if (instance.has_told_steps) instance.log_scale -= common / telling;
    Install(instance, std::make_unique<ExecutionPredictor>(*learnt, instance.limits));
  }
  table_ = std::move(learnt);
  planned_ms_ = kNeverPlanned;  // by the old one
}

// With what the instance's predictor has had so far.
void LiveFleet::Install(Instance& instance, std::unique_ptr<ExecutionPredictor> predictor) {
  if (instance.log_scale != 0.0) predictor->SetCostScale(std::exp(instance.log_scale), now_ms_);
  if (instance.predictor) {
    instance.predictor->Snapshot(now_ms_, running_, waiting_);
    // The step under way counts as computed, so the next one begins at its end.
    predictor->Replace(running_, waiting_, std::max(now_ms_, instance.predictor->next_step_ms()));
  }
  instance.predictor = std::move(predictor);
}

void LiveFleet::Remove(const InstanceId& instance_id) {
  if (instances_.erase(instance_id) > 0) planned_ms_ = kNeverPlanned;
  for (auto& [request_id, entry] : entries_) {
    for (Part& part : entry.parts) {
      if (part.instance_id == instance_id) part.promised_tokens = 0;
    }
  }
}

void LiveFleet::CountArrival(const RequestSpec& request, double now_ms) {
  now_ms = At(now_ms);
  // It goes to where most of it is cached, as a rule.
  std::int64_t cached = 0;
  for (const CachedPrefix& prefix : request.cached) cached = std::max(cached, prefix.tokens);
  const std::int64_t most = std::max<std::int64_t>(0, request.prompt_tokens - 1);
  const ArrivalRates::Arrival arrival{static_cast<double>(request.prompt_tokens),
                                      static_cast<double>(std::min(cached, most)),
                                      bias_.Factor() * static_cast<double>(OutputsOf(request))};
  recent_.Count(arrival, now_ms);
  lasting_.Count(arrival, now_ms);
}

// With one decode more.
double LiveFleet::EvenStepMs() const {
  const auto decodes = static_cast<std::int64_t>(
      std::ceil(smoothed_answers_ / static_cast<double>(planned_instances_)) + 1.0);
  return table_->DecodesMs(decodes, mean_context_tokens_);
}

void LiveFleet::Plan(std::span<const InstanceLoad> accepting, double now_ms) {
  // Sooner while nothing gathers: decodes that are placed before a plan stay where they are for as
  // long as their answers last.
  const bool begins = plan_.gathering == 0;
  const bool is_due = now_ms - planned_ms_ >= (begins ? kBeginEveryMs : kPlanEveryMs);
  if (!is_due && accepting.size() == planned_instances_) return;
  const double since_ms = now_ms - smoothed_ms_;
  const double kept_answers = std::exp2(-since_ms / kHalfLifeMs);
  const double kept = begins ? kept_answers : std::exp2(-since_ms / kGatheredHalfLifeMs);
  planned_ms_ = smoothed_ms_ = now_ms;
  planned_instances_ = accepting.size();
  std::int64_t decodes = 0, context = 0, answers = 0;
  struct Gatherer {
    Instance* instance;
    std::int64_t decodes;
  };
  std::vector<Gatherer> order;
  for (const InstanceLoad& load : accepting) {
    Instance& instance = instances_.at(load.instance_id);
    const ExecutionPredictor::Load then = instance.predictor->LoadThen(now_ms);
    decodes += then.decodes;
    context += then.decode_context_tokens;
    answers += instance.predictor->Answers(now_ms);
    order.push_back({&instance, then.decodes});
  }
  smoothed_decodes_ = kept * smoothed_decodes_ + (1.0 - kept) * static_cast<double>(decodes);
  smoothed_answers_ =
      kept_answers * smoothed_answers_ + (1.0 - kept_answers) * static_cast<double>(answers);
  FleetDemand demand;
  demand.instances = static_cast<std::int64_t>(accepting.size());
  demand.decodes =
      begins ? std::max(smoothed_decodes_, static_cast<double>(decodes)) : smoothed_decodes_;
  demand.answer_context_tokens = lasting_.MeanContextTokens();
  demand.mean_context_tokens = decodes > 0
                                   ? static_cast<double>(context) / static_cast<double>(decodes)
                                   : demand.answer_context_tokens;
  if (const double prompt = lasting_.MeanPrefillTokens(); prompt > 0.0) {
    demand.prompt_tokens = std::max<std::int64_t>(1, std::llround(prompt));
  }
  // Whoever has the most decodes by now: those that gathered once may have been away for long.
  if (begins) {
    for (const Gatherer& gatherer : order) gatherer.instance->gathers = false;
  }
  double scale = 0.0, gathering_scale = 0.0, gatherers = 0.0;
  InstanceLimits limits = order.front().instance->limits;
  for (const Gatherer& gatherer : order) {
    const Instance& instance = *gatherer.instance;
    const double own = instance.predictor->cost_scale();
    scale += own;
    if (instance.gathers && instance.has_told_steps) {
      gathering_scale += own;
      gatherers += 1.0;
    }
    limits = Least(limits, instance.limits);
  }
  scale /= static_cast<double>(order.size());
  // Not above the fleet's, by which gathering begins: it would end at once, and begin again.
  if (gatherers > 0.0) demand.gathering_cost = std::min(1.0, gathering_scale / gatherers / scale);
  // By the table's time: in that of a fleet that is slower, steps may take less and more arrives.
  limits.step_ms /= scale;
  // What has only begun to come is not in the last minute yet.
  demand.recent_prefill_rate = scale * recent_.PrefillTokens(now_ms);
  const bool is_new = begins && recent_.PrefillTokens(now_ms) > lasting_.PrefillTokens(now_ms);
  const ArrivalRates& rates = is_new ? recent_ : lasting_;
  demand.prefill_rate = scale * rates.PrefillTokens(now_ms);
  demand.output_rate = scale * rates.OutputTokens(now_ms);
  demand.output_rate_error = scale * rates.OutputTokensError(now_ms);
  demand.kv_token_ms = options_.kv_token_ms / scale;
  PlannerOptions planner;
  planner.forced = options_.gathering;
  plan_ = PlanFleet(*table_, limits, demand, plan_.gathering, planner);
  // What it begins with it goes on from.
  if (plan_.gathering > 0) smoothed_decodes_ = demand.decodes;
  plan_.prefill_rate /= scale;
  plan_.colocated_rate /= scale;
  mean_context_tokens_ = demand.mean_context_tokens;
  level_step_ms_ = plan_.gathering > 0 ? std::numeric_limits<double>::infinity() : EvenStepMs();
  std::stable_sort(order.begin(), order.end(), [](const Gatherer& a, const Gatherer& b) {
    if (a.instance->gathers != b.instance->gathers) return a.instance->gathers;
    return a.decodes > b.decodes;
  });
  std::int64_t left = plan_.gathering;
  // One that takes no new requests for a moment is not kept free of those that it has.
  for (const Gatherer& gatherer : order) gatherer.instance->gathers = left-- > 0;
}

Placement LiveFleet::Choose(const RequestSpec& request, std::span<const InstanceLoad> accepting,
                            double now_ms) {
  now_ms = At(now_ms);
  return options_.policy == Policy::kPaper ? ChoosePaper(request, accepting, now_ms)
                                           : ChooseDynamic(request, accepting, now_ms);
}

SearchInstance LiveFleet::Seen(Instance& instance, std::int64_t own_promise) const {
  return {instance.predictor.get(), plan_.gathering > 0 && !instance.gathers, 0,
          instance.promised_tokens - own_promise};
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

// Of steps, where its kind is short of these, and in any case of memory and seats.
bool LiveFleet::HasRoom(Instance& gatherer, std::int64_t prompt_tokens, double now_ms) {
  if (!plan_.is_short_of_room && !plan_.is_short_of_steps) return true;
  const InstanceLimits& limits = gatherer.limits;
  const ExecutionPredictor::Load load = gatherer.predictor->LoadThen(now_ms);
  if (plan_.is_short_of_steps &&
      AtMeanAgeMs(gatherer, load.decodes + 1) > kMostHeld * limits.step_ms) {
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

void LiveFleet::Enter(const RequestSpec& request, const Placement& placement, double now_ms) {
  now_ms = At(now_ms);
  Entry& entry = entries_[request.request_id];
  entry.ordinal = num_entered_++;
  entry.prompt_tokens = request.prompt_tokens;
  entry.split_token = placement.split_token();
  entry.request = Wanted(request);
  entry.arrived_ms = entry.looked_ms = now_ms;
  // Second thoughts are about cuts inside the prompt.
  entry.revisions_left = placement.reason == PlacementReason::kLevelsPrefill ? kMostRevisions : 0;
  entry.may_cut_late = !placement.beta && request.may_cut && !request.forced_split &&
                       placement.reason != PlacementReason::kWholeOnly;
  const std::int64_t promised = entry.promised_tokens = PromisedTokens(request);
  const std::int64_t split = placement.split_token();
  const std::int64_t prefill = std::min(split, request.prompt_tokens);
  const std::int64_t cached = std::clamp<std::int64_t>(
      CachedOn(request, placement.alpha.instance_id), 0, std::max<std::int64_t>(0, prefill - 1));
  entry.cached_tokens = cached;
  const VirtualRequest alpha{0, cached, prefill - cached, split - prefill, now_ms};
  if (!placement.beta) {
    EnterPart(entry, 0, placement.alpha.instance_id, alpha, promised, now_ms);
    return;
  }
  double ready_ms = now_ms + options_.hand_off_ms;
  if (placement.prediction && placement.prediction->hand_off_ms > 0.0) {
    ready_ms = now_ms + placement.prediction->hand_off_ms;
  } else if (const auto found = instances_.find(placement.alpha.instance_id);
             found != instances_.end()) {
    const Forecast forecast = found->second.predictor->Predict(alpha, now_ms, Horizon::kEnd);
    ready_ms = SplitSearch::KvThereMs(forecast, split, options_.kv_token_ms) + options_.hand_off_ms;
  }
  EnterPart(entry, 0, placement.alpha.instance_id, alpha, 0, now_ms);
  const std::int64_t rest = std::max<std::int64_t>(0, request.prompt_tokens - split);
  const std::int64_t decodes = placement.beta->end_token - std::max(split, request.prompt_tokens);
  EnterPart(entry, 1, placement.beta->instance_id,
            {0, split, rest, std::max<std::int64_t>(rest > 0 ? 0 : 1, decodes), ready_ms,
             /*is_beta=*/true},
            promised, now_ms);
}

void LiveFleet::EnterPart(Entry& entry, std::size_t side, const InstanceId& instance_id,
                          const VirtualRequest& request, std::int64_t promised_tokens,
                          double now_ms) {
  entry.parts.push_back({instance_id, 0});
  const auto found = instances_.find(instance_id);
  if (found == instances_.end()) return;
  Part& part = entry.parts.back();
  part.promised_tokens = promised_tokens;
  found->second.promised_tokens += promised_tokens;
  VirtualRequest entered = request;
  entered.key = KeyOf(entry.ordinal, side);
  if (entered.prefill_tokens + entered.decode_tokens < 1) return;  // an empty prompt
  found->second.predictor->Add(entered, now_ms);
}

void LiveFleet::Finish(const std::string& request_id, double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end()) return;
  const Entry& entry = found->second;
  for (std::size_t side = 0; side < entry.parts.size(); ++side) {
    const auto instance = instances_.find(entry.parts[side].instance_id);
    if (instance == instances_.end()) continue;
    instance->second.promised_tokens -= entry.parts[side].promised_tokens;
    instance->second.predictor->Remove(KeyOf(entry.ordinal, side), now_ms);
  }
  entries_.erase(found);
}

std::optional<double> LiveFleet::PredictEndMs(const std::string& request_id, double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end()) return std::nullopt;
  const Entry& entry = found->second;
  const std::size_t last = entry.parts.size() - 1;
  const auto instance = instances_.find(entry.parts[last].instance_id);
  if (instance == instances_.end()) return std::nullopt;
  const auto rest = instance->second.predictor->PredictRest(KeyOf(entry.ordinal, last), now_ms);
  const auto request = instance->second.predictor->Find(KeyOf(entry.ordinal, last), now_ms);
  if (!rest || !request) return std::nullopt;
  // Of what decodes already no end of its prefill is foretold.
  const bool decodes = !std::isfinite(rest->prefill_end_ms);
  const double decodes_from_ms =
      decodes ? now_ms : std::max(now_ms, std::min(rest->prefill_end_ms, rest->end_ms));
  return decodes_from_ms + DecodingMs(instance->second, rest->end_ms - decodes_from_ms,
                                      request->decode_tokens, now_ms);
}

std::optional<double> LiveFleet::PredictHandOffMs(const std::string& request_id, double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end() || found->second.parts.size() < 2) return std::nullopt;
  const Entry& entry = found->second;
  const auto instance = instances_.find(entry.parts[0].instance_id);
  if (instance == instances_.end()) return std::nullopt;
  ExecutionPredictor& predictor = *instance->second.predictor;
  const auto rest = predictor.PredictRest(KeyOf(entry.ordinal, 0), now_ms);
  // Its last step counts as computed when it begins.
  return std::max(now_ms, rest ? rest->end_ms : predictor.next_step_ms());
}

double LiveFleet::DecodingMs(const Instance& instance, double known_ms, std::int64_t tokens,
                             double now_ms) const {
  // Within seconds a few prompts more or less are chance.
  const double kept = std::exp(-(now_ms - instance.told_ms) / kLastingMs);
  const double steps_ms = kept * instance.lasting_step_ms;
  const double share = kept * instance.lasting_prefill_ms / (steps_ms + kNoShareMs);
  const double as_now_ms = known_ms / (1.0 - std::min(share, kMostPrefillShare));
  if (as_now_ms <= 0.0 || instance.lasting_steps <= 0.0) return as_now_ms;
  const double step_ms = instance.lasting_step_ms / instance.lasting_steps;
  const double answer_ms = step_ms * lasting_.MeanOutputTokens();
  if (answer_ms <= 0.0) return as_now_ms;
  // What decodes now ends, and others take its place: of the time of this answer, the part in which
  // it is like now, where those there now leave one after the other.
  const double like_now = answer_ms / as_now_ms * (1.0 - std::exp(-as_now_ms / answer_ms));
  const double like_ever = (1.0 - like_now) * steps_ms / (steps_ms + kNoShareMs);
  return (1.0 - like_ever) * as_now_ms + like_ever * static_cast<double>(tokens) * step_ms;
}

void LiveFleet::CountStep(Instance& instance, const BatchShape& shape, double measured_ms,
                          double now_ms) {
  if (shape.decodes == 0) return;
  const BatchShape decodes{0, 0.0, shape.decodes, shape.decode_context_tokens};
  const double alone_ms = std::exp(instance.log_scale) * table_->StepMs(decodes);
  const double beside_ms = shape.prefill_tokens > 0 ? measured_ms - alone_ms : 0.0;
  const double kept = std::exp(-(now_ms - instance.told_ms) / kLastingMs);
  instance.told_ms = now_ms;
  instance.lasting_steps = kept * instance.lasting_steps + 1.0;
  instance.lasting_step_ms = kept * instance.lasting_step_ms + measured_ms;
  instance.lasting_prefill_ms = kept * instance.lasting_prefill_ms + std::max(0.0, beside_ms);
}

void LiveFleet::Report(const InstanceId& instance_id, std::span<const Progress> progress,
                       double now_ms) {
  now_ms = At(now_ms);
  const auto found = instances_.find(instance_id);
  if (found == instances_.end()) return;
  ExecutionPredictor& predictor = *found->second.predictor;
  predictor.Snapshot(now_ms, running_, waiting_);
  sent_back_.clear();
  under_way_.clear();
  // A long queue is told of as a whole.
  waits_.clear();
  for (const VirtualRequest& request : waiting_) waits_.insert(request.key);
  for (const Progress& report : progress) {
    const auto known = entries_.find(report.request_id);
    if (known == entries_.end()) continue;
    Entry& entry = known->second;
    // A request that has passed its cut is with its beta.
    const std::size_t side =
        entry.parts.size() > 1 && entry.parts[1].instance_id == instance_id ? 1 : 0;
    if (entry.parts[side].instance_id != instance_id) continue;
    const std::uint64_t key = KeyOf(entry.ordinal, side);
    const auto same = [key](const VirtualRequest& r) { return r.key == key; };
    if (!report.begun) {
      if (side == 1) continue;
      const bool is_whole = entry.parts.size() == 1;
      if (!is_whole) under_way_.push_back(&entry);
      if (waits_.contains(key)) continue;
      std::erase_if(running_, same);
      const std::int64_t end = is_whole ? EndToken(entry.request) : entry.split_token;
      // A hand-off may have moved to before the end of what is cached: one token is computed
      // anyway.
      VirtualRequest rest = RestUpTo(entry.request, end, std::min(entry.cached_tokens, end - 1));
      rest.key = key;
      rest.ready_ms = now_ms;
      sent_back_.push_back(rest);
      continue;
    }
    const bool is_alpha_of_two = entry.parts.size() > 1 && side == 0;
    if (is_alpha_of_two && report.computed_tokens > entry.split_token) {
      // It was moved to before what a step computes.
      entry.split_token = report.computed_tokens + 1;
    }
    std::int64_t end_token = ComputedTokens(entry.prompt_tokens, report.expected_output_tokens);
    if (is_alpha_of_two) end_token = entry.split_token;
    const std::int64_t computed = report.computed_tokens;
    if (!is_alpha_of_two) {
      // An answer that outgrew what was promised for it holds what it has computed.
      const std::int64_t grown =
          std::max<std::int64_t>(0, computed - entry.parts[side].promised_tokens);
      entry.parts[side].promised_tokens += grown;
      found->second.promised_tokens += grown;
    }
    if (waits_.contains(key)) {
      std::erase_if(waiting_, same);
    } else {
      std::erase_if(running_, same);
    }
    if (is_alpha_of_two && computed >= end_token) continue;
    if (is_alpha_of_two) under_way_.push_back(&entry);
    const std::int64_t prefill =
        std::max<std::int64_t>(0, std::min(entry.prompt_tokens, end_token) - computed);
    const std::int64_t decodes =
        std::max<std::int64_t>(0, end_token - std::max(computed, entry.prompt_tokens));
    // One that is still there has at least a token to go.
    running_.push_back({key, computed, prefill,
                        prefill > 0 ? decodes : std::max<std::int64_t>(1, decodes), now_ms,
                        side == 1});
  }
  waiting_.insert(waiting_.begin(), sent_back_.begin(), sent_back_.end());
  predictor.Replace(running_, waiting_, now_ms, /*between_steps=*/true);
  for (const Entry* entry : under_way_) HoldBeta(*entry, now_ms);
}

// When alpha's KV is with beta; tokens: those that have not left yet.
double LiveFleet::ReadyMs(const Forecast& alpha, std::int64_t tokens, double now_ms) const {
  Forecast from_now = alpha;
  from_now.start_ms = std::isfinite(alpha.start_ms) ? std::max(alpha.start_ms, now_ms) : now_ms;
  return SplitSearch::KvThereMs(from_now, tokens, options_.kv_token_ms) + options_.hand_off_ms;
}

// A beta that is predicted to have begun, or to be over, though its alpha is under way, waits.
void LiveFleet::HoldBeta(const Entry& entry, double now_ms) {
  const auto alpha = instances_.find(entry.parts[0].instance_id);
  const auto beta = instances_.find(entry.parts[1].instance_id);
  if (alpha == instances_.end() || beta == instances_.end()) return;
  const auto foretold = beta->second.predictor->Find(KeyOf(entry.ordinal, 1), now_ms);
  if (foretold && foretold->ready_ms > now_ms) return;
  const std::uint64_t key = KeyOf(entry.ordinal, 0);
  const auto standing = alpha->second.predictor->Find(key, now_ms);
  const auto rest = alpha->second.predictor->PredictRest(key, now_ms);
  if (!standing || !rest) return;
  VirtualRequest held = BetaOf(entry);
  held.ready_ms = ReadyMs(*rest, standing->prefill_tokens, now_ms);
  Put(entry.parts[1].instance_id, held, now_ms);
}

void LiveFleet::ReportOthers(const InstanceId& instance_id, std::span<const OtherRequest> others,
                             double now_ms) {
  now_ms = At(now_ms);
  const auto found = instances_.find(instance_id);
  if (found == instances_.end()) return;
  Instance& instance = found->second;
  if (others.empty() && instance.others_promised == 0) return;  // none is on the timeline
  instance.predictor->Snapshot(now_ms, running_, waiting_);
  const auto is_other = [](const VirtualRequest& request) { return request.key >= kFirstOther; };
  std::erase_if(running_, is_other);
  std::erase_if(waiting_, is_other);
  std::int64_t promised = 0;
  std::uint64_t key = kFirstOther;
  for (const OtherRequest& other : others) {
    const std::int64_t computed = other.computed_tokens;
    const std::int64_t prefill =
        std::max<std::int64_t>(0, std::min(other.prompt_tokens, other.end_token) - computed);
    const std::int64_t decodes =
        std::max<std::int64_t>(0, other.end_token - std::max(computed, other.prompt_tokens));
    promised += computed + prefill + (decodes + 1) / 2;
    if (other.waits || prefill + decodes == 0) continue;
    (prefill > 0 ? waiting_ : running_).push_back({key++, computed, prefill, decodes, now_ms});
  }
  instance.predictor->Replace(running_, waiting_, now_ms);
  instance.promised_tokens += promised - instance.others_promised;
  instance.others_promised = promised;
}

void LiveFleet::StayOnAlpha(Entry& entry, double now_ms) {
  if (entry.parts.size() < 2) return;
  const Part beta = entry.parts.back();
  entry.parts.pop_back();
  const auto left = instances_.find(beta.instance_id);
  if (left != instances_.end()) {
    left->second.promised_tokens -= beta.promised_tokens;
    left->second.predictor->Remove(KeyOf(entry.ordinal, 1), now_ms);
  }
  Part& alpha = entry.parts.front();
  const auto kept = instances_.find(alpha.instance_id);
  if (kept == instances_.end()) return;
  // Of an instance that was removed nothing is promised any more.
  const std::int64_t promised = std::max(beta.promised_tokens, entry.promised_tokens);
  alpha.promised_tokens += promised;
  kept->second.promised_tokens += promised;
}

bool LiveFleet::MayLook(Looks& looks, const Entry& entry, double now_ms) {
  if (now_ms - looks.since_ms >= kLookEveryMs) {
    // Looks were left: nobody waits for one any more.
    if (looks.count < kMostLooks) looks.round_ms = now_ms;
    looks.since_ms = now_ms;
    looks.count = 0;
  }
  return entry.looked_ms < looks.round_ms && looks.count < kMostLooks;
}

std::optional<Revision> LiveFleet::Revise(const std::string& request_id, double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end()) return std::nullopt;
  Entry& entry = found->second;
  if (now_ms - entry.looked_ms < kLookEveryMs) return std::nullopt;
  if (entry.parts.size() == 1) return ReviseWhole(entry, now_ms);
  if (entry.revisions_left == 0) return std::nullopt;
  const auto alpha = instances_.find(entry.parts[0].instance_id);
  const auto beta = instances_.find(entry.parts[1].instance_id);
  if (alpha == instances_.end() || beta == instances_.end()) return std::nullopt;
  if (!MayLook(alpha->second.looks, entry, now_ms)) return std::nullopt;
  const std::int64_t most = kSoonSteps * alpha->second.limits.max_step_tokens;
  const std::int64_t before =
      alpha->second.predictor->PrefillTokens(now_ms, KeyOf(entry.ordinal, 0), most + 1);
  if (before > most) return std::nullopt;
  ++alpha->second.looks.count;
  entry.looked_ms = now_ms;
  PendingHandOff pending;
  pending.alpha = Seen(alpha->second, entry.parts[0].promised_tokens);
  pending.beta = Seen(beta->second, entry.parts[1].promised_tokens);
  if (!GathererHasRoom(entry.prompt_tokens, now_ms)) {
    pending.alpha.keeps_free = pending.beta.keeps_free = false;
  }
  pending.alpha_key = KeyOf(entry.ordinal, 0);
  pending.beta_key = KeyOf(entry.ordinal, 1);
  pending.beta.own_key = pending.beta_key;
  pending.split_token = entry.split_token;
  pending.waited_ms = now_ms - entry.arrived_ms;
  const std::optional<Revision> revision = ReviseHandOff(
      search_, pending, entry.request, Circumstances(planned_instances_, now_ms), {}, now_ms);
  if (!revision) return revision;
  entry.revisions_left -= 1;
  if (revision->split_token) {
    CutAt(entry, *revision->split_token, revision->hand_off_ms, now_ms);
  } else {
    Lift(entry, now_ms);
  }
  return revision;
}

// Which is promised the memory.
void LiveFleet::AddBeta(Entry& entry, const InstanceId& beta) {
  Part& alpha = entry.parts.front();
  const std::int64_t promised = alpha.promised_tokens;
  const auto left = instances_.find(alpha.instance_id);
  if (left != instances_.end()) left->second.promised_tokens -= promised;
  instances_.at(beta).promised_tokens += promised;
  alpha.promised_tokens = 0;
  entry.parts.push_back({beta, promised});
  entry.may_cut_late = false;
}

void LiveFleet::CutWhole(const std::string& request_id, const InstanceId& beta,
                         std::int64_t split_token, double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end() || !instances_.contains(beta)) return;
  Entry& entry = found->second;
  if (entry.parts.size() > 1 || entry.parts.front().instance_id == beta) return;
  const auto alpha = instances_.find(entry.parts.front().instance_id);
  if (alpha != instances_.end()) {
    const auto standing = alpha->second.predictor->Find(KeyOf(entry.ordinal, 0), now_ms);
    // What is expected of it by now.
    if (standing) {
      entry.request.expected_output_tokens =
          std::max<std::int64_t>(1, standing->end_token() - entry.prompt_tokens + 1);
    }
  }
  entry.revisions_left = 0;
  AddBeta(entry, beta);
  // Nothing has left yet.
  CutAt(entry, split_token, CutReadyMs(entry, split_token, split_token, now_ms), now_ms);
}

// Of those where all that decode, or are going to, have room beside one more, also when they have
// grown as old as decodes become.
LiveFleet::Instance* LiveFleet::RoomiestGatherer(std::int64_t context_tokens, double now_ms,
                                                 InstanceId& instance_id) {
  Instance* roomiest = nullptr;
  std::int64_t most = std::numeric_limits<std::int64_t>::min();
  for (auto& [id, instance] : instances_) {
    const std::int64_t room = instance.limits.kv_tokens - instance.promised_tokens;
    if (!instance.gathers || !instance.accepts_new || room <= most) continue;
    if (!HasRoom(instance, context_tokens, now_ms)) continue;
    const std::int64_t decodes = instance.predictor->Answers(now_ms) + 1;
    if (AtMeanAgeMs(instance, decodes) > instance.limits.step_ms) continue;
    roomiest = &instance;
    most = room;
    instance_id = id;
  }
  return roomiest;
}

std::optional<Revision> LiveFleet::ReviseWhole(Entry& entry, double now_ms) {
  if (plan_.gathering == 0 || !entry.may_cut_late) return std::nullopt;
  Part& part = entry.parts.front();
  const auto alpha = instances_.find(part.instance_id);
  if (alpha == instances_.end()) return std::nullopt;
  Instance& from = alpha->second;
  // One that takes no new prompts is not kept free for them.
  if (from.gathers || !from.accepts_new || now_ms < from.cuts_late_until_ms) return std::nullopt;
  if (!MayLook(from.late_looks, entry, now_ms)) return std::nullopt;
  const auto standing = from.predictor->Find(KeyOf(entry.ordinal, 0), now_ms);
  if (!standing || standing->prefill_tokens > 0) return std::nullopt;
  ++from.late_looks.count;
  entry.looked_ms = now_ms;
  InstanceId beta_id;
  Instance* beta = RoomiestGatherer(standing->context_tokens, now_ms, beta_id);
  if (beta == nullptr) return std::nullopt;
  const DecodingWhole decoding{
      Seen(from, part.promised_tokens), Seen(*beta), *standing,
      static_cast<double>(standing->context_tokens - entry.prompt_tokens + 1)};
  std::optional<Revision> revision = GatherDecode(
      search_, decoding, entry.request, Circumstances(planned_instances_, now_ms), {}, now_ms);
  if (!revision) return revision;
  revision->beta = beta_id;
  // What is expected of it by now.
  entry.request.expected_output_tokens = standing->end_token() - entry.prompt_tokens + 1;
  AddBeta(entry, beta_id);
  from.cuts_late_until_ms = revision->hand_off_ms;
  CutAt(entry, *revision->split_token, revision->hand_off_ms, now_ms);
  return revision;
}

void LiveFleet::Recut(const std::string& request_id, std::optional<std::int64_t> split_token,
                      double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end() || found->second.parts.size() < 2) return;
  Entry& entry = found->second;
  entry.revisions_left = 0;
  if (!split_token) {
    Lift(entry, now_ms);
    return;
  }
  CutAt(entry, *split_token, CutReadyMs(entry, *split_token, std::nullopt, now_ms), now_ms);
}

// When beta has what alpha computes up to there; left_tokens: whose KV has not left yet, otherwise
// that of the prompt which is still to be computed.
double LiveFleet::CutReadyMs(const Entry& entry, std::int64_t split_token,
                             std::optional<std::int64_t> left_tokens, double now_ms) {
  const double at_once_ms = now_ms + options_.hand_off_ms;
  const auto alpha = instances_.find(entry.parts[0].instance_id);
  if (alpha == instances_.end()) return at_once_ms;
  ExecutionPredictor& predictor = *alpha->second.predictor;
  const std::uint64_t key = KeyOf(entry.ordinal, 0);
  const auto standing = predictor.Find(key, now_ms);
  if (!standing) return at_once_ms;
  VirtualRequest rest = RestUpTo(entry.request, split_token, standing->context_tokens);
  rest.key = key;
  if (rest.prefill_tokens + rest.decode_tokens == 0) return at_once_ms;
  const auto forecast = predictor.PredictChange(rest, now_ms, Horizon::kEnd);
  if (!forecast) return at_once_ms;
  return ReadyMs(*forecast, left_tokens.value_or(rest.prefill_tokens), now_ms);
}

void LiveFleet::Parked(const std::string& request_id, std::int64_t computed_tokens, double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end() || found->second.parts.size() < 2 || computed_tokens < 1) return;
  Entry& entry = found->second;
  entry.revisions_left = 0;
  CutAt(entry, computed_tokens, now_ms + options_.hand_off_ms, now_ms);
  const auto alpha = instances_.find(entry.parts[0].instance_id);
  if (alpha != instances_.end()) alpha->second.predictor->Remove(KeyOf(entry.ordinal, 0), now_ms);
}

// What is predicted to be over already stays over: alpha stands, until something is heard of it.
void LiveFleet::CutAt(Entry& entry, std::int64_t split_token, double ready_ms, double now_ms) {
  entry.split_token = split_token;
  const auto alpha = instances_.find(entry.parts[0].instance_id);
  const std::uint64_t key = KeyOf(entry.ordinal, 0);
  if (alpha != instances_.end()) {
    const auto standing = alpha->second.predictor->Find(key, now_ms);
    if (standing) {
      VirtualRequest rest = RestUpTo(entry.request, split_token, standing->context_tokens);
      rest.key = key;
      rest.ready_ms = standing->ready_ms;
      Put(entry.parts[0].instance_id, rest, now_ms);
    }
  }
  VirtualRequest rest = BetaOf(entry);
  rest.ready_ms = ready_ms;
  Put(entry.parts[1].instance_id, rest, now_ms);
}

VirtualRequest LiveFleet::BetaOf(const Entry& entry) {
  const std::int64_t end = std::max(EndToken(entry.request), entry.split_token + 1);
  VirtualRequest beta = RestUpTo(entry.request, end, entry.split_token);
  beta.key = KeyOf(entry.ordinal, 1);
  beta.is_beta = true;
  return beta;
}

void LiveFleet::Lift(Entry& entry, double now_ms) {
  StayOnAlpha(entry, now_ms);
  const auto alpha = instances_.find(entry.parts.front().instance_id);
  if (alpha == instances_.end()) return;
  const std::uint64_t key = KeyOf(entry.ordinal, 0);
  const auto standing = alpha->second.predictor->Find(key, now_ms);
  const std::int64_t computed = standing ? standing->context_tokens : entry.split_token;
  entry.split_token = EndToken(entry.request);
  VirtualRequest rest = RestUpTo(entry.request, entry.split_token, computed);
  rest.key = key;
  rest.ready_ms = standing ? standing->ready_ms : now_ms;
  Put(entry.parts.front().instance_id, rest, now_ms);
}

// In its place, where the predictor can change it.
void LiveFleet::Put(const InstanceId& instance_id, const VirtualRequest& request, double now_ms) {
  const auto found = instances_.find(instance_id);
  if (found == instances_.end()) return;
  ExecutionPredictor& predictor = *found->second.predictor;
  const bool has_tokens = request.prefill_tokens + request.decode_tokens > 0;
  if (has_tokens && predictor.Change(request, now_ms)) return;
  predictor.Remove(request.key, now_ms);
  if (has_tokens) predictor.Add(request, now_ms);
}

void LiveFleet::ObserveStep(const InstanceId& instance_id, const BatchShape& shape,
                            double measured_ms, double now_ms) {
  if (shape.tokens() < 1 || !(measured_ms > 0.0) || !std::isfinite(measured_ms)) {
    throw std::invalid_argument("a step of " + std::to_string(shape.tokens()) + " tokens took " +
                                std::to_string(measured_ms) + " ms; both must be positive");
  }
  now_ms = At(now_ms);
  const auto found = instances_.find(instance_id);
  const double table_ms = table_->StepMs(shape);
  if (found == instances_.end() || !(table_ms > 0.0)) return;
  Instance& instance = found->second;
  const double error = std::log(measured_ms / table_ms) - instance.log_scale;
  instance.has_told_steps = true;
  instance.log_scale += kScaleGain * std::clamp(error, -kMostScaleStep, kMostScaleStep);
  CountStep(instance, shape, measured_ms, now_ms);
  ExecutionPredictor& predictor = *instance.predictor;
  if (std::abs(instance.log_scale - std::log(predictor.cost_scale())) > kScaleTold) {
    predictor.SetCostScale(std::exp(instance.log_scale), now_ms);
  }
}

double LiveFleet::CostScale(const InstanceId& instance_id) const {
  const auto found = instances_.find(instance_id);
  return found == instances_.end() ? 1.0 : found->second.predictor->cost_scale();
}

void LiveFleet::CheckInvariants() const {
  std::map<InstanceId, std::int64_t> sums;
  for (const auto& [request_id, entry] : entries_) {
    for (const Part& part : entry.parts) sums[part.instance_id] += part.promised_tokens;
  }
  for (const auto& [id, instance] : instances_) {
    const std::int64_t held = sums[id] + instance.others_promised;
    if (instance.promised_tokens != held) {
      throw std::logic_error("instance \"" + id + "\" has promised " +
                             std::to_string(instance.promised_tokens) + " tokens, its requests " +
                             std::to_string(held));
    }
  }
}

}  // namespace dynaserve
