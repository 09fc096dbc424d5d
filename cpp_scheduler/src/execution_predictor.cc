#include "dynaserve/execution_predictor.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace dynaserve {
namespace {

// Sums of a few of them, and products with a number of steps, are far from the end of the range.
constexpr std::int64_t kMost = std::int64_t{1} << 40;

void CheckBetween(const char* field, std::int64_t value, std::int64_t least) {
  if (value < least || value > kMost) {
    throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) +
                                "; it must lie between " + std::to_string(least) + " and 2^40");
  }
}

template <typename Requests, typename KeyOf>
bool EraseKey(Requests& requests, std::uint64_t key, KeyOf key_of) {
  const auto found = std::find_if(requests.begin(), requests.end(),
                                  [&](const auto& request) { return key_of(request) == key; });
  if (found == requests.end()) return false;
  requests.erase(found);
  return true;
}

}  // namespace

void Validate(const InstanceLimits& limits) {
  CheckBetween("max_requests", limits.max_requests, 1);
  CheckBetween("max_step_tokens", limits.max_step_tokens, 1);
  CheckBetween("kv_tokens", limits.kv_tokens, 1);
  CheckBetween("min_prefill_tokens", limits.min_prefill_tokens, 0);
  if (!(limits.step_ms > 0.0)) {
    throw std::invalid_argument("step_ms is " + std::to_string(limits.step_ms) +
                                "; it must be above 0");
  }
  if (!(limits.admit_ms >= 0.0)) {
    throw std::invalid_argument("admit_ms is " + std::to_string(limits.admit_ms) +
                                "; it must not be negative");
  }
}

ExecutionPredictor::ExecutionPredictor(const ProfileTable& table, const InstanceLimits& limits)
    : table_(&table), limits_(limits) {
  Validate(limits);
}

Forecast ExecutionPredictor::Predict(const VirtualRequest& newcomer, double now_ms,
                                     Horizon horizon) {
  Join(newcomer, now_ms);
  return Run(scratch_, kNewcomer, horizon, nullptr);
}

Forecast ExecutionPredictor::PredictPrefill(const VirtualRequest& newcomer, double now_ms,
                                            std::vector<PrefillStep>& steps) {
  struct Watch {
    std::vector<PrefillStep>*& watched;
    ~Watch() { watched = nullptr; }
  };
  steps.clear();
  const Watch watch{watched_steps_ = &steps};
  return Predict(newcomer, now_ms, Horizon::kPrefillEnd);
}

double ExecutionPredictor::PredictDrainMs(const VirtualRequest* newcomer, double now_ms) {
  if (newcomer != nullptr) {
    Join(*newcomer, now_ms);
  } else {
    scratch_ = Tail(now_ms);
  }
  Run(scratch_, kNobody, Horizon::kEnd, nullptr);
  return scratch_.now_ms;
}

void ExecutionPredictor::Snapshot(double now_ms, std::vector<VirtualRequest>& running,
                                  std::vector<VirtualRequest>& waiting) {
  Advance(base_, now_ms);
  running.clear();
  for (const Decode& decode : base_.decodes) {
    const std::int64_t left = decode.end_step - base_.step;
    running.push_back({decode.key, decode.end_context - left, 0, left, base_.now_ms});
  }
  for (const Prefill& prefill : base_.prefills) running.push_back(prefill.request);
  waiting = base_.waiting;
}

void ExecutionPredictor::Add(const VirtualRequest& request, double now_ms) {
  Check(request);
  VirtualRequest added = request;
  added.ready_ms = std::max(added.ready_ms, now_ms);
  Advance(base_, now_ms);
  const std::int64_t before = Work(base_);
  bool overtakes = false;  // what runs in the tail already
  if (!tail_stale_) {
    State& tail = Tail(now_ms);
    overtakes = added.is_beta && added.ready_ms < tail.now_ms;
    Enqueue(tail, added);
  }
  Enqueue(base_, added);
  if (overtakes) ChangedFrom(before);
}

bool ExecutionPredictor::Remove(std::uint64_t key, double now_ms) {
  Advance(base_, now_ms);
  const std::int64_t before = Work(base_);
  if (!Erase(base_, key)) return false;
  if (!tail_stale_) Erase(tail_, key);
  ChangedFrom(before);
  return true;
}

