#include "dynaserve/simulator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numbers>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "dynaserve/placement.h"
#include "dynaserve/scheduler.h"

namespace dynaserve {
namespace {

constexpr double kLeastGapMs = 0.1;
constexpr double kGapGrowth = 1.005;
constexpr std::size_t kGapBins = 4000;
constexpr std::int64_t kOutlivedTokens = 20;  // the paper's prediction margin (section 5)
// As in dynaserve/request_placer.py: how the front-end follows what it is told of shares.
constexpr double kShareGain = 0.1;
constexpr double kShareTold = 0.03;
// As in vllm_plugin/fleet_client.py: of the time until a hand-off, before it is predicted again.
constexpr double kExpectedAgain = 0.25;

struct Event {
  double at_ms;
  std::uint64_t order;  // among equal times
  std::uint32_t instance;
  bool is_hand_off;
  SimulatedSequence beta;
  std::uint32_t from;  // where alpha ran

  bool operator>(const Event& other) const {
    return at_ms != other.at_ms ? at_ms > other.at_ms : order > other.order;
  }
};

// Of the SLO, what an instance lets steps take: those that prefill, too, and those of decodes alone
// with one that is to begin.
struct Shares {
  double mixed;
  double admitting;

  void Toward(const Shares& other) {
    mixed += kShareGain * (other.mixed - mixed);
    admitting += kShareGain * (other.admitting - admitting);
  }
  bool Differ(const Shares& other) const {
    return std::abs(mixed / other.mixed - 1.0) > kShareTold ||
           std::abs(admitting / other.admitting - 1.0) > kShareTold;
  }
};

// What the scheduler knows of the engine.
InstanceLimits LimitsOf(const EngineOptions& engine, const Shares& shares) {
  InstanceLimits limits;
  limits.max_requests = engine.max_running;
  limits.max_step_tokens = engine.max_step_tokens;
  limits.min_prefill_tokens = engine.min_prefill_tokens;
  limits.kv_tokens = engine.kv_tokens;
  limits.step_ms = engine.slo_ms * shares.mixed;
  limits.admit_ms = engine.slo_ms * shares.admitting;
  return limits;
}

class Simulation {
 public:
  Simulation(std::span<const ProfileTable> tables, std::span<const SimulatedRequest> requests,
             const SimulationOptions& options)
      : tables_(tables),
        requests_(requests),
        options_(options),
        predicts_(!options.round_robin && Predicts(options.placement.policy)),
        scheduler_(options.placement, Predicts(options.placement.policy) ? tables.data() : nullptr),
        random_(options.seed),
        betas_(requests.size(), kNowhere),
        expect_again_ms_(requests.size(), 0.0),
        sent_tokens_(requests.size(), 0),
        arrived_ms_(requests.size(), 0.0),
        kept_(requests.size()),
        last_token_ms_(requests.size(), -1.0) {
    const auto count = static_cast<std::size_t>(options.instances);
    if (Drifts()) {
      learnt_.reserve(count);
      for (std::size_t i = 0; i < count; ++i) {
        learnt_.emplace_back(TableOf(i));
        drifts_.push_back({options.drift_sigma * Normal()});
      }
    }
    result_.outcomes.resize(requests.size());
    result_.gap_counts.resize(kGapBins, 0);
    for (std::int64_t i = 0; i < options.instances; ++i) {
      char id[16];
      std::snprintf(id, sizeof id, "%08u", static_cast<unsigned>(i));
      index_[id] = static_cast<std::uint32_t>(i);
      const auto at = static_cast<std::size_t>(i);
      instances_.emplace_back(Drifts() ? learnt_[at] : TableOf(at), options.engine);
      step_ms_.push_back(0.0);
      ids_.emplace_back(id);
      heard_.push_back(SharesOf(at));
      used_.push_back(heard_[at]);
      scheduler_.Observe({id, true, LimitsOf(options.engine, used_[at])});
    }
    out_free_ms_.resize(count, 0.0);
    in_free_ms_.resize(count, 0.0);
    moving_.resize(count);
    reported_ms_.resize(count, 0.0);
    pending_.resize(count);
    kept_by_.resize(count);
  }

