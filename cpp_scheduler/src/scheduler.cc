#include "dynaserve/scheduler.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "dynaserve/placement.h"

namespace dynaserve {
namespace {

// Far above any context; keeps sums of tokens inside int64.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;

template <typename... Parts>
[[noreturn]] void Refuse(const Parts&... parts) {
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw std::invalid_argument(sentence.str());
}

const Options& Validated(const Options& options) {
  if (!(options.ratio >= 0.0 && options.ratio <= 1.0)) {  // also refuses NaN
    Refuse("ratio is ", options.ratio, ", outside [0, 1]");
  }
  const auto check = [](const char* name, double value) {
    if (!(value >= 0.0) || !std::isfinite(value)) {
      Refuse(name, " is ", value, "; it must be finite and not negative");
    }
  };
  check("prefill_instances", static_cast<double>(options.prefill_instances));
  check("hand_off_ms", options.hand_off_ms);
  check("kv_token_ms", options.kv_token_ms);
  check("kv_token_work_ms", options.kv_token_work_ms);
  check("tolerance_ms", options.tolerance_ms);
  check("gathering", static_cast<double>(options.gathering.value_or(0)));
  if (options.stride_tokens < 1) {
    Refuse("stride_tokens is ", options.stride_tokens, "; it must be at least 1");
  }
  return options;
}

void ValidateTokens(const char* name, std::int64_t tokens) {
  if (tokens < 0 || tokens > kMaxTokens) {
    Refuse(name, " is ", tokens, ", outside [0, ", kMaxTokens, "]");
  }
}

void Validate(const RequestSpec& request) {
  ValidateTokens("prompt_tokens", request.prompt_tokens);
  ValidateTokens("max_output_tokens", request.max_output_tokens);
  ValidateTokens("expected_output_tokens", request.expected_output_tokens);
  ValidateTokens("likely_output_tokens", request.likely_output_tokens);
  for (const CachedPrefix& prefix : request.cached) ValidateTokens("cached tokens", prefix.tokens);
  if (!(request.slo.ttft_ms > 0.0)) Refuse("ttft_ms is ", request.slo.ttft_ms, ", not above 0");
  if (!(request.slo.tbt_ms > 0.0)) Refuse("tbt_ms is ", request.slo.tbt_ms, ", not above 0");
  const std::int64_t end_token = request.prompt_tokens + request.max_output_tokens;
  if (request.forced_split && (*request.forced_split < 0 || *request.forced_split > end_token)) {
    Refuse("forced_split is ", *request.forced_split, ", outside [0, ", end_token,
           "] (prompt_tokens + max_output_tokens)");
  }
}

}  // namespace

Scheduler::Scheduler(const Options& options, const ProfileTable* table)
    : options_(Validated(options)) {
  if (table != nullptr) Learn(*table, 0.0);
}

void Scheduler::Observe(const InstanceState& instance) {
  Validate(instance.limits);
  if (live_) {
    live_->Observe(instance);
  } else if (Predicts(options_.policy)) {
    unpredicted_.insert_or_assign(instance.instance_id, instance);
  }
  fleet_.Observe(instance);
}

void Scheduler::Learn(const ProfileTable& table, double now_ms) {
  if (!Predicts(options_.policy)) return;
  if (live_) {
    live_->Learn(table, now_ms);
    return;
  }
  live_.emplace(options_, table);
  for (const auto& [id, instance] : unpredicted_) live_->Observe(instance);
  unpredicted_.clear();
}

void Scheduler::Remove(const InstanceId& instance_id) {
  if (live_) live_->Remove(instance_id);
  unpredicted_.erase(instance_id);
  fleet_.Remove(instance_id);
}

std::optional<Placement> Scheduler::Place(const RequestSpec& request, double now_ms) {
  Validate(request);
  if (fleet_.IsReserved(request.request_id)) {
    Refuse("request_id \"", request.request_id, "\" is already placed");
  }
  std::vector<InstanceLoad> instances = fleet_.Accepting();
  std::optional<Placement> placement = ChooseWholeOnly(request, instances);
  if (!placement) {
    std::erase_if(instances, [](const InstanceLoad& load) { return load.whole_only; });
    if (instances.empty()) return std::nullopt;
    if (live_) live_->CountArrival(request, now_ms);
    const bool predicts = live_ && !(request.forced_split && request.may_cut);
    placement = predicts ? live_->Choose(request, instances, now_ms)
                         : ChoosePlacement(options_, request, instances);
  }
  if (!placement) return placement;
  fleet_.Reserve(request.request_id, *placement);
  if (live_) live_->Enter(request, *placement, now_ms);
  return placement;
}

void Scheduler::LearnLength(std::int64_t output_tokens, std::int64_t expected_tokens) {
  const auto check = [](const char* name, std::int64_t tokens) {
    ValidateTokens(name, tokens);
    if (tokens < 1) Refuse(name, " is ", tokens, "; it must be at least 1");
  };
  check("output_tokens", output_tokens);
  check("expected_tokens", expected_tokens);
  if (live_) live_->LearnLength(output_tokens, expected_tokens);
}

void Scheduler::Finish(const std::string& request_id, double now_ms) {
  if (live_) live_->Finish(request_id, now_ms);
  fleet_.Release(request_id);
}

std::optional<double> Scheduler::PredictEndMs(const std::string& request_id, double now_ms) {
  return live_ ? live_->PredictEndMs(request_id, now_ms) : std::nullopt;
}

std::optional<double> Scheduler::PredictHandOffMs(const std::string& request_id, double now_ms) {
  return live_ ? live_->PredictHandOffMs(request_id, now_ms) : std::nullopt;
}

void Scheduler::Report(const InstanceId& instance_id, std::span<const Progress> progress,
                       double now_ms) {
  for (const Progress& report : progress) {
    ValidateTokens("computed_tokens", report.computed_tokens);
    ValidateTokens("expected_output_tokens", report.expected_output_tokens);
  }
  if (live_) live_->Report(instance_id, progress, now_ms);
}

void Scheduler::ReportOthers(const InstanceId& instance_id, std::span<const OtherRequest> others,
                             double now_ms) {
  std::int64_t tokens = 0;
  for (const OtherRequest& other : others) {
    ValidateTokens("computed_tokens", other.computed_tokens);
    ValidateTokens("prompt_tokens", other.prompt_tokens);
    ValidateTokens("end_token", other.end_token);
    tokens += std::max<std::int64_t>(0, other.end_token - other.computed_tokens);
  }
  fleet_.SetOthers(instance_id, tokens);
  if (live_) live_->ReportOthers(instance_id, others, now_ms);
}

std::optional<Revision> Scheduler::Revise(const std::string& request_id, double now_ms) {
  std::optional<Revision> revision = live_ ? live_->Revise(request_id, now_ms) : std::nullopt;
  if (revision && revision->beta) fleet_.Split(request_id, *revision->beta, *revision->split_token);
  return revision;
}

void Scheduler::Recut(const std::string& request_id, std::optional<std::int64_t> split_token,
                      double now_ms) {
  if (split_token) ValidateTokens("split_token", *split_token);
  if (split_token == 0) Refuse("split_token is 0; alpha computes at least one token");
  if (live_) live_->Recut(request_id, split_token, now_ms);
}

void Scheduler::CutWhole(const std::string& request_id, const InstanceId& beta,
                         std::int64_t split_token, double now_ms) {
  ValidateTokens("split_token", split_token);
  if (split_token == 0) Refuse("split_token is 0; alpha computes at least one token");
  fleet_.Split(request_id, beta, split_token);
  if (live_) live_->CutWhole(request_id, beta, split_token, now_ms);
}

void Scheduler::Parked(const std::string& request_id, std::int64_t computed_tokens, double now_ms) {
  ValidateTokens("computed_tokens", computed_tokens);
  if (live_) live_->Parked(request_id, computed_tokens, now_ms);
}

void Scheduler::ObserveStep(const InstanceId& instance_id, const BatchShape& shape,
                            double measured_ms, double now_ms) {
  if (live_) live_->ObserveStep(instance_id, shape, measured_ms, now_ms);
}

void Scheduler::SetKvTokenMs(double kv_token_ms, double work_ms) {
  Options changed = options_;
  changed.kv_token_ms = kv_token_ms;
  changed.kv_token_work_ms = work_ms;
  options_ = Validated(changed);
  if (live_) live_->SetKvTokenMs(kv_token_ms, work_ms);
}

double Scheduler::CostScale(const InstanceId& instance_id) const {
  return live_ ? live_->CostScale(instance_id) : 1.0;
}

std::int64_t Scheduler::ReservedTokens(const InstanceId& instance_id) const {
  return fleet_.ReservedTokens(instance_id);
}

void Scheduler::CheckInvariants() const {
  fleet_.CheckInvariants();
  if (live_) live_->CheckInvariants();
}

}  // namespace dynaserve
