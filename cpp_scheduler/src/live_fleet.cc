// The instances and the requests of a fleet, from their coming to their end.
#include "dynaserve/live_fleet.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "dynaserve/live_requests.h"

namespace dynaserve {
namespace {

// Requests are at different places of their answers: half of one is what it holds on average.
std::int64_t PromisedTokens(const RequestSpec& request) {
  return request.prompt_tokens + (LikelyOutputs(request) + 1) / 2;
}

std::int64_t CachedOn(const RequestSpec& request, const InstanceId& instance_id) {
  for (const CachedPrefix& prefix : request.cached) {
    if (prefix.instance_id == instance_id) return prefix.tokens;
  }
  return 0;
}

}  // namespace

LiveFleet::LiveFleet(const Options& options, const ProfileTable& table)
    : options_(options), table_(std::make_unique<ProfileTable>(table)) {}

double LiveFleet::At(double now_ms) { return now_ms_ = std::max(now_ms_, now_ms); }

void LiveFleet::Observe(const InstanceState& instance) {
  const auto found = instances_.find(instance.instance_id);
  const bool is_known = found != instances_.end();
  const bool is_alike = is_known && found->second.limits == instance.limits;
  // Throws before anything has changed.
  auto predictor =
      is_alike ? nullptr : std::make_unique<ExecutionPredictor>(*table_, instance.limits);
  // What was planned was for others, or one may have taken the other's place.
  if (!is_known || found->second.accepts_new != instance.accepts_new) planned_ms_ = kNeverPlanned;
  if (is_alike) {
    found->second.accepts_new = instance.accepts_new;
    return;
  }
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