void ExecutionPredictor::Replace(std::span<const VirtualRequest> running,
                                 std::span<const VirtualRequest> waiting, double now_ms,
                                 bool between_steps) {
  for (const VirtualRequest& request : running) Check(request);
  for (const VirtualRequest& request : waiting) Check(request);
  const std::int64_t before = Work(base_);
  base_.now_ms = between_steps ? now_ms : std::max(base_.now_ms, now_ms);
  base_.decode_context = 0;
  base_.decodes.clear();
  base_.prefills.clear();
  base_.waiting.clear();
  for (const VirtualRequest& request : running) {
    if (request.prefill_tokens > 0) {
      base_.prefills.push_back({request, base_.now_ms});
    } else {
      BeginDecode(base_, request, base_.now_ms, base_.now_ms);
    }
  }
  for (const VirtualRequest& request : waiting) Enqueue(base_, request);
  ChangedFrom(before);
}

void ExecutionPredictor::SetCostScale(double cost_scale, double now_ms) {
  if (!(cost_scale > 0.0) || !std::isfinite(cost_scale)) {
    throw std::invalid_argument("cost_scale is " + std::to_string(cost_scale) +
                                "; it must be positive and finite");
  }
  Advance(base_, now_ms);
  const double change = std::abs(cost_scale / cost_scale_ - 1.0);
  cost_scale_ = cost_scale;
  Changed(change * static_cast<double>(Work(base_)));
}

double ExecutionPredictor::PrefillFreeMs(double now_ms) { return Tail(now_ms).now_ms; }

ExecutionPredictor::Overtaken ExecutionPredictor::BeforeBeta(double now_ms) {
  Advance(base_, now_ms);
  Overtaken found{base_.now_ms, 0, 0};
  for (const Prefill& prefill : base_.prefills) {
    found.prefill_tokens += prefill.request.prefill_tokens;
  }
  for (const VirtualRequest& request : base_.waiting) {
    if (!request.is_beta) {
      found.requests += 1;
    } else if (request.ready_ms <= base_.now_ms) {
      found.prefill_tokens += request.prefill_tokens;
    }
  }
  return found;
}

double ExecutionPredictor::AdmittedMs(double now_ms, std::int64_t context_tokens, bool is_beta) {
  if (is_beta) Advance(base_, now_ms);
  const State& state = is_beta ? base_ : Tail(now_ms);
  const auto decodes = static_cast<std::int64_t>(state.decodes.size());
  if (decodes == 0) return state.now_ms;
  const BatchShape shape{0, 0.0, decodes, state.decode_context};
  const bool fits =
      decodes + static_cast<std::int64_t>(state.prefills.size()) < limits_.max_requests &&
      HeldKv(state) + context_tokens <= limits_.kv_tokens &&
      LeavesRoomForDecode(*table_, shape, context_tokens, limits_.MostToAdmitMs() / cost_scale_);
  if (fits) return state.now_ms;
  const std::int64_t steps = state.decodes.front().end_step - state.step;
  const BatchShape halfway{0, 0.0, decodes, state.decode_context + decodes * (steps / 2)};
  return state.now_ms + static_cast<double>(steps) * cost_scale_ * table_->StepMs(halfway);
}

double ExecutionPredictor::SeatMs(double admitted_ms, std::int64_t answer_tokens) const {
  if (admitted_ms <= base_.now_ms) return 0.0;
  const auto decodes = static_cast<std::int64_t>(base_.decodes.size());
  const double step_ms = cost_scale_ * table_->StepMs({0, 0.0, decodes, base_.decode_context});
  return static_cast<double>(answer_tokens) * step_ms / static_cast<double>(decodes);
}

ExecutionPredictor::Load ExecutionPredictor::LoadThen(double now_ms,
                                                      std::optional<std::uint64_t> without) {
  const State& tail = Tail(now_ms);
  std::int64_t prefill_tokens = 0;
  for (const Prefill& prefill : tail.prefills) prefill_tokens += prefill.request.prefill_tokens;
  for (const VirtualRequest& request : tail.waiting) {
    if (request.ready_ms <= tail.now_ms) prefill_tokens += request.prefill_tokens;
  }
  Load load{static_cast<std::int64_t>(tail.decodes.size()), tail.decode_context, HeldKv(tail),
            prefill_tokens};
  if (!without) return load;
  for (const Decode& decode : tail.decodes) {
    if (decode.key != *without) continue;
    load.decodes -= 1;
    load.decode_context_tokens -= decode.end_context - (decode.end_step - tail.step);
  }
  return load;
}

std::int64_t ExecutionPredictor::Decodes(double now_ms) {
  Advance(base_, now_ms);
  return static_cast<std::int64_t>(base_.decodes.size());
}

