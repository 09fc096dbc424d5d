#include "dynaserve/simulated_instance.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <stdexcept>
#include <string>

namespace dynaserve {

void Validate(const EngineOptions& options) {
  const auto check = [](const char* field, std::int64_t value, std::int64_t least) {
    if (value < least) {
      throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) +
                                  "; it must be at least " + std::to_string(least));
    }
  };
  check("max_step_tokens", options.max_step_tokens, 1);
  check("max_running", options.max_running, 1);
  check("kv_tokens", options.kv_tokens, 1);
  check("min_prefill_tokens", options.min_prefill_tokens, 0);
  if (!(options.slo_ms > 0.0)) {
    throw std::invalid_argument("slo_ms is " + std::to_string(options.slo_ms) +
                                "; it must be above 0");
  }
  if (!(options.margin > 0.0 && options.margin <= 1.0)) {
    throw std::invalid_argument("margin is " + std::to_string(options.margin) +
                                "; it must be in (0, 1]");
  }
}

namespace {

// Of the errors for which this share is the margin of steps that prefill.
double SigmaOf(double margin) { return -std::log(margin) / AdmissionMargin::kMostSigmas; }

}  // namespace

SimulatedInstance::SimulatedInstance(const ProfileTable& table, const EngineOptions& options)
    : table_(&table), options_(options), margin_(options.margin), sigma_(SigmaOf(options.margin)) {
  Validate(options);
}

void SimulatedInstance::SetMargin(double margin) {
  margin_ = std::max(AdmissionMargin::kLeastShare, margin);
  sigma_ = SigmaOf(margin);
}

void SimulatedInstance::Add(const SimulatedSequence& sequence) {
  // Who admits a prompt asks for room for all of it, also where it ends within.
  if (const std::int64_t most = std::max(sequence.end, sequence.known); most > options_.kv_tokens) {
    throw std::invalid_argument("a request of " + std::to_string(most) +
                                " tokens never fits into " + std::to_string(options_.kv_tokens) +
                                " tokens of KV cache");
  }
  // As the engine does: decodes come first, then what is about to be one, then prompts that have
  // begun elsewhere.
  const auto rank = [](const SimulatedSequence& waiting) {
    if (!waiting.is_beta) return 3;
    return waiting.decodes() ? 0 : waiting.resumes() ? 1 : 2;
  };
  const auto goes_before = [&](const SimulatedSequence& waiting) {
    return sequence.is_beta && rank(sequence) < rank(waiting);
  };
  waiting_.insert(std::ranges::find_if(waiting_, goes_before), sequence);
}

std::int64_t SimulatedInstance::MoveEnd(std::uint32_t request, std::int64_t end, bool keeps_kv) {
  assert(!stepping_);
  const auto move_in = [&](auto& sequences) -> std::int64_t {
    for (SimulatedSequence& sequence : sequences) {
      if (sequence.request != request || sequence.is_beta) continue;
      sequence.keeps_kv = keeps_kv;
      return sequence.end = std::max(end, sequence.computed + 1);
    }
    return 0;
  };
  const std::int64_t moved = move_in(running_);
  return moved > 0 ? moved : move_in(waiting_);
}

double SimulatedInstance::BeginStep(double now_ms) {
  assert(!stepping_);
  if (idle()) return 0.0;
  now_ms_ = now_ms;
  preempted_ = false;
  // Whoever loses its KV makes room for the others; the first to have come is never the last here.
  while (true) {
    GatherDecodes(now_ms);
    if (FreeKv() >= 0) {
      GatherPrefills();
      Spend(Budget());
      if (step_tokens_ > 0) break;
    }
    if (running_.empty() && kept_kv_ > 0) return 0.0;
    Preempt();
  }
  stepping_ = true;
  return table_->StepMs(shape_);
}

void SimulatedInstance::GatherDecodes(double now_ms) {
  chunk_.assign(running_.size(), 0);
  shape_ = {};
  step_tokens_ = 0;
  due_ms_ = now_ms + options_.slo_ms;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const SimulatedSequence& sequence = running_[i];
    if (!sequence.decodes()) continue;
    chunk_[i] = 1;
    ++shape_.decodes;
    shape_.decode_context_tokens += sequence.computed + 1;
    due_ms_ = std::min(due_ms_, sequence.last_token_ms + options_.slo_ms);
  }
  step_tokens_ = shape_.decodes;
  while (!waiting_.empty() && waiting_.front().resumes() && CanResume(waiting_.front())) Resume();
}

