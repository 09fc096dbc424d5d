// How much of the TBT SLO a step of decodes alone may take, by prediction, for one more to begin.
//
// Where such a step always took all of that, as many tokens would be late as errors exceed the
// margin.  But decodes come and go, and most steps have fewer of them: a margin for the full ones
// keeps requests waiting while hardly a token is late.  So this one follows the share of gaps
// between tokens that are longer than the SLO, whatever made them so, but is never wider than what
// normally distributed errors ask of a step that is always full.  Pure.
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
  static constexpr double kLeastSigmas = 1.65;  // 5 in a hundred
  // Of the SLO, however large errors are: they are none of chance then.
  static constexpr double kLeastShare = 0.4;

  // gaps: between tokens, that ended with a step; late: of these; left: decodes that will have no
  // more of them here.  Throws std::invalid_argument unless 0 <= late <= gaps and left is not
  // negative.
  void Observe(std::int64_t gaps, std::int64_t late, std::int64_t left) {
    if (late < 0 || gaps < late || left < 0) {
      throw std::invalid_argument(std::to_string(late) + " late gaps of " + std::to_string(gaps) +
                                  ", and " + std::to_string(left) + " decodes that left");
    }
    if (gaps == 0 && left == 0) return;
    steps_ = kKept * steps_ + 1.0;
    gaps_ = kKept * gaps_ + static_cast<double>(gaps);
    left_ = kKept * left_ + static_cast<double>(left);
    // Decodes are replaced in as many steps as one of them stays: only then is seen what more or
    // fewer of them make late.
    const double generation_steps =
        std::clamp(gaps_ / left_, kLeastGenerationSteps, kMostGenerationSteps);
    const double usual = gaps_ / steps_;
    // No single pause of a machine counts more than a step of the usual size that is all late.
    const double beyond =
        std::min(usual, static_cast<double>(late) - kLateShare * static_cast<double>(gaps));
    sigmas_ += kGain * beyond / (usual * generation_steps);
    sigmas_ = std::clamp(sigmas_, kLeastSigmas, kMostSigmas);
  }

  double sigmas() const { return sigmas_; }

  // sigma: of the logarithm of measured over predicted latency.
  double Share(double sigma) const { return std::max(kLeastShare, std::exp(-sigmas_ * sigma)); }

 private:
  // One in a hundred is promised; by dynaserve/deadline_margin.py four in a thousand are late of
  // steps that prefill, too.
  static constexpr double kLateShare = 0.005;
  // Standard deviations, where all gaps are late while all decodes are replaced once.
  static constexpr double kGain = 60.0;
  static constexpr double kLeastGenerationSteps = 150.0;  // else single steps would decide
  static constexpr double kMostGenerationSteps = 3000.0;  // else nothing would change any more
  static constexpr double kKept = 1.0 - 1.0 / 2000.0;     // of what was, with each step

  double sigmas_ = kMostSigmas;
  // Smoothed; begin as if two decodes had stayed for 500 steps, beside each other.
  double steps_ = 500.0;
  double gaps_ = 1000.0;
  double left_ = 2.0;
};

}  // namespace dynaserve
