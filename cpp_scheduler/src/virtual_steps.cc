// The steps that ExecutionPredictor plays: who is admitted, what a step takes, and how long.
#include <algorithm>
#include <cmath>
#include <limits>

#include "dynaserve/execution_predictor.h"

namespace dynaserve {
namespace {

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

}  // namespace

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
         LeavesRoomForDecode(*table_, decodes, context, limits_.MostToAdmitMs() / cost_scale_));
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
  const bool is_old = tail_lags_ && now_ms - played_ms_ > kSlack * (tail_.now_ms - played_ms_);
  if (tail_stale_ || is_old) {
    Advance(base_, now_ms);
    tail_ = base_;
    tail_stale_ = tail_lags_ = false;
    played_ms_ = now_ms;
    played_work_ = static_cast<double>(Work(base_));
    changed_work_ = 0.0;
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
