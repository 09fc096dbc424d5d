// Hand-offs that change after a request was placed: moved, lifted, or cut late.
#include <algorithm>
#include <limits>

#include "dynaserve/late_cut.h"
#include "dynaserve/live_fleet.h"
#include "dynaserve/live_requests.h"

namespace dynaserve {

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

// Of those where all that decode, or are going to, have seats, memory and time beside one more,
// also when they have grown as old as decodes become.
LiveFleet::Instance* LiveFleet::RoomiestGatherer(std::int64_t context_tokens, double now_ms,
                                                 InstanceId& instance_id) {
  Instance* roomiest = nullptr;
  std::int64_t most = std::numeric_limits<std::int64_t>::min();
  for (auto& [id, instance] : instances_) {
    const std::int64_t room = instance.limits.kv_tokens - instance.promised_tokens;
    if (!instance.gathers || !instance.accepts_new || room <= most) continue;
    if (!HasRoom(instance, context_tokens, now_ms)) continue;
    const std::int64_t decodes = instance.predictor->Answers(now_ms) + 1;
    if (decodes > instance.limits.max_requests) continue;
    const std::int64_t held = instance.predictor->LoadThen(now_ms).kv_tokens;
    if (held + context_tokens > instance.limits.kv_tokens) continue;
    if (AtMeanAgeMs(instance, decodes) > instance.limits.MostToAdmitMs()) continue;
    roomiest = &instance;
    most = room;
    instance_id = id;
  }
  return roomiest;
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

void LiveFleet::Parked(const std::string& request_id, std::int64_t computed_tokens, double now_ms) {
  now_ms = At(now_ms);
  const auto found = entries_.find(request_id);
  if (found == entries_.end() || found->second.parts.size() < 2 || computed_tokens < 1) return;
  Entry& entry = found->second;
  entry.revisions_left = 0;
  CutAt(entry, computed_tokens, ParkedReadyMs(entry, computed_tokens, now_ms), now_ms);
  const auto alpha = instances_.find(entry.parts[0].instance_id);
  if (alpha != instances_.end()) alpha->second.predictor->Remove(KeyOf(entry.ordinal, 0), now_ms);
}

// When beta has the KV of an alpha that stands: as was foretold, but not after all of it could have
// left now.
double LiveFleet::ParkedReadyMs(const Entry& entry, std::int64_t computed_tokens, double now_ms) {
  const double at_once_ms = now_ms + options_.hand_off_ms;
  const auto beta = instances_.find(entry.parts[1].instance_id);
  if (beta == instances_.end()) return at_once_ms;
  const auto foretold = beta->second.predictor->Find(KeyOf(entry.ordinal, 1), now_ms);
  if (!foretold) return at_once_ms;
  const double latest_ms = at_once_ms + options_.kv_token_ms * static_cast<double>(computed_tokens);
  return std::clamp(foretold->ready_ms, at_once_ms, latest_ms);
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

}  // namespace dynaserve
