// ExecutionPredictor knows the virtual batches that one instance is going to run (the paper's
// section 4.1), and what becomes of a micro-request that joins them.
//
// One virtual step, at time t:
//   1. Waiting requests are looked at in admission order: as in the engine
//      (vllm_plugin/resuming.py) betas first, and of these the ones that resume.  One that is not
//      ready by t is passed over.  One that finds prefill enough before it to fill a step (a beta
//      that resumes needs none), no seat, no KV memory, or no room for its decode (batch_rule.h,
//      LeavesRoomForDecode, within MostToAdmitMs()) stays, and so does everything behind it; where
//      nothing runs, it is admitted all the same.
//   2. Every running decode advances by one token.  Prefills, running ones first, share the budget
//      that ChooseBudget() gives; without decodes a step has no latency limit.  A waiting request
//      that gets a token runs from now on.
//   3. Time advances by the table's latency of that step, times the instance's cost scale.
// A request that has computed its prefill decodes from the next step on; a beta whose prefill is a
// single token decodes from the first one on.
//
// Steps without prefill are not walked one by one: while nothing ends and nothing becomes ready,
// their latencies are sums of arithmetic series, exact but for rounding.  The timeline is kept up
// to the first step that a newcomer could change, its tail, so that a prediction simulates only
// what the newcomer adds.  News of what comes before the tail has it played again; behind a deep
// queue, where that takes milliseconds, only once it is older than a fiftieth of what it looks
// ahead, or a fiftieth of the work before it has changed.
//
// Not thread-safe.  No clock: callers pass the time, which never goes back.  After warm-up, Add()
// and Predict() allocate nothing.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "dynaserve/batch_rule.h"
#include "dynaserve/profile_table.h"

namespace dynaserve {

// One micro-request as an instance sees it.  It computes `prefill_tokens` in chunks, then
// `decode_tokens` one a step.  An alpha that ends inside the prompt has no decodes; a beta that
// begins in the answer has no prefill.
struct VirtualRequest {
  std::uint64_t key = 0;            // the caller's name for it; unique on an instance, below 2^63
  std::int64_t context_tokens = 0;  // there before: computed, cached or received
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_tokens = 0;
  double ready_ms = 0.0;  // not admitted before: its arrival, or that of its KV
  bool is_beta = false;   // begun elsewhere

  // It needs no prefill here but for the token that it samples from.
  bool resumes() const { return prefill_tokens == 0 || (is_beta && prefill_tokens == 1); }
  std::int64_t end_token() const { return context_tokens + prefill_tokens + decode_tokens; }
  bool operator==(const VirtualRequest&) const = default;
};

// What an instance may run at once.
struct InstanceLimits {
  std::int64_t max_requests = 256;
  std::int64_t max_step_tokens = 8192;
  std::int64_t min_prefill_tokens = 16;
  std::int64_t kv_tokens = std::int64_t{1} << 40;            // size of its KV cache
  double step_ms = std::numeric_limits<double>::infinity();  // of a step with decodes: the TBT SLO
  double admit_ms = 0.0;  // of a step of decodes alone, with one that is to begin; 0: step_ms

  double MostToAdmitMs() const { return admit_ms > 0.0 ? admit_ms : step_ms; }
  bool operator==(const InstanceLimits&) const = default;
};

// Throws std::invalid_argument, naming the field, unless max_requests, max_step_tokens and
// kv_tokens are at least 1, min_prefill_tokens is not negative, none of them is above 2^40,
// step_ms is above 0, and admit_ms is not negative.
void Validate(const InstanceLimits& limits);

// Times are absolute milliseconds; infinity: did not happen within the prediction.
struct Forecast {
  double start_ms = std::numeric_limits<double>::infinity();  // of its first step
  // Its first token, if it decodes; start_ms, if it has no prefill.
  double prefill_end_ms = std::numeric_limits<double>::infinity();
  double end_ms = std::numeric_limits<double>::infinity();
  std::int64_t last_prefill_tokens = 0;  // of its prefill, what the last of those computed
  // Of the first step that computes some of its prefill; infinite: none does.
  double first_prefill_end_ms = std::numeric_limits<double>::infinity();

  bool operator==(const Forecast&) const = default;
};

enum class Horizon { kPrefillEnd, kEnd };

// A step that computed some of a request's prefill.
struct PrefillStep {
  double end_ms = 0.0;
  std::int64_t computed_tokens = 0;  // of the request by then, with its context
};

class ExecutionPredictor {
 public:
  // table must outlive the predictor; it may learn meanwhile, but not be restored.  Throws
  // std::invalid_argument as Validate() does.
  ExecutionPredictor(const ProfileTable& table, const InstanceLimits& limits);

  // What would become of `newcomer` (whose key does not matter) if it were added now, as far as
  // `horizon`.
  // Throws std::invalid_argument for a request without tokens, or with a negative count.
  Forecast Predict(const VirtualRequest& newcomer, double now_ms, Horizon horizon);

  // The same as far as its prefill goes; `steps` gets those that compute some of it.
  Forecast PredictPrefill(const VirtualRequest& newcomer, double now_ms,
                          std::vector<PrefillStep>& steps);