bool SimulatedInstance::CanResume(const SimulatedSequence& sequence) const {
  if (running_.size() >= static_cast<std::size_t>(options_.max_running)) return false;
  if (FreeKv() <= sequence.computed) return false;
  // Nobody waits yet for the next token of one that has none: it waits for room as prompts do.
  if (sequence.decodes() || options_.batching != Batching::kSlo) return true;
  const BatchShape decodes = DecodesLater();
  return decodes.decodes == 0 ||
         LeavesRoomForDecode(*table_, decodes, sequence.known, options_.slo_ms * AdmittingShare());
}

// Those there are once all prefill is done that runs: one that ends in its prompt becomes none.
BatchShape SimulatedInstance::DecodesLater() const {
  BatchShape decodes{0, 0.0, shape_.decodes, shape_.decode_context_tokens};
  for (std::size_t i = 0; i < running_.size(); ++i) {
    if (chunk_[i] > 0 || !running_[i].becomes_decode()) continue;
    ++decodes.decodes;
    decodes.decode_context_tokens += running_[i].known;
  }
  return decodes;
}

// The first of those that wait.
const SimulatedSequence& SimulatedInstance::Admit() {
  SimulatedSequence& sequence = running_.emplace_back(waiting_.front());
  waiting_.pop_front();
  if (std::exchange(sequence.is_kept, false)) begun_.push_back(sequence.request);
  return sequence;
}

// Beside whatever prompt: it needs nothing but the token that it samples from.
void SimulatedInstance::Resume() {
  const SimulatedSequence& sequence = Admit();
  chunk_.push_back(1);
  kv_used_ += sequence.computed;
  ++step_tokens_;
  ++shape_.decodes;
  shape_.decode_context_tokens += sequence.computed + 1;
  if (sequence.decodes()) {
    due_ms_ = std::min(due_ms_, sequence.last_token_ms + options_.slo_ms);
  }
}

// Work beyond a full step is of no interest.
void SimulatedInstance::GatherPrefills() {
  work_.clear();
  work_of_.clear();
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < running_.size() && tokens < options_.max_step_tokens; ++i) {
    const SimulatedSequence& sequence = running_[i];
    if (chunk_[i] > 0) continue;
    const std::int64_t left = std::min(sequence.known, sequence.end) - sequence.computed;
    work_.push_back({left, sequence.computed});
    work_of_.push_back(i);
    tokens += left;
  }
  if (preempted_ && !running_.empty()) return;
  std::int64_t free_kv = FreeKv();
  BatchShape decodes = DecodesLater();
  std::size_t seats = static_cast<std::size_t>(options_.max_running) -
                      std::min(running_.size(), static_cast<std::size_t>(options_.max_running));
  for (const SimulatedSequence& sequence : waiting_) {
    if (tokens >= options_.max_step_tokens || seats == 0 || free_kv < sequence.known) return;
    const bool decodes_later = sequence.becomes_decode();
    if (options_.batching == Batching::kSlo && decodes_later && !sequence.decodes() &&
        decodes.decodes > 0 &&
        !LeavesRoomForDecode(*table_, decodes, sequence.known,
                             options_.slo_ms * AdmittingShare())) {
      return;
    }
    const std::int64_t left = std::min(sequence.known, sequence.end) - sequence.computed;
    work_.push_back({left, sequence.computed});
    tokens += left;
    free_kv -= sequence.known;
    if (decodes_later) {
      ++decodes.decodes;
      decodes.decode_context_tokens += sequence.known;
    }
    --seats;
  }
}

std::int64_t SimulatedInstance::Budget() {
  const std::int64_t most = std::max<std::int64_t>(0, options_.max_step_tokens - shape_.decodes);
  if (options_.batching == Batching::kFixedChunk || work_.empty()) return most;
  const BatchLimits limits{LimitMs(), options_.max_step_tokens, options_.min_prefill_tokens};
  // Alone, prompts go on.
  const std::int64_t least = shape_.decodes == 0 ? 1 : 0;
  return std::min(most, std::max(least, ChooseBudget(*table_, shape_, work_, limits).tokens));
}

