// How much of the TBT SLO a step of decodes alone may take, by prediction, for one more to begin.
//
// Where such a step always took all of that, as many tokens would be late as errors exceed the
// margin.  But decodes come and go, and most steps have fewer of them: a margin for the full ones
// keeps requests waiting while hardly a token is late.  So this one follows what is late of all
// tokens.  It is never wider than what normally distributed errors ask of a step that is always
// full; late tokens that it does not prevent (those of a machine that pauses) do not widen it on.
// Pure.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace dynaserve {

class AdmissionMargin {
 public:
  // What 4 in a thousand of normally distributed errors exceed, in standard deviations.
  static constexpr double kMostSigmas = 2.65;
  static constexpr double kLeastSigmas = 1.0;
  // Of the SLO, however large errors are: they are none of chance then.
  static constexpr double kLeastShare = 0.4;

  // The tokens of a step but for the first ones of their requests, those of them that were late,
  // and how many answers ended with it.  Throws std::invalid_argument unless 0 <= late <= tokens
  // and ended is not negative.
  void Observe(std::int64_t tokens, std::int64_t late, std::int64_t ended) {
    if (late < 0 || tokens < late || ended < 0) {
      throw std::invalid_argument(std::to_string(late) + " late tokens of " +
                                  std::to_string(tokens) + ", and " + std::to_string(ended) +
                                  " answers that ended");
    }
    steps_ = kKept * steps_ + (tokens > 0 ? 1.0 : 0.0);
    tokens_ = kKept * tokens_ + static_cast<double>(tokens);
    ended_ = kKept * ended_ + static_cast<double>(ended);
    const double beyond = static_cast<double>(late) - kLateShare * static_cast<double>(tokens);
    // Decodes are replaced in as many steps as an answer has tokens: only then is seen what more or
    // fewer of them make late.
    const double generation_steps = std::max(kLeastGenerationSteps, tokens_ / ended_);
    const double generation_tokens = tokens_ / steps_ * generation_steps;
    sigmas_ += kGain * beyond / generation_tokens;
    sigmas_ = std::clamp(sigmas_, kLeastSigmas, kMostSigmas);
  }

  double sigmas() const { return sigmas_; }

  // sigma: of the logarithm of measured over predicted latency.
  double Share(double sigma) const { return std::max(kLeastShare, std::exp(-sigmas_ * sigma)); }

 private:
  // One in a hundred is promised; by dynaserve/deadline_margin.py four in a thousand are late of
  // steps that prefill, too.
  static constexpr double kLateShare = 0.006;
  // Standard deviations, where all tokens are late while all decodes are replaced once.
  static constexpr double kGain = 30.0;
  static constexpr double kLeastGenerationSteps = 150.0;  // else single steps would decide
  static constexpr double kKept = 1.0 - 1.0 / 2000.0;     // of what was, with each step

  double sigmas_ = kMostSigmas;
  // Smoothed; begin as if two answers of 500 tokens had run beside each other.
  double steps_ = 500.0;
  double tokens_ = 1000.0;
  double ended_ = 2.0;
};

}  // namespace dynaserve
