#include "dynaserve/execution_predictor.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace dynaserve {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

void CheckAtLeast(const char* field, std::int64_t value, std::int64_t least) {
  if (value < least) {
    throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) +
                                "; it must be at least " + std::to_string(least));
  }
}

// The last of the steps, each of which adds one token to the mean context, that lies in the same
// cell of the table as the first: up to there latency is linear.
std::int64_t StepsInCell(double mean_context) {
  for (const double bin : kContextBins) {
    if (bin > mean_context) return static_cast<std::int64_t>(bin - mean_context) + 1;
  }
  return std::numeric_limits<std::int64_t>::max();
}

// The fewest steps, at most `most`, that last `span_ms` together, when they grow evenly.
std::int64_t StepsToReach(double span_ms, double first_ms, double growth_ms, std::int64_t most) {
  std::int64_t few = 0, enough = most;
  while (enough - few > 1) {
    const std::int64_t middle = few + (enough - few) / 2;
    const auto n = static_cast<double>(middle);
    (n * first_ms + growth_ms * n * (n - 1.0) / 2.0 >= span_ms ? enough : few) = middle;
  }
  return enough;
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
  CheckAtLeast("max_requests", limits.max_requests, 1);
  CheckAtLeast("max_step_tokens", limits.max_step_tokens, 1);
  CheckAtLeast("kv_tokens", limits.kv_tokens, 1);
  CheckAtLeast("min_prefill_tokens", limits.min_prefill_tokens, 0);
  if (!(limits.step_ms > 0.0)) {
    throw std::invalid_argument("step_ms is " + std::to_string(limits.step_ms) +
                                "; it must be above 0");
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
  if (!tail_stale_) {
    State& tail = Tail(now_ms);
    if (added.is_beta && added.ready_ms < tail.now_ms) {
      tail_stale_ = true;  // it overtakes what runs there already
    } else {
      Enqueue(tail, added);
    }
  }
  Enqueue(base_, added);
}

bool ExecutionPredictor::Remove(std::uint64_t key, double now_ms) {
  Advance(base_, now_ms);
  const auto decode = std::find_if(base_.decodes.begin(), base_.decodes.end(),
                                   [key](const Decode& d) { return d.key == key; });
  if (decode != base_.decodes.end()) {
    EraseDecode(base_, decode);
  } else if (!EraseKey(base_.prefills, key, [](const Prefill& p) { return p.request.key; }) &&
             !EraseKey(base_.waiting, key, [](const VirtualRequest& r) { return r.key; })) {
    return false;
  }
  tail_stale_ = true;
  return true;
}

void ExecutionPredictor::Replace(std::span<const VirtualRequest> running,
                                 std::span<const VirtualRequest> waiting, double now_ms,
                                 bool between_steps) {
  for (const VirtualRequest& request : running) Check(request);
  for (const VirtualRequest& request : waiting) Check(request);
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
  tail_stale_ = true;
}

void ExecutionPredictor::SetCostScale(double cost_scale, double now_ms) {
  if (!(cost_scale > 0.0) || !std::isfinite(cost_scale)) {
    throw std::invalid_argument("cost_scale is " + std::to_string(cost_scale) +
                                "; it must be positive and finite");
  }
  Advance(base_, now_ms);
  cost_scale_ = cost_scale;
  tail_stale_ = true;
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
      LeavesRoomForDecode(*table_, shape, context_tokens, limits_.step_ms / cost_scale_);
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
  if (!Find(key, now_ms)) return std::nullopt;
  const auto is_it = [key](const VirtualRequest& request) { return request.key == key; };
  // What waits there still has not begun before: the steps of the queue are walked already.
  const bool waits = !tail_stale_ && std::ranges::any_of(Tail(now_ms).waiting, is_it);
  scratch_ = waits ? tail_ : base_;
  return Run(scratch_, key, Horizon::kEnd, nullptr);
}

bool ExecutionPredictor::Change(const VirtualRequest& changed, double now_ms) {
  Check(changed);
  Advance(base_, now_ms);
  if (!ChangeIn(base_, changed)) return false;
  tail_stale_ = true;
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
  CheckAtLeast("context_tokens", request.context_tokens, 0);
  CheckAtLeast("prefill_tokens", request.prefill_tokens, 0);
  CheckAtLeast("decode_tokens", request.decode_tokens, 0);
  if (request.prefill_tokens + request.decode_tokens < 1) {
    throw std::invalid_argument("a virtual request has no tokens to compute");
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

void ExecutionPredictor::EraseDecode(State& state, std::vector<Decode>::iterator decode) {
  state.decode_context -= decode->end_context - (decode->end_step - state.step);
  state.decodes.erase(decode);
  std::make_heap(state.decodes.begin(), state.decodes.end(), EndsLater);
}

void ExecutionPredictor::End(std::uint64_t key, const Forecast& forecast,
                             std::vector<Ended>* ended) {
  if (key == watched_) watched_forecast_.end_ms = forecast.end_ms;
  if (ended != nullptr) ended->push_back({key, forecast});
}

std::int64_t ExecutionPredictor::HeldKv(const State& state) const {
  std::int64_t tokens = state.decode_context;
  for (const Prefill& prefill : state.prefills) {
    tokens += prefill.request.context_tokens + prefill.request.prefill_tokens;
  }
  return tokens;
}

ExecutionPredictor::Gathered ExecutionPredictor::Gather(State& state) {
  Gathered gathered;
  work_.clear();
  candidates_.clear();
  std::int64_t tokens = 0;
  // What runs, or will once the candidates before it are admitted.
  auto seats = static_cast<std::int64_t>(state.decodes.size() + state.prefills.size());
  std::int64_t kv = HeldKv(state);
  BatchShape decodes{0, 0.0, static_cast<std::int64_t>(state.decodes.size()), state.decode_context};
  for (const Prefill& prefill : state.prefills) {
    const VirtualRequest& request = prefill.request;
    work_.push_back({request.prefill_tokens, request.context_tokens});
    tokens += request.prefill_tokens;
    if (request.decode_tokens == 0) continue;
    decodes.decodes += 1;
    decodes.decode_context_tokens += request.context_tokens + request.prefill_tokens;
  }
  for (std::size_t i = 0; i < state.waiting.size();) {
    const VirtualRequest request = state.waiting[i];
    if (request.ready_ms > state.now_ms) {
      gathered.next_ready_ms = std::min(gathered.next_ready_ms, request.ready_ms);
      ++i;
      continue;
    }
    // The token that one samples from is computed with the step, as that of any decode.
    const std::int64_t context =
        request.context_tokens + (request.resumes() ? 0 : request.prefill_tokens);
    const bool overtakes = request.is_beta && request.resumes();
    const bool fits =
        (overtakes || tokens < limits_.max_step_tokens) && seats < limits_.max_requests &&
        kv + context <= limits_.kv_tokens &&
        (request.decode_tokens == 0 || decodes.decodes == 0 ||
         LeavesRoomForDecode(*table_, decodes, context, limits_.step_ms / cost_scale_));
    if (!fits && seats > 0) {
      gathered.reached_end = false;
      break;
    }
    seats += 1;
    kv += context;
    if (request.decode_tokens > 0 || request.resumes()) {
      decodes.decodes += 1;
      decodes.decode_context_tokens += context;
    }
    if (!request.resumes()) {
      work_.push_back({request.prefill_tokens, request.context_tokens});
      candidates_.push_back(i);
      tokens += request.prefill_tokens;
      ++i;
    } else if (request.prefill_tokens > 0) {
      if (request.key == watched_) watched_forecast_.start_ms = state.now_ms;
      VirtualRequest decode = request;
      decode.prefill_tokens = 0;
      decode.decode_tokens += 1;
      BeginDecode(state, decode, state.now_ms, kNever);
      state.has_first_tokens = true;
      state.waiting.erase(state.waiting.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      if (request.key == watched_) {
        watched_forecast_.start_ms = watched_forecast_.prefill_end_ms = state.now_ms;
      }
      BeginDecode(state, request, state.now_ms, state.now_ms);
      state.waiting.erase(state.waiting.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return gathered;
}

bool ExecutionPredictor::Step(State& state, double until_ms, std::vector<Ended>* ended) {
  const Gathered gathered = Gather(state);
  if (!work_.empty()) {
    StepWithPrefill(state, ended);
  } else if (!state.decodes.empty()) {
    // The step of a first token is one of its own.
    Stretch(state,
            state.has_first_tokens ? state.now_ms : std::min(until_ms, gathered.next_ready_ms));
    TellFirstTokens(state);
    EndDecodes(state, ended);
  } else {
    if (!(gathered.next_ready_ms < until_ms)) return false;
    state.now_ms = gathered.next_ready_ms;
  }
  return true;
}

PrefillBudget ExecutionPredictor::BudgetBeside(const Load& load, const PrefillWork& work) {
  return BudgetOf({0, 0.0, load.decodes, load.decode_context_tokens}, {&work, 1});
}

PrefillBudget ExecutionPredictor::BudgetOf(const BatchShape& decodes,
                                           std::span<const PrefillWork> work) {
  const double limit_ms = decodes.decodes == 0 ? kNever : limits_.step_ms / cost_scale_;
  const BatchLimits limits{limit_ms, limits_.max_step_tokens, limits_.min_prefill_tokens};
  if (work.size() != 1) return ChooseBudget(*table_, decodes, work, limits);
  const PrefillWork& only = work.front();
  const std::uint64_t mixed =
      0x9E3779B97F4A7C15U *
      static_cast<std::uint64_t>(decodes.decode_context_tokens + 31 * only.context_tokens +
                                 7 * decodes.decodes);
  KnownBudget& known = known_budgets_[mixed >> 58];
  static_assert(kKnownBudgets == 64);
  if (known.decodes == decodes.decodes && known.decode_context == decodes.decode_context_tokens &&
      known.context == only.context_tokens && known.limit_ms == limit_ms &&
      known.observed == table_->observed() && only.tokens > known.budget.within) {
    return known.budget;
  }
  const PrefillBudget budget = ChooseBudget(*table_, decodes, work, limits);
  // Of more work than fits the budget is the same; what just fits may be taken whole.
  const bool bounded = budget.within < only.tokens;
  if (bounded && budget.reason != BudgetReason::kMinimumShare) {
    known = {decodes.decodes,
             decodes.decode_context_tokens,
             only.context_tokens,
             table_->observed(),
             limit_ms,
             budget};
  }
  return budget;
}

void ExecutionPredictor::TellFirstTokens(State& state) {
  if (!state.has_first_tokens) return;
  state.has_first_tokens = false;
  for (Decode& decode : state.decodes) {
    if (decode.prefill_end_ms != kNever) continue;
    decode.prefill_end_ms = state.now_ms;
    if (decode.key == watched_) watched_forecast_.prefill_end_ms = state.now_ms;
  }
}

void ExecutionPredictor::StepWithPrefill(State& state, std::vector<Ended>* ended) {
  const BatchShape decodes{0, 0.0, static_cast<std::int64_t>(state.decodes.size()),
                           state.decode_context};
  const PrefillBudget budget = BudgetOf(decodes, work_);
  const double started_ms = state.now_ms;
  state.now_ms += budget.step_ms * cost_scale_;
  state.step += 1;
  state.decode_context += decodes.decodes;
  TellFirstTokens(state);
  EndDecodes(state, ended);

  std::int64_t left = budget.tokens;
  for (const Prefill& prefill : state.prefills) {
    left -= std::min(left, prefill.request.prefill_tokens);
  }
  std::size_t admitted = 0;
  for (const std::size_t i : candidates_) {
    if (left == 0) break;
    const auto place = state.waiting.begin() + static_cast<std::ptrdiff_t>(i - admitted);
    left -= std::min(left, place->prefill_tokens);
    if (place->key == watched_) watched_forecast_.start_ms = started_ms;
    state.prefills.push_back({*place, started_ms});
    state.waiting.erase(place);
    ++admitted;
  }

  left = budget.tokens;
  std::size_t kept = 0;
  for (Prefill& prefill : state.prefills) {
    VirtualRequest& request = prefill.request;
    const std::int64_t taken = std::min(left, request.prefill_tokens);
    left -= taken;
    request.prefill_tokens -= taken;
    request.context_tokens += taken;
    if (request.key == watched_ && taken > 0) {
      watched_forecast_.last_prefill_tokens = taken;
      watched_forecast_.first_prefill_end_ms =
          std::min(watched_forecast_.first_prefill_end_ms, state.now_ms);
      if (watched_steps_ != nullptr) {
        watched_steps_->push_back({state.now_ms, request.context_tokens});
      }
    }
    if (request.prefill_tokens > 0) {
      state.prefills[kept++] = prefill;
      continue;
    }
    if (request.key == watched_) watched_forecast_.prefill_end_ms = state.now_ms;
    if (request.decode_tokens > 0) {
      BeginDecode(state, request, prefill.start_ms, state.now_ms);
    } else {
      End(request.key, {prefill.start_ms, state.now_ms, state.now_ms}, ended);
    }
  }
  state.prefills.resize(kept);
}

void ExecutionPredictor::Stretch(State& state, double until_ms) {
  const auto decodes = static_cast<std::int64_t>(state.decodes.size());
  std::int64_t left = state.decodes.front().end_step - state.step;
  const auto step_ms = [&](std::int64_t later) {
    return cost_scale_ * table_->StepMs({0, 0.0, decodes, state.decode_context + later * decodes});
  };
  while (left > 0) {
    const double mean = static_cast<double>(state.decode_context) / static_cast<double>(decodes);
    std::int64_t steps = std::min(left, StepsInCell(mean));
    const double first_ms = step_ms(0);
    double last_ms = steps > 1 ? step_ms(steps - 1) : first_ms;
    const double growth_ms =
        steps > 1 ? (last_ms - first_ms) / static_cast<double>(steps - 1) : 0.0;
    double span_ms = 0.5 * (first_ms + last_ms) * static_cast<double>(steps);
    const bool reaches = state.now_ms + span_ms >= until_ms;
    if (reaches) {
      steps = StepsToReach(until_ms - state.now_ms, first_ms, growth_ms, steps);
      const auto n = static_cast<double>(steps);
      span_ms = n * first_ms + growth_ms * n * (n - 1.0) / 2.0;
      last_ms = first_ms + growth_ms * (n - 1.0);
    }
    state.now_ms += span_ms;
    state.step += steps;
    state.decode_context += steps * decodes;
    left -= steps;
    if (reaches) return;
  }
}

void ExecutionPredictor::EndDecodes(State& state, std::vector<Ended>* ended) {
  while (!state.decodes.empty() && state.decodes.front().end_step <= state.step) {
    const Decode decode = state.decodes.front();
    std::pop_heap(state.decodes.begin(), state.decodes.end(), EndsLater);
    state.decodes.pop_back();
    state.decode_context -= decode.end_context;
    End(decode.key, {decode.start_ms, decode.prefill_end_ms, state.now_ms}, ended);
  }
}

void ExecutionPredictor::Advance(State& state, double now_ms) {
  while (state.now_ms < now_ms) {
    if (!Step(state, now_ms, nullptr)) state.now_ms = now_ms;
  }
}

ExecutionPredictor::State& ExecutionPredictor::Tail(double now_ms) {
  if (tail_stale_) {
    Advance(base_, now_ms);
    tail_ = base_;
    tail_stale_ = false;
  }
  Advance(tail_, now_ms);
  while (!Gather(tail_).reached_end) Step(tail_, kNever, nullptr);
  return tail_;
}

void ExecutionPredictor::Join(const VirtualRequest& newcomer, double now_ms) {
  Check(newcomer);
  VirtualRequest request = newcomer;
  request.key = kNewcomer;
  request.ready_ms = std::max(request.ready_ms, now_ms);
  const State& tail = Tail(now_ms);
  const bool comes_before = request.is_beta && request.ready_ms < tail.now_ms;
  if (comes_before) Advance(base_, now_ms);
  scratch_ = comes_before ? base_ : tail;
  Enqueue(scratch_, request);
}

Forecast ExecutionPredictor::Run(State& state, std::uint64_t watched, Horizon horizon,
                                 std::vector<Ended>* ended, const Forecast& so_far) {
  watched_ = watched;
  watched_forecast_ = so_far;
  const double& goal =
      horizon == Horizon::kEnd ? watched_forecast_.end_ms : watched_forecast_.prefill_end_ms;
  while (goal == kNever && Step(state, kNever, ended)) {
  }
  watched_ = kNobody;
  return watched_forecast_;
}

}  // namespace dynaserve
