#include "dynaserve/hand_off_revision.h"

#include <algorithm>
#include <limits>

#include "dynaserve/placement.h"

namespace dynaserve {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

SearchInstance WithBehind(SearchInstance instance, std::int64_t behind) {
  instance.behind = behind;
  return instance;
}

class Look {
 public:
  Look(SplitSearch& search, const PendingHandOff& pending, const SearchRequest& request,
       const SearchOptions& options, double now_ms)
      : pending_(pending),
        request_(request),
        options_(options),
        now_ms_(now_ms),
        end_token_(ComputedTokens(request.prompt_tokens, request.expected_output_tokens)),
        standing_(pending.alpha.predictor->Find(pending.alpha_key, now_ms)),
        behind_(pending.alpha.predictor->Behind(pending.alpha_key, now_ms)),
        on_alpha_(
            search.PriceDecoding(WithBehind(pending.alpha, behind_), request, options, now_ms)),
        on_beta_(search.PriceDecoding(pending.beta, request, options, now_ms)),
        alpha_queue_ms_(pending.alpha.predictor->PrefillFreeMs(now_ms) - now_ms),
        beta_queue_ms_(pending.beta.predictor->PrefillFreeMs(now_ms) - now_ms),
        overtaken_(static_cast<double>(pending.beta.predictor->BeforeBeta(now_ms).requests)),
        seat_ms_(pending.beta.predictor->SeatMs(
            pending.beta.predictor->AdmittedMs(now_ms, request.prompt_tokens, true),
            request.expected_output_tokens)) {}

  // An alpha that computes its prompt, also for the second time, and a cut inside that.
  bool possible() const {
    return standing_ && standing_->prefill_tokens > 0 &&
           pending_.split_token < request_.prompt_tokens;
  }
  std::int64_t computed() const { return standing_->context_tokens; }

  double AloneMs() const {
    VirtualRequest rest = *standing_;
    rest.prefill_tokens = request_.prompt_tokens - computed();
    rest.decode_tokens = end_token_ - request_.prompt_tokens;
    const auto forecast =
        pending_.alpha.predictor->PredictChange(rest, now_ms_, Horizon::kPrefillEnd);
    if (!forecast) return kNever;
    Outcome outcome = on_alpha_;
    outcome.ttft_ms = pending_.waited_ms + forecast->prefill_end_ms - now_ms_;
    outcome.others_wait_ms = BehindWaits(Lasting(forecast->start_ms, forecast->prefill_end_ms));
    return ObjectiveMs(outcome, request_.slo);
  }

  struct Cut {
    double objective_ms = kNever;
    double hand_off_ms = 0.0;
    double left_ms = 0.0;  // until the first token
  };

  Cut CutAt(std::int64_t split_token) const {
    VirtualRequest rest = *standing_;
    rest.prefill_tokens = split_token - computed();
    rest.decode_tokens = 0;
    const auto first = pending_.alpha.predictor->PredictChange(rest, now_ms_, Horizon::kEnd);
    if (!first) return {};
    Forecast from_now = *first;
    from_now.start_ms = std::max(first->start_ms, now_ms_);
    Cut cut;
    cut.hand_off_ms = SplitSearch::KvThereMs(from_now, rest.prefill_tokens, options_.kv_token_ms) +
                      options_.hand_off_ms;
    const auto second = pending_.beta.predictor->PredictChange(
        {pending_.beta_key, split_token, request_.prompt_tokens - split_token,
         end_token_ - request_.prompt_tokens, cut.hand_off_ms, /*is_beta=*/true},
        now_ms_, Horizon::kPrefillEnd);
    if (!second) return {};
    cut.left_ms = second->prefill_end_ms - now_ms_;
    Outcome outcome = on_beta_;
    outcome.ttft_ms = pending_.waited_ms + cut.left_ms;
    outcome.hand_off_ms = options_.hand_off_price_ms + options_.hand_off_price_share * cut.left_ms;
    // beta waits for alpha, others only for what is queued before them, and those that beta
    // overtakes for its prefill and its seat; one that resumes shares a step of decodes.
    const bool resumes = request_.prompt_tokens - split_token <= 1;
    const double took_ms = resumes ? 0.0 : Lasting(second->start_ms, second->prefill_end_ms);
    // What is computed has left already.
    const double moving_ms = options_.MovingMs(rest.prefill_tokens);
    const double beta_ms = took_ms + moving_ms;
    outcome.others_wait_ms = BehindWaits(Lasting(first->start_ms, first->end_ms) + moving_ms) +
                             OthersWait(beta_queue_ms_, beta_ms) +
                             overtaken_ * (beta_ms + seat_ms_);
    cut.objective_ms = ObjectiveMs(outcome, request_.slo);
    return cut;
  }