  SimulationResult Run() {
    std::size_t next = 0;
    while (next < requests_.size() || !events_.empty()) {
      const bool arrives = next < requests_.size() &&
                           (events_.empty() || requests_[next].arrival_ms <= events_.top().at_ms);
      if (arrives) {
        Arrive(static_cast<std::uint32_t>(next++));
        continue;
      }
      const Event event = events_.top();
      events_.pop();
      now_ms_ = event.at_ms;
      if (event.is_hand_off) {
        if (Shows(event.beta.request, event.beta.computed)) {
          instances_[event.instance].ExpectNoMore(event.beta.request);
        }
        kept_[event.beta.request] = {event.from, event.beta.computed};
        kept_by_[event.from].push_back(event.beta.request);
        instances_[event.instance].Add(event.beta);
      } else {
        EndStep(event.instance);
      }
      Wake(event.instance);
    }
    result_.end_ms = now_ms_;
    for (const SimulatedInstance& instance : instances_) result_.uses.push_back(instance.use());
    return std::move(result_);
  }

 private:
  static constexpr std::uint32_t kNowhere = 0xffffffffU;

  void Arrive(std::uint32_t number) {
    const SimulatedRequest& request = requests_[number];
    now_ms_ = request.arrival_ms;
    const std::int64_t last = ComputedTokens(request.prompt_tokens, request.output_tokens);
    SimulatedSequence alpha{number, false, request.prompt_tokens, 0, request.prompt_tokens, last,
                            0.0,    false};
    std::uint32_t at = number % static_cast<std::uint32_t>(options_.instances);
    if (!options_.round_robin) {
      RequestSpec spec;
      spec.request_id = std::to_string(number);
      spec.prompt_tokens = request.prompt_tokens;
      spec.max_output_tokens = std::max(request.output_tokens, request.expected_output_tokens);
      spec.expected_output_tokens = request.expected_output_tokens;
      spec.slo = {options_.ttft_slo_ms, options_.tbt_slo_ms};
      const auto placement = scheduler_.Place(spec, now_ms_);
      if (!placement) throw std::logic_error("a fleet without instances");
      at = index_.at(placement->alpha.instance_id);
      // A cut past the end that only the prediction has is no cut.
      if (placement->beta && placement->split_token() < last) {
        alpha.end = placement->split_token();
        alpha.keeps_kv = true;
        betas_[number] = index_.at(placement->beta->instance_id);
        pending_[at].push_back(number);
        result_.outcomes[number].split_token = alpha.end;
        Expect(number, alpha.end);
      }
    }
    instances_[at].Add(alpha);
    Wake(at);
  }

  void Wake(std::uint32_t at) {
    SimulatedInstance& instance = instances_[at];
    if (instance.stepping()) return;
    const double predicted_ms = instance.BeginStep(now_ms_);
    for (const std::uint32_t number : instance.TakeBegun()) LetGo(number);
    if (!instance.stepping()) {
      // Two full of what they keep for each other would stand still; real ones lift such hand-offs.
      // What a beta waits for that goes on without, is kept until it begins.
      const auto stuck = std::ranges::find_if(kept_by_[at], [&](std::uint32_t number) {
        return !instances_[betas_[number]].stepping();
      });
      if (!instance.idle() && stuck != kept_by_[at].end()) LetGo(*stuck);
      return;
    }
    // Of an instance that learns the prediction is not what its steps take.
    const double usual_ms = Drifts() ? TableOf(at).StepMs(instance.shape()) : predicted_ms;
    const double noise = options_.step_sigma * Normal();
    step_ms_[at] = usual_ms * std::exp(noise + DriftOf(at)) + TakeMovingMs(at);
    events_.push({now_ms_ + step_ms_[at], order_++, at, false, {}, at});
  }

  // What KV on the move takes of the step that begins: an instance that was idle has moved it
  // beside nothing.
  double TakeMovingMs(std::uint32_t at) {
    const Moving moving = std::exchange(moving_[at], {});
    return std::min(moving.work_ms, std::max(0.0, moving.until_ms - now_ms_));
  }

