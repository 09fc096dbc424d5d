// What comes to a fleet lately, per millisecond: sums that fade with time.  Pure.
#pragma once

#include <algorithm>
#include <cmath>

namespace dynaserve {

class ArrivalRates {
 public:
  // What came a window ago counts 1/e of what comes now.
  explicit ArrivalRates(double window_ms) : window_ms_(window_ms) {}

  struct Arrival {
    double prompt_tokens = 0.0;
    double cached_tokens = 0.0;  // of these, that need not be computed
    double output_tokens = 0.0;  // expected
  };

  // Time must not go back.
  void Count(const Arrival& arrival, double now_ms) {
    const auto [prompt_tokens, cached_tokens, output_tokens] = arrival;
    const double prefill_tokens = prompt_tokens - cached_tokens;
    if (requests_ == 0.0) told_ms_ = now_ms;  // watched from now on
    const double kept = Kept(now_ms);
    told_ms_ = now_ms;
    seen_ = kept * seen_ + (1.0 - kept);
    requests_ = kept * requests_ + 1.0;
    prefill_tokens_ = kept * prefill_tokens_ + prefill_tokens;
    output_tokens_ = kept * output_tokens_ + output_tokens;
    answer_context_ =
        kept * answer_context_ + output_tokens * (prompt_tokens + 0.5 * output_tokens);
    squares_ = {kept * kept * squares_.one + 1.0,
                kept * kept * squares_.prefill + prefill_tokens * prefill_tokens,
                kept * kept * squares_.output + output_tokens * output_tokens,
                kept * kept * squares_.both + prefill_tokens * output_tokens};
  }

  // All 0 before the first arrival.
  double Requests(double now_ms) const { return PerMs(requests_, now_ms); }
  double PrefillTokens(double now_ms) const { return PerMs(prefill_tokens_, now_ms); }
  double OutputTokens(double now_ms) const { return PerMs(output_tokens_, now_ms); }
  // The standard error of the output tokens that come with so many tokens of prefill: one long
  // answer among a few says little of those to come.  All of them, if there is one request only.
  double OutputTokensError(double now_ms) const {
    const double count = squares_.one > 0.0 ? requests_ * requests_ / squares_.one : 0.0;
    if (count < kLeastCount || prefill_tokens_ == 0.0) return OutputTokens(now_ms);
    const double ratio = output_tokens_ / prefill_tokens_;
    const double rest =
        squares_.output - 2.0 * ratio * squares_.both + ratio * ratio * squares_.prefill;
    return PerMs(std::sqrt(std::max(0.0, rest) * count / (count - 1.0)), now_ms);
  }
  double MeanOutputTokens() const { return requests_ > 0.0 ? output_tokens_ / requests_ : 0.0; }
  double MeanPrefillTokens() const { return requests_ > 0.0 ? prefill_tokens_ / requests_ : 0.0; }
  // Of a decode, over all steps of the answers that came.
  double MeanContextTokens() const {
    return output_tokens_ > 0.0 ? answer_context_ / output_tokens_ : 0.0;
  }

 private:
  // Of a window. Less is no experience.
  static constexpr double kLeastSeen = 0.05;
  // Requests that tell how much they differ.
  static constexpr double kLeastCount = 1.5;
  // Sums of what a single request brought, squared: its weight is, too, and fades twice as fast.
  struct Squares {
    double one = 0.0, prefill = 0.0, output = 0.0, both = 0.0;
  };

  double Kept(double now_ms) const { return std::exp(-(now_ms - told_ms_) / window_ms_); }
  double PerMs(double sum, double now_ms) const {
    const double kept = Kept(now_ms);
    const double seen = kept * seen_ + (1.0 - kept);
    return kept * sum / (window_ms_ * std::max(kLeastSeen, seen));
  }

  double window_ms_;
  double told_ms_ = 0.0;  // the sums are of then
  double seen_ = 0.0;     // share of a window that has been watched
  double requests_ = 0.0;
  double prefill_tokens_ = 0.0;
  double output_tokens_ = 0.0;
  double answer_context_ = 0.0;  // each output token's
  Squares squares_;
};

}  // namespace dynaserve
