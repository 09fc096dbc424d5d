// Whether answers turn out longer or shorter than is expected of them.  Pure.
#pragma once

#include <cstdint>

namespace dynaserve {

class LengthBias {
 public:
  // Of an answer that has ended; both at least 1.
  void Learn(std::int64_t output_tokens, std::int64_t expected_tokens) {
    ++finished_;
    output_tokens_ = kKept * output_tokens_ + static_cast<double>(output_tokens);
    expected_tokens_ = kKept * expected_tokens_ + static_cast<double>(expected_tokens);
  }

  // What answers had, over what was expected of them; 1 while few have ended.
  double Factor() const {
    return finished_ < kLeastFinished ? 1.0 : output_tokens_ / expected_tokens_;
  }

 private:
  static constexpr std::int64_t kLeastFinished = 16;
  static constexpr double kKept = 1.0 - 1.0 / 500.0;  // of all before, with each that ends

  std::int64_t finished_ = 0;
  double output_tokens_ = 0.0;
  double expected_tokens_ = 0.0;
};

}  // namespace dynaserve