  // Its KV is needed no more where its first half ran.
  void LetGo(std::uint32_t number) {
    const Kept kept = std::exchange(kept_[number], {});
    if (kept.tokens == 0) return;
    std::erase(kept_by_[kept.by], number);
    instances_[kept.by].ReleaseKv(kept.tokens);
    Wake(kept.by);
  }

  void EndStep(std::uint32_t at) {
    results_.clear();
    if (predicts_ && TellsSteps()) {
      scheduler_.ObserveStep(ids_[at], instances_[at].shape(), step_ms_[at], now_ms_);
    }
    if (Drifts()) {
      learnt_[at].Observe(instances_[at].shape(), step_ms_[at]);
      const double share =
          std::pow(options_.engine.margin, learnt_[at].sigma() / options_.step_sigma);
      instances_[at].SetMargin(share);
    }
    instances_[at].EndStep(now_ms_, step_ms_[at], results_);
    if (predicts_ && TellsSteps()) TellShares(at);
    for (const StepResult& result : results_) {
      const std::uint32_t number = result.sequence.request;
      if (result.sampled) Token(number);
      if (IsAlphaOfTwo(result.sequence)) Send(at, result);
      if (!result.ended) continue;
      if (IsAlphaOfTwo(result.sequence)) {
        HandOff(at, result.sequence);
      } else {
        result_.outcomes[number].end_ms = now_ms_;
        if (!options_.round_robin) {
          const SimulatedRequest& request = requests_[number];
          scheduler_.Finish(std::to_string(number), now_ms_);
          scheduler_.LearnLength(request.output_tokens, request.expected_output_tokens);
        }
      }
    }
    if (predicts_) Report(at);
  }

  // With vLLM's own batches an instance tells tokens only.
  bool TellsSteps() const { return options_.engine.batching == Batching::kSlo; }

  const ProfileTable& TableOf(std::size_t at) const {
    return tables_[tables_.size() == 1 ? 0 : at];
  }

  bool Drifts() const { return options_.drift_sigma > 0.0; }

  Shares SharesOf(std::size_t at) const {
    return {instances_[at].margin(), instances_[at].AdmittingShare()};
  }

  // The scheduler is told what has lasted.
  void TellShares(std::uint32_t at) {
    heard_[at].Toward(SharesOf(at));
    if (!heard_[at].Differ(used_[at])) return;
    used_[at] = heard_[at];
    scheduler_.Observe({ids_[at], true, LimitsOf(options_.engine, used_[at])});
  }

  // Of the logarithm of its steps' latencies, now.
  double DriftOf(std::uint32_t at) {
    if (!Drifts()) return 0.0;
    Drift& drift = drifts_[at];
    const double kept = std::exp(-(now_ms_ - drift.at_ms) / options_.drift_ms);
    drift.value =
        kept * drift.value + options_.drift_sigma * std::sqrt(1.0 - kept * kept) * Normal();
    drift.at_ms = now_ms_;
    return drift.value;
  }

  bool IsAlphaOfTwo(const SimulatedSequence& sequence) const {
    return !sequence.is_beta && betas_[sequence.request] != kNowhere;
  }

  // Whether a hand-off there shows between two tokens of the answer.
  bool Shows(std::uint32_t number, std::int64_t split_token) const {
    return split_token >= requests_[number].prompt_tokens;
  }

  // What has been sent stays sent, also when alpha computes its KV again.
  void Send(std::uint32_t from, const StepResult& result) {
    const std::uint32_t number = result.sequence.request;
    std::int64_t until = result.sequence.computed;
    if (!result.ended) {
      until = options_.streams_kv ? until / options_.kv_block_tokens * options_.kv_block_tokens : 0;
    }
    if (until <= sent_tokens_[number]) return;
    double& out_free_ms = out_free_ms_[from];
    double& in_free_ms = in_free_ms_[betas_[number]];
    const double start_ms = std::max({now_ms_, out_free_ms, in_free_ms});
    const auto tokens = static_cast<double>(until - sent_tokens_[number]);
    out_free_ms = in_free_ms = arrived_ms_[number] = start_ms + options_.kv_token_ms * tokens;
    sent_tokens_[number] = until;
    const double work_ms = options_.kv_token_work_ms * tokens;
    const double until_ms = std::max(arrived_ms_[number], start_ms + work_ms);
    for (const std::uint32_t at : {from, betas_[number]}) {
      Moving& moving = moving_[at];
      moving.work_ms += work_ms;
      // Of a step under way the end is known already: the next one is longer instead.
      moving.until_ms = instances_[at].stepping() ? std::numeric_limits<double>::infinity()
                                                  : std::max(moving.until_ms, until_ms);
    }
  }

