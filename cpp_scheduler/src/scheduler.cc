#include "dynaserve/scheduler.h"

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
  const std::int64_t end_token = request.prompt_tokens + request.max_output_tokens;
  if (request.forced_split && (*request.forced_split < 0 || *request.forced_split > end_token)) {
    Refuse("forced_split is ", *request.forced_split, ", outside [0, ", end_token,
           "] (prompt_tokens + max_output_tokens)");
  }
}

}  // namespace

Scheduler::Scheduler(const Options& options) : options_(Validated(options)) {}

void Scheduler::Observe(const InstanceState& instance) { fleet_.Observe(instance); }

void Scheduler::Remove(const InstanceId& instance_id) { fleet_.Remove(instance_id); }

std::optional<Placement> Scheduler::Place(const RequestSpec& request) {
  Validate(request);
  if (fleet_.IsReserved(request.request_id)) {
    Refuse("request_id \"", request.request_id, "\" is already placed");
  }
  const std::vector<InstanceLoad> instances = fleet_.Accepting();
  std::optional<Placement> placement = ChoosePlacement(options_, request, instances);
  if (placement) fleet_.Reserve(request.request_id, *placement);
  return placement;
}

void Scheduler::Finish(const std::string& request_id) { fleet_.Release(request_id); }

std::int64_t Scheduler::ReservedTokens(const InstanceId& instance_id) const {
  return fleet_.ReservedTokens(instance_id);
}

void Scheduler::CheckInvariants() const { fleet_.CheckInvariants(); }

}  // namespace dynaserve