double SimulatedInstance::AdmittingShare() const { return admission_.Share(sigma_); }

double SimulatedInstance::LimitMs() const {
  if (shape_.decodes > 0) return std::max(0.0, (due_ms_ - now_ms_) * margin_);
  double left_ms = std::numeric_limits<double>::infinity();
  for (const auto& [request, expected] : expected_) {
    const BatchShape own{.decodes = 1, .decode_context_tokens = expected.prompt};
    const double comes_in_ms = std::max(0.0, expected.at_ms - now_ms_);
    left_ms = std::min(left_ms, comes_in_ms + options_.slo_ms - table_->StepMs(own));
  }
  return std::max(0.0, left_ms * margin_);
}

void SimulatedInstance::Spend(std::int64_t budget) {
  for (std::size_t i = 0; i < work_.size() && budget > 0; ++i) {
    const bool is_new = i >= work_of_.size();
    const std::int64_t held = is_new ? work_[i].context_tokens : 0;
    const std::int64_t tokens = std::min({work_[i].tokens, budget, FreeKv() - held});
    if (tokens <= 0) return;
    if (is_new) {
      kv_used_ += held;
      Admit();
      chunk_.push_back(tokens);
    } else {
      chunk_[work_of_[i]] = tokens;
    }
    shape_.prefill_tokens += tokens;
    shape_.prefill_pairs += PrefillPairs(tokens, work_[i].context_tokens);
    step_tokens_ += tokens;
    budget -= tokens;
  }
}

void SimulatedInstance::Preempt() {
  // Nothing runs and nothing can begin only if one sequence is larger than the memory.
  if (running_.empty())
    throw std::logic_error("an instance with waiting work cannot run any of it");
  // Engines keep prompts that run behind decodes, and take the last of all.
  const auto prompt = std::find_if(running_.rbegin(), running_.rend(),
                                   [](const auto& running) { return !running.decodes(); });
  const auto last = prompt == running_.rend() ? running_.end() - 1 : prompt.base() - 1;
  SimulatedSequence sequence = *last;
  running_.erase(last);
  kv_used_ -= sequence.computed;
  sequence.computed = 0;
  waiting_.push_front(sequence);
  preempted_ = true;
  ++use_.preemptions;
}

void SimulatedInstance::ReleaseKv(std::int64_t tokens) {
  assert(tokens <= kept_kv_);
  kept_kv_ -= tokens;
  kv_used_ -= tokens;
}

void SimulatedInstance::EndStep(double now_ms, double step_ms, std::vector<StepResult>& results) {
  stepping_ = false;
  kv_used_ += step_tokens_;
  ++use_.steps;
  use_.busy_ms += step_ms;
  use_.tokens += static_cast<double>(step_tokens_);
  use_.attention_pairs += shape_.prefill_pairs + static_cast<double>(shape_.decode_context_tokens);
  use_.kv_token_ms += static_cast<double>(kv_used_) * step_ms;
  use_.most_kv_tokens = std::max(use_.most_kv_tokens, kv_used_);
  std::size_t kept = 0;
  std::int64_t gaps = 0, late = 0, left = 0;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    SimulatedSequence sequence = running_[i];
    if (chunk_[i] > 0) {
      sequence.computed += chunk_[i];
      StepResult result{sequence, false, sequence.computed == sequence.end};
      if (sequence.computed == sequence.known && sequence.computed >= sequence.prompt) {
        result.sampled = true;
        if (sequence.known > sequence.prompt) {
          ++gaps;
          late += now_ms > sequence.last_token_ms + options_.slo_ms;
        }
        ++sequence.known;
        sequence.last_token_ms = now_ms;
        result.sequence = sequence;
      }
      results.push_back(result);
      if (result.ended) {
        left += sequence.becomes_decode();
        if (sequence.keeps_kv) {
          kept_kv_ += sequence.computed;
        } else {
          kv_used_ -= sequence.computed;
        }
        continue;
      }
    }
    running_[kept++] = sequence;
  }
  running_.resize(kept);
  admission_.Observe(gaps, late, left);
}

}  // namespace dynaserve