  void HandOff(std::uint32_t from, SimulatedSequence sequence) {
    const std::uint32_t number = sequence.request;
    const SimulatedRequest& request = requests_[number];
    std::erase(pending_[from], number);
    scheduler_.Parked(std::to_string(number), sequence.computed, now_ms_);
    sequence.is_beta = true;
    sequence.keeps_kv = false;
    sequence.is_kept = true;
    sequence.end = ComputedTokens(request.prompt_tokens, request.output_tokens);
    const double there_ms = std::max(now_ms_, arrived_ms_[number]);
    result_.outcomes[number].hand_off_wait_ms = there_ms - now_ms_;
    events_.push({there_ms + options_.hand_off_ms, order_++, betas_[number], true, sequence, from});
  }

  // As an instance tells its front-end.  An answer that has outlived its expected length is
  // expected to go on a little.
  void Report(std::uint32_t at) {
    if (now_ms_ - reported_ms_[at] < options_.report_every_ms) return;
    reported_ms_[at] = now_ms_;
    progress_.clear();
    for (const SimulatedSequence& sequence : instances_[at].running()) {
      if (TellsSteps() || sequence.known > sequence.prompt) AddProgress(sequence, true);
    }
    if (TellsSteps()) {
      for (const SimulatedSequence& sequence : instances_[at].waiting()) {
        AddProgress(sequence, false);
      }
    }
    scheduler_.Report(ids_[at], progress_, now_ms_);
    if (options_.revises) {
      Revise(at);
      CutLate(at);
    }
    for (const std::uint32_t number : pending_[at]) {
      Expect(number, result_.outcomes[number].split_token);
    }
  }

  // As the front-end tells a beta's instance.
  void Expect(std::uint32_t number, std::int64_t split_token) {
    if (now_ms_ < expect_again_ms_[number] || !Shows(number, split_token)) return;
    const auto at_ms = scheduler_.PredictHandOffMs(std::to_string(number), now_ms_);
    if (!at_ms) return;
    expect_again_ms_[number] = now_ms_ + kExpectedAgain * (*at_ms - now_ms_);
    instances_[betas_[number]].Expect(number, requests_[number].prompt_tokens, *at_ms);
  }

  void AddProgress(const SimulatedSequence& sequence, bool begun) {
    const std::int64_t emitted = sequence.known - sequence.prompt;
    const std::int64_t expected = requests_[sequence.request].expected_output_tokens;
    progress_.push_back({std::to_string(sequence.request), sequence.computed,
                         expected > emitted ? expected : emitted + kOutlivedTokens, begun});
  }

  // No step of this instance is under way.
  void Revise(std::uint32_t at) {
    std::erase_if(pending_[at], [this, at](std::uint32_t number) {
      const auto revision = scheduler_.Revise(std::to_string(number), now_ms_);
      if (!revision) return false;
      const SimulatedRequest& request = requests_[number];
      const std::int64_t last = ComputedTokens(request.prompt_tokens, request.output_tokens);
      const std::int64_t end = revision->split_token.value_or(last);
      const bool stays = end >= last;
      const std::int64_t moved = instances_[at].MoveEnd(number, std::min(end, last), !stays);
      if (moved == 0) throw std::logic_error("a pending hand-off without its alpha");
      SimulatedInstance& beta = instances_[betas_[number]];
      if (Shows(number, result_.outcomes[number].split_token)) {
        beta.ExpectNoMore(number);
      }
      result_.outcomes[number].split_token = stays ? 0 : moved;
      ++(stays ? result_.lifted : result_.moved);
      if (stays) betas_[number] = kNowhere;
      return stays;
    });
  }

