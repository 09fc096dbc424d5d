// SimulatedInstance plays one engine on a virtual clock: admission, batches by the same rule as the
// real local scheduler (batch_rule.h), KV memory and preemption, step by step.
//
// A request's KV is counted in tokens, not in blocks.  As in vLLM's scheduler, a request is
// admitted if all tokens that it has to compute would fit beside what is held now
// (scheduler_reserve_full_isl); where no token of KV is left for a running decode, the prompt
// admitted last, or if none runs the decode, loses its KV and computes it again, and nobody is
// admitted in that step.
//
// Not thread-safe.  No clock: the caller passes the time and how long a step took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "dynaserve/admission_margin.h"
#include "dynaserve/batch_rule.h"
#include "dynaserve/profile_table.h"

namespace dynaserve {

enum class Batching {
  kFixedChunk,  // decodes, then prefill up to max_step_tokens (vLLM's chunked prefill)
  kSlo,         // decodes, then what ChooseBudget() says
};

struct EngineOptions {
  Batching batching = Batching::kFixedChunk;
  std::int64_t max_step_tokens = 2048;
  std::int64_t max_running = 256;
  std::int64_t kv_tokens = std::int64_t{1} << 40;
  std::int64_t min_prefill_tokens = 16;                     // read by kSlo
  double slo_ms = std::numeric_limits<double>::infinity();  // of a step with decodes; read by kSlo
  // Of the time left until a decode is due, the share that a step may take; read by kSlo.  Who may
  // begin is asked by the sigma that it stands for (AdmissionMargin::kMostSigmas of them).
  double margin = 1.0;

  bool operator==(const EngineOptions&) const = default;
};

// Throws std::invalid_argument, naming the field, unless the counts are at least 1 (the minimum
// share: at least 0), slo_ms is above 0 and margin in (0, 1].
void Validate(const EngineOptions& options);

// One micro-request: it has `computed` tokens, knows `known` ones and ends at `end` computed ones.
struct SimulatedSequence {
  std::uint32_t request = 0;
  bool is_beta = false;
  std::int64_t prompt = 0;
  std::int64_t computed = 0;
  std::int64_t known = 0;
  std::int64_t end = 0;
  double last_token_ms = 0.0;  // of its last output token; read once it has known > prompt
  bool keeps_kv = false;       // when it ends, until ReleaseKv()
  bool is_kept = false;        // where it comes from, until it begins here

  std::int64_t missing() const { return known - computed; }
  bool decodes() const { return known > prompt && missing() == 1; }
  bool resumes() const { return is_beta && missing() == 1; }
  bool becomes_decode() const { return end > prompt; }
};

// What became of a sequence in a step.
struct StepResult {
  SimulatedSequence sequence;  // after the step
  bool sampled = false;        // an output token came
  bool ended = false;          // it computed its last token and left
};

// Totals since the start.
struct InstanceUse {
  std::int64_t steps = 0;
  double busy_ms = 0.0;
  double tokens = 0.0;           // computed, also those computed again after a preemption
  double attention_pairs = 0.0;  // (new, visible), decodes included
  double kv_token_ms = 0.0;      // KV tokens held, over busy time
  std::int64_t most_kv_tokens = 0;
  std::int64_t preemptions = 0;
};

class SimulatedInstance {
 public:
  // table must outlive the instance.  Throws std::invalid_argument as Validate() does.
  SimulatedInstance(const ProfileTable& table, const EngineOptions& options);

  // Puts a sequence at the end of the queue, a beta before those that have not begun, and one that
  // resumes before all others.  Throws std::invalid_argument if it can never fit.
  void Add(const SimulatedSequence& sequence);

  // A sequence that is here, and is no beta, ends at `end` instead, or with its next token where it
  // is further.  Returns where; 0: it is not here.  Requires that no step is under way.
  std::int64_t MoveEnd(std::uint32_t request, std::int64_t end, bool keeps_kv);

  // A request of `prompt` tokens will come in the midst of its answer, at about that time: steps
  // without decodes end early enough for it (kSlo).  Replaces what was expected of it before.
  void Expect(std::uint32_t request, std::int64_t prompt, double at_ms) {
    expected_[request] = {prompt, at_ms};
  }
  // It has come, or is not coming any more.
  void ExpectNoMore(std::uint32_t request) { expected_.erase(request); }

  // Forms the next step and returns its predicted latency; 0: there is nothing to run, or nothing
  // can run before KV is released.
  // Requires that the step before it was ended.
  double BeginStep(double now_ms);

  // Replaces EngineOptions::margin, in (0, 1]; a step may take AdmissionMargin::kLeastShare in any
  // case.
  void SetMargin(double margin);
  double margin() const { return margin_; }

  // Of the SLO, what a step of decodes alone may take with one that is to begin.
  double AdmittingShare() const;

  // Those that were kept where they came from, and have begun here since the last call.
  std::vector<std::uint32_t> TakeBegun() { return std::exchange(begun_, {}); }

  // Frees KV that an ended sequence has kept.  Requires that it has kept as much.
  void ReleaseKv(std::int64_t tokens);

  // Ends the step that was begun, `step_ms` later, at `now_ms`.  What was part of it is appended.
  void EndStep(double now_ms, double step_ms, std::vector<StepResult>& results);

  bool stepping() const { return stepping_; }
  bool idle() const { return running_.empty() && waiting_.empty(); }
  const std::vector<SimulatedSequence>& running() const { return running_; }
  const std::deque<SimulatedSequence>& waiting() const { return waiting_; }
  const BatchShape& shape() const { return shape_; }  // of the step under way, or the last one
  const InstanceUse& use() const { return use_; }

 private:
  std::int64_t FreeKv() const { return options_.kv_tokens - kv_used_ - step_tokens_; }
  void GatherDecodes(double now_ms);
  bool CanResume(const SimulatedSequence& sequence) const;
  void Resume();
  const SimulatedSequence& Admit();
  BatchShape DecodesLater() const;
  void GatherPrefills();
  std::int64_t Budget();
  double LimitMs() const;
  void Spend(std::int64_t budget);
  void Preempt();

  const ProfileTable* table_;
  const EngineOptions options_;
  double margin_;
  double sigma_;
  AdmissionMargin admission_;

  std::deque<SimulatedSequence> waiting_;
  std::vector<SimulatedSequence> running_;  // in order of admission
  std::int64_t kv_used_ = 0;                // kept_kv_ included
  std::int64_t kept_kv_ = 0;
  struct Expected {
    std::int64_t prompt;
    double at_ms;
  };
  std::map<std::uint32_t, Expected> expected_;  // by request
  std::vector<std::uint32_t> begun_;
  bool stepping_ = false;
  bool preempted_ = false;  // while this step was formed
  InstanceUse use_;

  // Of the step under way; chunk_[i] is what running_[i] computes.
  std::vector<std::int64_t> chunk_;
  BatchShape shape_;
  std::int64_t step_tokens_ = 0;
  double due_ms_ = 0.0;
  double now_ms_ = 0.0;
  std::vector<PrefillWork> work_;
  std::vector<std::size_t> work_of_;  // indices into running_; those behind it are of waiting_
};

}  // namespace dynaserve