std::int64_t ExecutionPredictor::Answers(double now_ms, std::optional<std::uint64_t> without) {
  Advance(base_, now_ms);
  const auto answers = [&](const VirtualRequest& request) {
    return request.key != without && (request.decode_tokens > 0 || request.resumes());
  };
  auto count = std::ranges::count_if(base_.decodes,
                                     [&](const Decode& decode) { return decode.key != without; });
  count += std::ranges::count_if(base_.prefills,
                                 [&](const Prefill& prefill) { return answers(prefill.request); });
  count += std::ranges::count_if(base_.waiting, answers);
  return std::min<std::int64_t>(count, limits_.max_requests);
}

std::int64_t ExecutionPredictor::PrefillTokens(double now_ms, std::optional<std::uint64_t> before,
                                               std::int64_t enough) {
  Advance(base_, now_ms);
  std::int64_t tokens = 0;
  for (const Prefill& prefill : base_.prefills) {
    if (prefill.request.key == before) return tokens;
    tokens += prefill.request.prefill_tokens;
  }
  for (const VirtualRequest& request : base_.waiting) {
    if (request.key == before || tokens >= enough) return tokens;
    if (request.is_beta && request.ready_ms > base_.now_ms) continue;
    tokens += request.prefill_tokens;
  }
  return tokens;
}

std::int64_t ExecutionPredictor::Behind(std::uint64_t key, double now_ms) {
  Advance(base_, now_ms);
  bool is_ahead = false;
  std::int64_t behind = 0;
  for (const Prefill& prefill : base_.prefills) {
    behind += is_ahead ? 1 : 0;
    is_ahead |= prefill.request.key == key;
  }
  for (const VirtualRequest& request : base_.waiting) {
    behind += is_ahead && request.ready_ms <= base_.now_ms ? 1 : 0;
    is_ahead |= request.key == key;
  }
  return behind;
}

std::optional<VirtualRequest> ExecutionPredictor::Find(std::uint64_t key, double now_ms) {
  Advance(base_, now_ms);
  for (const Decode& decode : base_.decodes) {
    const std::int64_t left = decode.end_step - base_.step;
    if (decode.key == key) return VirtualRequest{key, decode.end_context - left, 0, left, now_ms};
  }
  for (const Prefill& prefill : base_.prefills) {
    if (prefill.request.key == key) return prefill.request;
  }
  for (const VirtualRequest& request : base_.waiting) {
    if (request.key == key) return request;
  }
  return std::nullopt;
}

std::optional<Forecast> ExecutionPredictor::PredictRest(std::uint64_t key, double now_ms) {
  const std::optional<VirtualRequest> request = Find(key, now_ms);
  if (!request) return std::nullopt;
  // What waits there still has not begun before: the steps of the queue are walked already. But a
  // beta may overtake them, and an instance begin what it was not expected to.
  bool waits = false;
  if (!tail_stale_ && Waits(base_, key)) {
    const State& tail = Tail(now_ms);
    waits = Waits(tail, key) && !(request->is_beta && request->ready_ms < tail.now_ms);
  }
  scratch_ = waits ? tail_ : base_;
  return Run(scratch_, key, Horizon::kEnd, nullptr);
}

bool ExecutionPredictor::Change(const VirtualRequest& changed, double now_ms) {
  Check(changed);
  Advance(base_, now_ms);
  const std::int64_t before = Work(base_);
  if (!ChangeIn(base_, changed)) return false;
  if (!tail_stale_ && Waits(tail_, changed.key)) ChangeIn(tail_, changed);
  ChangedFrom(before);
  return true;
}

std::optional<Forecast> ExecutionPredictor::PredictChange(const VirtualRequest& changed,
                                                          double now_ms, Horizon horizon) {
  Check(changed);
  Advance(base_, now_ms);
  scratch_ = base_;
  const std::optional<Forecast> so_far = ChangeIn(scratch_, changed);
  if (!so_far) return std::nullopt;
  return Run(scratch_, changed.key, horizon, nullptr, *so_far);
}