  // Of requests that decode whole there.
  void CutLate(std::uint32_t at) {
    whole_.clear();
    for (const SimulatedSequence& sequence : instances_[at].running()) {
      const bool is_whole = !sequence.is_beta && betas_[sequence.request] == kNowhere;
      if (is_whole && sequence.decodes()) whole_.push_back(sequence.request);
    }
    for (const std::uint32_t number : whole_) {
      const auto revision = scheduler_.Revise(std::to_string(number), now_ms_);
      if (!revision) continue;
      const SimulatedRequest& request = requests_[number];
      const std::int64_t last = ComputedTokens(request.prompt_tokens, request.output_tokens);
      // It ends before.
      if (*revision->split_token >= last) continue;
      betas_[number] = index_.at(*revision->beta);
      const std::int64_t end = instances_[at].MoveEnd(number, *revision->split_token, true);
      pending_[at].push_back(number);
      result_.outcomes[number].split_token = end;
      ++result_.cut_late;
    }
  }

  void Token(std::uint32_t number) {
    SimulatedOutcome& outcome = result_.outcomes[number];
    double& last_ms = last_token_ms_[number];
    if (last_ms < 0.0) {
      outcome.first_token_ms = now_ms_;
    } else {
      const double gap_ms = now_ms_ - last_ms;
      outcome.longest_gap_ms = std::max(outcome.longest_gap_ms, gap_ms);
      if (gap_ms > options_.tbt_slo_ms) ++outcome.late_gaps;
      const double bin = std::log(std::max(gap_ms, kLeastGapMs) / kLeastGapMs) / log_growth_;
      ++result_.gap_counts[std::min(kGapBins - 1, static_cast<std::size_t>(bin))];
    }
    last_ms = now_ms_;
  }

