#include "dynaserve/late_cut.h"

#include <algorithm>
#include <cmath>

namespace dynaserve {
namespace {

// An instance that prefills for less of its time has some to spare beside decodes.
constexpr double kLeastPressure = 0.75;
constexpr double kMostSteps = 1e9;

// What is left of it, as if all that is computed had been its prompt.
SearchRequest RestOf(const SearchRequest& request, const VirtualRequest& standing) {
  SearchRequest rest = request;
  const std::int64_t unlikely =
      request.likely_output_tokens -
      std::min(request.expected_output_tokens, request.likely_output_tokens);
  rest.prompt_tokens = standing.context_tokens;
  rest.expected_output_tokens = 1 + standing.decode_tokens;
  rest.likely_output_tokens = rest.expected_output_tokens + unlikely;
  return rest;
}

}  // namespace

std::optional<Revision> GatherDecode(SplitSearch& search, const DecodingWhole& decoding,
                                     const SearchRequest& request, const SearchOptions& options,
                                     const RevisionOptions& revision, double now_ms) {
  ExecutionPredictor& from = *decoding.alpha.predictor;
  ExecutionPredictor& to = *decoding.beta.predictor;
  const VirtualRequest& standing = decoding.standing;
  const SearchRequest rest = RestOf(request, standing);
  SearchInstance alpha = decoding.alpha;
  alpha.own_key = standing.key;
  Outcome stays = search.PriceDecoding(alpha, rest, options, now_ms);
  const double step_limit_ms = from.limits().step_ms;
  const double beside_ms = std::isfinite(step_limit_ms)
                               ? std::max(stays.decode_step_ms, step_limit_ms)
                               : stays.decode_step_ms;
  const double lasts_ms = static_cast<double>(standing.decode_tokens) * beside_ms;
  const double from_queue_ms = from.PrefillFreeMs(now_ms) - now_ms;
  // When nobody comes any more, those who wait are still there.
  const bool presses =
      options.prefill_pressure >= kLeastPressure || from_queue_ms >= kLeastPressure * lasts_ms;
  if (!presses || !(stays.decode_step_ms > 0.0)) return std::nullopt;
  const double kv_ms = options.kv_token_ms * static_cast<double>(standing.context_tokens);
  const std::int64_t more =
      kLateCutTokens + std::llround(std::ceil(std::min(kv_ms / stays.decode_step_ms, kMostSteps)));
  const std::int64_t left = standing.decode_tokens - more;
  if (left < 1) return std::nullopt;
  // The plan's price is that of the first decode there; those that decode there share it.
  stays.lost_prefill_ms /= static_cast<double>(std::max<std::int64_t>(1, from.Decodes(now_ms)));
  stays.alpha_decode_tokens = decoding.emitted_tokens;
  Revision found;
  found.reason = RevisionReason::kGathersDecodes;
  found.kept_objective_ms = ObjectiveMs(stays, request.slo);
  // No prediction where not even a hand-off that cost nothing would gain enough.
  const double least_gain_ms =
      revision.least_gain_ms + revision.least_gain_share * found.kept_objective_ms;
  if (!(found.kept_objective_ms > least_gain_ms)) return std::nullopt;

  Outcome goes = search.PriceDecoding(decoding.beta, rest, options, now_ms);
  if (goes.decode_step_ms > to.limits().MostToAdmitMs()) return std::nullopt;
  const double to_queue_ms = to.PrefillFreeMs(now_ms) - now_ms;
  // As in Sketch::RunningMs(), a step beside prefill where anything waits for that.
  const bool steps_are_full = to_queue_ms > 0.0 && std::isfinite(to.limits().step_ms);
  const double running_ms =
      steps_are_full ? std::max(goes.decode_step_ms, to.limits().step_ms) : goes.decode_step_ms;
  const std::int64_t split = standing.context_tokens + more;
  VirtualRequest first = standing;
  first.decode_tokens = more;
  const auto computed = from.PredictChange(first, now_ms, Horizon::kEnd);
  if (!computed) return std::nullopt;
  found.hand_off_ms = SplitSearch::KvThereMs(now_ms, computed->end_ms, static_cast<double>(split),
                                             1.0, options.kv_token_ms) +
                      options.hand_off_ms;
  const Forecast continued = to.Predict({.context_tokens = split,
                                         .decode_tokens = left,
                                         .ready_ms = found.hand_off_ms,
                                         .is_beta = true},
                                        now_ms, Horizon::kPrefillEnd);
  goes.gap_ms = std::max(options.hand_off_ms + 2.0 * running_ms,
                         continued.start_ms + running_ms - computed->end_ms);
  goes.lost_prefill_ms += stays.lost_prefill_ms * static_cast<double>(more) /
                          static_cast<double>(standing.decode_tokens);
  goes.hand_off_ms = options.hand_off_price_ms;
  const double moving_ms = options.MovingMs(split);
  const auto overtaken = static_cast<double>(to.BeforeBeta(now_ms).requests);
  const double seat_ms = to.SeatMs(to.AdmittedMs(now_ms, split, true), left);
  goes.others_wait_ms = OthersWaitMs(from_queue_ms, moving_ms, options.arrivals_per_ms) +
                        OthersWaitMs(to_queue_ms, moving_ms, options.arrivals_per_ms) +
                        overtaken * (moving_ms + seat_ms);
  goes.alpha_decode_tokens = decoding.emitted_tokens + static_cast<double>(more);
  goes.decode_tokens = static_cast<double>(left);
  found.objective_ms = ObjectiveMs(goes, request.slo);
  found.split_token = split;
  found.probes = 2;
  if (!(found.kept_objective_ms - found.objective_ms > least_gain_ms)) return std::nullopt;
  return found;
}

}  // namespace dynaserve
