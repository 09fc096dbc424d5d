// Whether answers turn out longer or shorter than was expected of them.  Pure.
#pragma once

namespace dynaserve {

class LengthBias {
 public:
  // Of an answer that has ended; both above 0.
  void Learn(double output_tokens, double expected_tokens) {
    finished_ = kKept * finished_ + 1.0;
    output_tokens_ = kKept * output_tokens_ + output_tokens;
    expected_tokens_ = kKept * expected_tokens_ + expected_tokens;
  }

  // What answers had, over what was expected of them; 1 while few have ended.
  double Factor() const {
    return finished_ < kLeastFinished ? 1.0 : output_tokens_ / expected_tokens_;
  }

 private:
  static constexpr double kLeastFinished = 16.0;
  static constexpr double kKept = 1.0 - 1.0 / 500.0;  // of all before, with each that ends

  double finished_ = 0.0;
  double output_tokens_ = 0.0;
  double expected_tokens_ = 0.0;
};

}  // namespace dynaserve
