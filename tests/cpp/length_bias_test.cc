#include "dynaserve/length_bias.h"

#include "check.h"

using namespace dynaserve;

namespace {

bool Near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * b; }

TEST(ABiasIsBelievedOnceSomeAnswersHaveEnded) {
  LengthBias bias;
  for (int i = 0; i < 15; ++i) bias.Learn(100, 400);
  CHECK(bias.Factor() == 1.0);
  bias.Learn(100, 400);
  CHECK(Near(bias.Factor(), 0.25, 1e-9));
}

TEST(ABiasFollowsWhatAnswersTurnIntoAndLongOnesCountMore) {
  LengthBias bias;
  for (int i = 0; i < 1000; ++i) bias.Learn(100, 400);
  for (int i = 0; i < 3000; ++i) bias.Learn(300, 200);
  CHECK(Near(bias.Factor(), 1.5, 0.01));
  bias = {};
  for (int i = 0; i < 20; ++i) {
    bias.Learn(1000, 500);
    bias.Learn(10, 500);
  }
  CHECK(Near(bias.Factor(), 1.01, 0.01));
}

}  // namespace

RUN_TESTS()