 private:
  double Lasting(double start_ms, double end_ms) const {
    return end_ms - std::max(start_ms, now_ms_);
  }
  double OthersWait(double queue_ms, double work_ms) const {
    return OthersWaitMs(queue_ms, work_ms, options_.arrivals_per_ms);
  }
  // On alpha's instance as many as come while its queue lasts, or as are behind it already.
  double BehindWaits(double work_ms) const {
    return std::max(static_cast<double>(behind_) * work_ms, OthersWait(alpha_queue_ms_, work_ms));
  }

  const PendingHandOff& pending_;
  const SearchRequest& request_;
  const SearchOptions& options_;
  const double now_ms_;
  const std::int64_t end_token_;
  const std::optional<VirtualRequest> standing_;
  const std::int64_t behind_;
  const Outcome on_alpha_, on_beta_;
  const double alpha_queue_ms_;
  const double beta_queue_ms_;
  const double overtaken_;
  const double seat_ms_;
};

}  // namespace

double RevisedObjectiveMs(SplitSearch& search, const PendingHandOff& pending,
                          std::optional<std::int64_t> split_token, const SearchRequest& request,
                          const SearchOptions& options, double now_ms) {
  const Look look(search, pending, request, options, now_ms);
  if (!look.possible()) return kNever;
  return split_token ? look.CutAt(*split_token).objective_ms : look.AloneMs();
}

std::optional<Revision> ReviseHandOff(SplitSearch& search, const PendingHandOff& pending,
                                      const SearchRequest& request, const SearchOptions& options,
                                      const RevisionOptions& revision, double now_ms) {
  const Look look(search, pending, request, options, now_ms);
  if (!look.possible() || pending.split_token <= look.computed()) return std::nullopt;
  const Look::Cut kept = look.CutAt(pending.split_token);
  if (kept.objective_ms == kNever) return std::nullopt;
  Revision best;
  best.objective_ms = look.AloneMs();
  best.kept_objective_ms = kept.objective_ms;
  best.probes = 2;

  const std::int64_t least = look.computed() + options.least_part_tokens;
  const std::int64_t most = request.prompt_tokens - 1;
  std::int64_t centre = pending.split_token;
  double centre_ms = kept.objective_ms;
  // Returns whether the centre moved there.
  const auto probe = [&](std::int64_t split) {
    if (split < least || split > most || split == centre) return false;
    ++best.probes;
    const Look::Cut cut = look.CutAt(split);
    if (cut.objective_ms < best.objective_ms) {
      best.objective_ms = cut.objective_ms;
      best.split_token = split;
      best.hand_off_ms = cut.hand_off_ms;
    }
    if (!(cut.objective_ms < centre_ms)) return false;
    centre = split;
    centre_ms = cut.objective_ms;
    return true;
  };
  probe(most);
  probe(least);
  std::int64_t stride = (most - least) / 4;
  while (stride > 0 && best.probes < kMostRevisionProbes) {
    if (!probe(centre + stride) && best.probes < kMostRevisionProbes && !probe(centre - stride)) {
      stride /= 2;
    }
  }

  const double least_gain_ms = revision.least_gain_ms + revision.least_gain_share * kept.left_ms;
  if (!(kept.objective_ms - best.objective_ms > least_gain_ms)) return std::nullopt;
  if (best.split_token) {
    best.reason = *best.split_token > pending.split_token ? RevisionReason::kLaterIsBetter
                                                          : RevisionReason::kEarlierIsBetter;
  }
  return best;
}

}  // namespace dynaserve