  // std::normal_distribution differs between libraries.
  double Normal() {
    if (options_.step_sigma == 0.0) return 0.0;
    const auto uniform = [this] { return (static_cast<double>(random_() >> 11U) + 0.5) * 0x1p-53; };
    const double radius = std::sqrt(-2.0 * std::log(uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

  struct Moving {
    double work_ms = 0.0;
    double until_ms = 0.0;
  };
  struct Kept {
    std::uint32_t by = 0;
    std::int64_t tokens = 0;  // of KV; 0: it is not
  };
  struct Drift {
    double value = 0.0;
    double at_ms = 0.0;
  };

  const std::span<const ProfileTable> tables_;
  const std::span<const SimulatedRequest> requests_;
  const SimulationOptions options_;
  const bool predicts_;
  const double log_growth_ = std::log(kGapGrowth);
  Scheduler scheduler_;
  std::mt19937_64 random_;
  std::unordered_map<InstanceId, std::uint32_t> index_;
  std::vector<ProfileTable> learnt_;  // by instance, which refers to it
  std::vector<Drift> drifts_;         // by instance
  std::vector<SimulatedInstance> instances_;
  std::vector<double> step_ms_;
  std::vector<std::uint32_t> betas_;
  std::vector<double> expect_again_ms_;              // when a hand-off is to be predicted again
  std::vector<std::vector<std::uint32_t>> pending_;  // hand-offs to come, by alpha's instance
  std::vector<std::int64_t> sent_tokens_;            // of KV, by request
  std::vector<double> arrived_ms_;                   // the last of it, by request
  std::vector<Kept> kept_;                           // by request, until its second half begins
  std::vector<std::vector<std::uint32_t>> kept_by_;  // by instance
  std::vector<double> last_token_ms_;
  std::vector<InstanceId> ids_;
  std::vector<double> out_free_ms_;
  std::vector<double> in_free_ms_;
  std::vector<Moving> moving_;  // by instance
  std::vector<double> reported_ms_;
  std::vector<Shares> heard_;  // by instance: smoothed,
  std::vector<Shares> used_;   // and what the scheduler goes by
  std::vector<Progress> progress_;
  std::vector<std::uint32_t> whole_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t order_ = 0;
  double now_ms_ = 0.0;
  std::vector<StepResult> results_;
  SimulationResult result_;
};

void Check(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

// Latency is monotonic: where the least steps take time, all do.
void CheckTakesTime(const ProfileTable& table) {
  const auto check = [&table](const BatchShape& shape, const std::string& what) {
    Check(table.StepMs(shape) > 0.0, "by this table " + what + " takes no time; every step does");
  };
  check({1, 1.0, 0, 0}, "one token of prefill");
  check({0, 0.0, 1, 1}, "one decode");
}

}  // namespace

double GapBinMs(std::size_t bin) {
  return bin == 0 ? 0.0 : kLeastGapMs * std::pow(kGapGrowth, static_cast<double>(bin));
}

SimulationResult Simulate(std::span<const ProfileTable> tables,
                          std::span<const SimulatedRequest> requests,
                          const SimulationOptions& options) {
  Check(options.instances >= 1 && options.instances <= 100000,
        "instances is " + std::to_string(options.instances) + "; it must be in [1, 100000]");
  Check(options.hand_off_ms >= 0.0 && std::isfinite(options.hand_off_ms),
        "hand_off_ms is " + std::to_string(options.hand_off_ms) + "; it must not be negative");
  Check(options.kv_token_ms >= 0.0 && std::isfinite(options.kv_token_ms),
        "kv_token_ms is " + std::to_string(options.kv_token_ms) + "; it must not be negative");
  Check(options.kv_token_work_ms >= 0.0 && std::isfinite(options.kv_token_work_ms),
        "kv_token_work_ms is " + std::to_string(options.kv_token_work_ms) +
            "; it must not be negative");
  Check(
      options.kv_block_tokens >= 1,
      "kv_block_tokens is " + std::to_string(options.kv_block_tokens) + "; it must be at least 1");
  Check(options.report_every_ms > 0.0,
        "report_every_ms is " + std::to_string(options.report_every_ms) + "; it must be above 0");
  Check(options.ttft_slo_ms > 0.0,
        "ttft_slo_ms is " + std::to_string(options.ttft_slo_ms) + "; it must be above 0");
  Check(options.tbt_slo_ms > 0.0,
        "tbt_slo_ms is " + std::to_string(options.tbt_slo_ms) + "; it must be above 0");
  Check(options.step_sigma >= 0.0 && std::isfinite(options.step_sigma),
        "step_sigma is " + std::to_string(options.step_sigma) + "; it must not be negative");
  Check(options.drift_sigma >= 0.0 && std::isfinite(options.drift_sigma),
        "drift_sigma is " + std::to_string(options.drift_sigma) + "; it must not be negative");
  Check(options.drift_ms > 0.0,
        "drift_ms is " + std::to_string(options.drift_ms) + "; it must be above 0");
  Check(options.drift_sigma == 0.0 || options.step_sigma > 0.0,
        "drift_sigma is " + std::to_string(options.drift_sigma) +
            " and step_sigma is 0; margins grow by their ratio");
  Check(tables.size() == 1 || tables.size() == static_cast<std::size_t>(options.instances),
        std::to_string(tables.size()) + " tables for " + std::to_string(options.instances) +
            " instances; there must be one, or one of each");
  for (const ProfileTable& table : tables) CheckTakesTime(table);
  double before_ms = 0.0;
  for (const SimulatedRequest& request : requests) {
    Check(request.prompt_tokens >= 1 && request.output_tokens >= 1 &&
              request.expected_output_tokens >= 1,
          "a request of " + std::to_string(request.prompt_tokens) + " prompt, " +
              std::to_string(request.output_tokens) + " output and " +
              std::to_string(request.expected_output_tokens) +
              " expected output tokens; each must be at least 1");
    Check(request.arrival_ms >= before_ms && std::isfinite(request.arrival_ms),
          "a request arrives at " + std::to_string(request.arrival_ms) + " ms, after one at " +
              std::to_string(before_ms) + " ms; requests must be in order of arrival");
    before_ms = request.arrival_ms;
  }
  return Simulation(tables, requests, options).Run();
}

}  // namespace dynaserve