// Returns what has become of the request so far.
std::optional<Forecast> ExecutionPredictor::ChangeIn(State& state,
                                                     const VirtualRequest& changed) const {
  Forecast so_far;
  // A beta that was predicted to have begun, and whose KV is still to come, waits.
  const bool waits = changed.is_beta && changed.ready_ms > state.now_ms;
  for (auto place = state.prefills.begin(); place != state.prefills.end(); ++place) {
    if (place->request.key != changed.key) continue;
    if (waits) {
      state.prefills.erase(place);
      Enqueue(state, changed);
      return so_far;
    }
    so_far.start_ms = place->start_ms;
    if (changed.prefill_tokens > 0) {
      place->request = changed;
      return so_far;
    }
    so_far.prefill_end_ms = state.now_ms;
    state.prefills.erase(place);
    BeginDecode(state, changed, so_far.start_ms, so_far.prefill_end_ms);
    return so_far;
  }
  const auto decode = std::find_if(state.decodes.begin(), state.decodes.end(),
                                   [&](const Decode& d) { return d.key == changed.key; });
  if (decode != state.decodes.end()) {
    if (!waits && changed.prefill_tokens > 0) return std::nullopt;
    so_far = {decode->start_ms, decode->prefill_end_ms};
    EraseDecode(state, decode);
    if (waits) {
      Enqueue(state, changed);
      return Forecast{};
    }
    BeginDecode(state, changed, so_far.start_ms, so_far.prefill_end_ms);
    return so_far;
  }
  const auto place = std::find_if(state.waiting.begin(), state.waiting.end(),
                                  [&](const VirtualRequest& r) { return r.key == changed.key; });
  if (place == state.waiting.end()) return std::nullopt;
  VirtualRequest waiting = changed;
  waiting.ready_ms = std::max(changed.ready_ms, state.now_ms);
  if (waiting.resumes() == place->resumes()) {
    *place = waiting;
  } else {
    state.waiting.erase(place);
    Enqueue(state, waiting);
  }
  return so_far;
}

void ExecutionPredictor::Check(const VirtualRequest& request) const {
  CheckBetween("context_tokens", request.context_tokens, 0);
  CheckBetween("prefill_tokens", request.prefill_tokens, 0);
  CheckBetween("decode_tokens", request.decode_tokens, 0);
  if (request.prefill_tokens + request.decode_tokens < 1) {
    throw std::invalid_argument("a virtual request has no tokens to compute");
  }
  if (request.key >> 63 != 0) {
    throw std::invalid_argument("key is " + std::to_string(request.key) +
                                "; it must be below 2^63");
  }
  if (!(request.ready_ms < kNever)) {
    throw std::invalid_argument("ready_ms is " + std::to_string(request.ready_ms) +
                                "; it must be finite");
  }
}

void ExecutionPredictor::Enqueue(State& state, const VirtualRequest& request) const {
  auto place = state.waiting.end();
  if (request.is_beta) {
    place = std::ranges::find_if(state.waiting, [&](const VirtualRequest& waiting) {
      return !waiting.is_beta || (request.resumes() && !waiting.resumes());
    });
  }
  state.waiting.insert(place, request);
}

void ExecutionPredictor::BeginDecode(State& state, const VirtualRequest& request, double start_ms,
                                     double prefill_end_ms) {
  state.decode_context += request.context_tokens;
  state.decodes.push_back({state.step + request.decode_tokens, request.end_token(), request.key,
                           start_ms, prefill_end_ms});
  std::push_heap(state.decodes.begin(), state.decodes.end(), EndsLater);
}

bool ExecutionPredictor::Erase(State& state, std::uint64_t key) {
  const auto decode = std::find_if(state.decodes.begin(), state.decodes.end(),
                                   [key](const Decode& d) { return d.key == key; });
  if (decode != state.decodes.end()) {
    EraseDecode(state, decode);
    return true;
  }
  return EraseKey(state.prefills, key, [](const Prefill& p) { return p.request.key; }) ||
         EraseKey(state.waiting, key, [](const VirtualRequest& r) { return r.key; });
}

bool ExecutionPredictor::Waits(const State& state, std::uint64_t key) {
  return std::ranges::any_of(state.waiting,
                             [key](const VirtualRequest& r) { return r.key == key; });
}

std::int64_t ExecutionPredictor::Work(const State& state) {
  std::int64_t tokens = 0;
  for (const Decode& decode : state.decodes) tokens += decode.end_step - state.step;
  for (const Prefill& prefill : state.prefills) {
    tokens += prefill.request.prefill_tokens + prefill.request.decode_tokens;
  }
  for (const VirtualRequest& request : state.waiting) {
    tokens += request.prefill_tokens + request.decode_tokens;
  }
  return tokens;
}

void ExecutionPredictor::ChangedFrom(std::int64_t work_before) {
  Changed(static_cast<double>(std::abs(Work(base_) - work_before)));
}

void ExecutionPredictor::Changed(double work) {
  changed_work_ += work;
  tail_lags_ = true;
  tail_stale_ |= base_.waiting.size() < kDeepQueue || changed_work_ > kSlack * played_work_;
}

void ExecutionPredictor::EraseDecode(State& state, std::vector<Decode>::iterator decode) {
  state.decode_context -= decode->end_context - (decode->end_step - state.step);
  state.decodes.erase(decode);
  std::make_heap(state.decodes.begin(), state.decodes.end(), EndsLater);
}

}  // namespace dynaserve
