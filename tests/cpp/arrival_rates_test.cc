#include "dynaserve/arrival_rates.h"

#include <array>
#include <cmath>
#include <span>

#include "check.h"

using namespace dynaserve;

namespace {

bool Near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * b; }

constexpr double kLongAgo = 1e9;

TEST(NothingComesBeforeTheFirst) {
  const ArrivalRates rates(10'000.0);
  CHECK(rates.Requests(kLongAgo) == 0.0 && rates.OutputTokens(kLongAgo) == 0.0);
  CHECK(rates.MeanPrefillTokens() == 0.0 && rates.MeanContextTokens() == 0.0);
}

TEST(ASteadyStreamHasItsRateFromAnEighthOfAWindowOn) {
  ArrivalRates rates(60'000.0);
  for (double now_ms = kLongAgo; now_ms < kLongAgo + 300'000.0; now_ms += 100.0) {
    rates.Count({2000.0, 0.0, 500.0}, now_ms);
    if (now_ms < kLongAgo + 8'000.0) continue;
    CHECK(Near(rates.Requests(now_ms), 0.01, 0.02));
    CHECK(Near(rates.PrefillTokens(now_ms), 20.0, 0.02));
    CHECK(Near(rates.OutputTokens(now_ms), 5.0, 0.02));
  }
}

TEST(TheFirstRequestIsNotTakenForAFlood) {
  ArrivalRates rates(60'000.0);
  rates.Count({100.0, 0.0, 10.0}, kLongAgo);
  CHECK(Near(rates.Requests(kLongAgo), 1.0 / 3'000.0, 1e-9));
}

// Relative; of answers to prompts of 1,000 tokens, all at once.
double Error(std::span<const double> outputs) {
  ArrivalRates rates(60'000.0);
  for (const double output : outputs) rates.Count({1000.0, 0.0, output}, kLongAgo);
  return rates.OutputTokensError(kLongAgo) / rates.OutputTokens(kLongAgo);
}

TEST(OneLongAnswerAmongAFewIsMostlyChance) {
  std::array<double, 10> outputs;
  outputs.fill(100.0);
  CHECK(Error(outputs) < 1e-6);
  outputs.back() = 4000.0;
  // A mean of 490, a standard deviation of 1,233, and the root of ten.
  CHECK(Near(Error(outputs), 1233.3 / std::sqrt(10.0) / 490.0, 1e-3));
  CHECK(Error(std::span(outputs).last(1)) == 1.0);
}

TEST(AnswersThatGoWithTheirPromptsAreSure) {
  ArrivalRates rates(60'000.0);
  for (const double prompt : {100.0, 5000.0, 700.0})
    rates.Count({prompt, 0.0, 0.5 * prompt}, kLongAgo);
  CHECK(rates.OutputTokensError(kLongAgo) < 1e-6 * rates.OutputTokens(kLongAgo));
}

TEST(TheErrorOfASteadyStreamIsThatOfTwoWindows) {
  ArrivalRates rates(60'000.0);
  for (int i = 0; i < 6000; ++i) {
    rates.Count({1000.0, 0.0, i % 2 == 0 ? 100.0 : 300.0}, kLongAgo + 100.0 * i);
  }
  const double last_ms = kLongAgo + 599'900.0;
  // Weights that fade by e in 600 requests tell as much as 1,200 equal ones.
  const double error = rates.OutputTokensError(last_ms) / rates.OutputTokens(last_ms);
  CHECK(Near(error, 0.5 / std::sqrt(1200.0), 0.01));
}

TEST(WhatDoesNotComeAnyMoreFades) {
  ArrivalRates rates(10'000.0);
  for (int i = 0; i < 1000; ++i) rates.Count({100.0, 0.0, 10.0}, kLongAgo + 100.0 * i);
  const double last_ms = kLongAgo + 99'900.0;
  CHECK(Near(rates.Requests(last_ms + 20'000.0), 0.01 * std::exp(-2.0), 0.02));
}

TEST(ADecodeIsAsOftenSeenAsItHasSteps) {
  ArrivalRates rates(60'000.0);
  rates.Count({1000.0, 0.0, 300.0}, kLongAgo);
  rates.Count({4000.0, 0.0, 100.0}, kLongAgo);
  CHECK(Near(rates.MeanPrefillTokens(), 2500.0, 1e-9));
  CHECK(Near(rates.MeanContextTokens(), (300.0 * 1150.0 + 100.0 * 4050.0) / 400.0, 1e-9));
}

TEST(WhatIsCachedIsContextAndNoPrefill) {
  ArrivalRates rates(60'000.0), all(60'000.0);
  rates.Count({4000.0, 3000.0, 100.0}, kLongAgo);
  all.Count({4000.0, 0.0, 100.0}, kLongAgo);
  CHECK(Near(rates.PrefillTokens(kLongAgo), 0.25 * all.PrefillTokens(kLongAgo), 1e-9));
  CHECK(Near(rates.MeanPrefillTokens(), 1000.0, 1e-9));
  CHECK(rates.MeanContextTokens() == all.MeanContextTokens());
}

}  // namespace

RUN_TESTS()
