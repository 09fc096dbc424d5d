// What instances tell of their requests and steps, and what that foretells.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "dynaserve/live_fleet.h"
#include "dynaserve/live_requests.h"

namespace dynaserve {
namespace {

// Of a step's error in the cost scale, which tells the timelines once it has moved this far.
constexpr double kScaleGain = 0.05;
constexpr double kMostScaleStep = 0.5;
constexpr double kScaleTold = 0.01;
// Of the time of decodes that prefill takes: what so little experience says, and a bound.
constexpr double kNoShareMs = 500.0;
constexpr double kMostPrefillShare = 0.8;

}  // namespace

void LiveFleet::Report(const InstanceId& instance_id, std::span<const Progress> progress,
                       double now_ms) {
  now_ms = At(now_ms);
  const auto found = instances_.find(instance_id);
  if (found == instances_.end()) return;
  ExecutionPredictor& predictor = *found->second.predictor;
  predictor.Snapshot(now_ms, running_, waiting_);
  sent_back_.clear();
  under_way_.clear();
  told_.clear();
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
    if (report.begun) {
      GoOn(entry, side, report, found->second, now_ms);
    } else if (side == 0) {
      SendBack(entry, now_ms);
    }
  }
  waiting_.insert(waiting_.begin(), sent_back_.begin(), sent_back_.end());
  // The others are as far as after the step that is predicted to run, and no further before its
  // end.  Not betas: the KV of one that is predicted to run may not have come.
  const bool all_told = std::none_of(running_.begin(), running_.end(), [&](const auto& request) {
    return request.prefill_tokens > 0 && !request.is_beta && !told_.contains(request.key);
  });
  predictor.Replace(running_, waiting_, now_ms, /*between_steps=*/all_told);
  for (const Entry* entry : under_way_) HoldBeta(*entry, now_ms);
}

// alpha, or a whole request, has not begun, whatever was predicted.
void LiveFleet::SendBack(const Entry& entry, double now_ms) {
  const bool is_whole = entry.parts.size() == 1;
  if (!is_whole) under_way_.push_back(&entry);
  const std::uint64_t key = KeyOf(entry.ordinal, 0);
  if (waits_.contains(key)) return;
  std::erase_if(running_, [key](const VirtualRequest& request) { return request.key == key; });
  const std::int64_t end = is_whole ? EndToken(entry.request) : entry.split_token;
  // A hand-off may have moved to before the end of what is cached: one token is computed anyway.
  VirtualRequest rest = RestUpTo(entry.request, end, std::min(entry.cached_tokens, end - 1));
  rest.key = key;
  rest.ready_ms = now_ms;
  sent_back_.push_back(rest);
}

// It is as far as that.
void LiveFleet::GoOn(Entry& entry, std::size_t side, const Progress& report, Instance& instance,
                     double now_ms) {
  const std::uint64_t key = KeyOf(entry.ordinal, side);
  std::erase_if(waits_.contains(key) ? waiting_ : running_,
                [key](const VirtualRequest& request) { return request.key == key; });
  const std::int64_t computed = report.computed_tokens;
  std::int64_t end_token = ComputedTokens(entry.prompt_tokens, report.expected_output_tokens);
  if (entry.parts.size() > 1 && side == 0) {
    // It was moved to before what a step computes.
    if (computed > entry.split_token) entry.split_token = computed + 1;
    end_token = entry.split_token;
    if (computed >= end_token) return;
    under_way_.push_back(&entry);
  } else {
    // An answer that outgrew what was promised for it holds what it has computed.
    Part& part = entry.parts[side];
    const std::int64_t grown = std::max<std::int64_t>(0, computed - part.promised_tokens);
    part.promised_tokens += grown;
    instance.promised_tokens += grown;
  }
  const std::int64_t prefill =
      std::max<std::int64_t>(0, std::min(entry.prompt_tokens, end_token) - computed);
  const std::int64_t decodes =
      std::max<std::int64_t>(0, end_token - std::max(computed, entry.prompt_tokens));
  told_.insert(key);
  // One that is still there has at least a token to go.
  running_.push_back({key, computed, prefill,
                      prefill > 0 ? decodes : std::max<std::int64_t>(1, decodes), now_ms,
                      side == 1});
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

double LiveFleet::CostScale(const InstanceId& instance_id) const {
  const auto found = instances_.find(instance_id);
  return found == instances_.end() ? 1.0 : found->second.predictor->cost_scale();
}

}  // namespace dynaserve