  // When everything would have ended; nullptr: without a newcomer.  Throws as Predict().
  double PredictDrainMs(const VirtualRequest* newcomer, double now_ms);

  // What runs, in order of admission but for decodes, and what waits, by the prediction for now.
  void Snapshot(double now_ms, std::vector<VirtualRequest>& running,
                std::vector<VirtualRequest>& waiting);

  // Adds a request to the waiting ones.  Throws as Predict().
  void Add(const VirtualRequest& request, double now_ms);

  // Takes a request out, wherever it is; false: it is not there (any more).
  bool Remove(std::uint64_t key, double now_ms);

  // Requests whose prompts wait, or are under way, behind that one's; 0: it has none there.
  std::int64_t Behind(std::uint64_t key, double now_ms);

  // A request as it stands now by the prediction; nullopt: it is not there (any more).
  std::optional<VirtualRequest> Find(std::uint64_t key, double now_ms);

  // What would become of it from now on if nothing else came; nullopt: it is not there (any more).
  std::optional<Forecast> PredictRest(std::uint64_t key, double now_ms);

  // Gives the request of that key other work, in its place: what it has computed, and what is left
  // (at least one token).  A beta that was predicted to have begun, and is ready later, waits
  // again. False: it is not there, or decodes already and is to compute prefill.  Throws as
  // Predict().
  bool Change(const VirtualRequest& changed, double now_ms);

  // What would become of it then; nullopt where Change() would return false.
  std::optional<Forecast> PredictChange(const VirtualRequest& changed, double now_ms,
                                        Horizon horizon);

  // Replaces what was predicted by what is: the requests that run, in order of admission, and those
  // that wait.  Both lists are copied.  between_steps: the next step begins now; otherwise it
  // begins when the one that is predicted to be under way is over.  Throws as Predict(), and
  // changes nothing.
  void Replace(std::span<const VirtualRequest> running, std::span<const VirtualRequest> waiting,
               double now_ms, bool between_steps = false);

  // Every later latency is the table's times this.  Throws std::invalid_argument unless it is
  // positive and finite.
  void SetCostScale(double cost_scale, double now_ms);
  double cost_scale() const { return cost_scale_; }

  // When the step that is predicted to be under way ends, by the time that was last told.
  double next_step_ms() const { return base_.now_ms; }

  // When the first prefill token of a request that came now could be computed, at the earliest.
  double PrefillFreeMs(double now_ms);

  // When one that holds so many tokens of KV would be admitted: not before a decode ends where it
  // finds no seat, no memory, or its own decode no room in a step.  Nobody but the next one to end
  // is looked at.
  double AdmittedMs(double now_ms, std::int64_t context_tokens, bool is_beta = false);

  // How much longer those who wait for a seat do so for each that somebody takes before them: until
  // one more of the answers, of so many tokens each, ends.  admitted_ms: of AdmittedMs(), a beta's.
  // 0: there is a free one.
  double SeatMs(double admitted_ms, std::int64_t answer_tokens) const;

  // What a beta that came now would find.
  struct Overtaken {
    double step_ms = 0.0;             // when the next step begins
    std::int64_t prefill_tokens = 0;  // that come before its own
    std::int64_t requests = 0;        // that wait, and that it overtakes
  };
  Overtaken BeforeBeta(double now_ms);

  // When the prefills before a newcomer are done: decodes that run, their context, and the KV of
  // all that runs.
  struct Load {
    std::int64_t decodes = 0;
    std::int64_t decode_context_tokens = 0;
    std::int64_t kv_tokens = 0;
    std::int64_t prefill_tokens = 0;  // that come before those of a newcomer
  };
  // The decode of the request `without` is left out.
  Load LoadThen(double now_ms, std::optional<std::uint64_t> without = std::nullopt);

  // Requests that decode there now.
  std::int64_t Decodes(double now_ms);

  // Requests that decode there now, or are going to, as far as there are seats; `without` is left
  // out.
  std::int64_t Answers(double now_ms, std::optional<std::uint64_t> without = std::nullopt);

  // What a step beside these decodes, scaled as the instance's are, takes of this work alone: of a
  // step's limits and the table's latencies, unscaled.
  PrefillBudget BudgetBeside(const Load& load, const PrefillWork& work);

  // Prefill tokens that are admitted or wait, by the prediction for now, but for betas whose KV is
  // not there; of these, those that come before the ones of the request `before`, if it is there.
  // Counts no further than to `enough`.
  std::int64_t PrefillTokens(double now_ms, std::optional<std::uint64_t> before = std::nullopt,
                             std::int64_t enough = std::numeric_limits<std::int64_t>::max());

  // Plays everything to its end, from `now_ms`; calls visit(key, forecast) as each request ends.
  template <typename Visit>
  void PlayOut(double now_ms, Visit visit) {
    Advance(base_, now_ms);
    scratch_ = base_;
    ended_.clear();
    Run(scratch_, kNobody, Horizon::kEnd, &ended_);
    for (const Ended& ended : ended_) visit(ended.key, ended.forecast);
  }

  const InstanceLimits& limits() const { return limits_; }
  const ProfileTable& table() const { return *table_; }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr std::uint64_t kNobody = std::numeric_limits<std::uint64_t>::max();
  static constexpr std::uint64_t kNewcomer = kNobody - 1;
  // So many waiting are a deep queue, of whose tail the age and what has changed before it may be
  // this share of how far it lies ahead, and of the work there.
  static constexpr std::size_t kDeepQueue = 128;
  static constexpr double kSlack = 0.02;

  struct Decode {
    std::int64_t end_step;     // the step after its last
    std::int64_t end_context;  // tokens it has computed by then
    std::uint64_t key;
    double start_ms;
    double prefill_end_ms;
  };
  struct Prefill {
    VirtualRequest request;  // context and prefill are what they are now
    double start_ms;
  };
  // The instance at the start of a step.
  struct State {
    double now_ms = 0.0;
    std::int64_t step = 0;
    std::int64_t decode_context = 0;
    std::vector<Decode> decodes;    // a heap, the next to end on top
    bool has_first_tokens = false;  // some of them are betas that sample their first one now
    std::vector<Prefill> prefills;
    std::vector<VirtualRequest> waiting;
  };
  struct Ended {
    std::uint64_t key;
    Forecast forecast;
  };
  // The budget of a step with one prefill, by what decides it.  Candidates of one search differ in
  // what is left of that prefill, which plays no part where more is left than fits.
  struct KnownBudget {
    std::int64_t decodes = -1;
    std::int64_t decode_context = 0;
    std::int64_t context = 0;
    std::int64_t observed = 0;
    double limit_ms = 0.0;
    PrefillBudget budget;
  };
  static constexpr std::size_t kKnownBudgets = 64;
  // What stands in the way of the waiting, found while the work of a step is gathered.
  struct Gathered {
    double next_ready_ms = std::numeric_limits<double>::infinity();
    bool reached_end = true;  // a newcomer at the end of the queue would have been looked at
  };

  static bool EndsLater(const Decode& a, const Decode& b) { return a.end_step > b.end_step; }

  void Check(const VirtualRequest& request) const;
  void Enqueue(State& state, const VirtualRequest& request) const;
  // Makes scratch_ the first state that the newcomer changes, with it.
  void Join(const VirtualRequest& newcomer, double now_ms);
  void TellFirstTokens(State& state);
  static void BeginDecode(State& state, const VirtualRequest& request, double start_ms,
                          double prefill_end_ms);
  std::optional<Forecast> ChangeIn(State& state, const VirtualRequest& changed) const;
  static bool Erase(State& state, std::uint64_t key);
  static bool Waits(const State& state, std::uint64_t key);
  static void EraseDecode(State& state, std::vector<Decode>::iterator decode);
  void End(std::uint64_t key, const Forecast& forecast, std::vector<Ended>* ended);
  Gathered Gather(State& state);
  // One step, or a stretch of them that ends no later than the first step at or after `until_ms`.
  // False: nothing is left to do before `until_ms`.
  bool Step(State& state, double until_ms, std::vector<Ended>* ended);
  PrefillBudget BudgetOf(const BatchShape& decodes, std::span<const PrefillWork> work);
  void StepWithPrefill(State& state, std::vector<Ended>* ended);
  void Stretch(State& state, double until_ms);
  void EndDecodes(State& state, std::vector<Ended>* ended);
  void Advance(State& state, double now_ms);
  // Until the watched request has reached the horizon, or nothing is left to do.
  // `so_far`: what has become of it already.
  Forecast Run(State& state, std::uint64_t watched, Horizon horizon, std::vector<Ended>* ended,
               const Forecast& so_far = {});
  State& Tail(double now_ms);
  // Tokens that are left to compute.
  static std::int64_t Work(const State& state);
  // base_, which had so much work, is no longer what was foretold when the tail was played from it.
  void ChangedFrom(std::int64_t work_before);
  void Changed(double work);
  std::int64_t HeldKv(const State& state) const;

  // Constant after construction.
  const ProfileTable* table_;
  const InstanceLimits limits_;

  double cost_scale_ = 1.0;
  State base_;                 // what is, or was predicted from what was last known
  State tail_;                 // the first step that a newcomer could change
  bool tail_stale_ = false;    // to be played from base_ again
  bool tail_lags_ = false;     // base_ has changed a little since the tail was played from it
  double played_ms_ = 0.0;     // when that was
  double played_work_ = 0.0;   // of base_ then
  double changed_work_ = 0.0;  // since then

  std::array<KnownBudget, kKnownBudgets> known_budgets_;

  // Kept for their memory.
  State scratch_;
  std::vector<PrefillWork> work_;
  std::vector<std::size_t> candidates_;  // of state.waiting, behind the running prefills in work_
  std::vector<Ended> ended_;
  // Of the run under way.
  std::uint64_t watched_ = kNobody;
  Forecast watched_forecast_;
  std::vector<PrefillStep>* watched_steps_ = nullptr;
};

}  // namespace dynaserve
