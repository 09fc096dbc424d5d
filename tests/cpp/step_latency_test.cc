// Random walks through cost model, table and batch rule under the sanitizers; what they compute is
// tested against oracles in tests/test_step_latency.py.
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "dynaserve/batch_rule.h"
#include "dynaserve/cost_model.h"
#include "dynaserve/profile_table.h"

using namespace dynaserve;

namespace {

constexpr Roofline kRoofline{12.0, 0.11, 90.0, 5.4e-6, 0.02, 1.3e-4};

using Random = std::mt19937_64;

std::int64_t Draw(Random& random, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(0, most)(random);
}

BatchShape RandomShape(Random& random) {
  const std::int64_t prefill = Draw(random, 40'000);
  const std::int64_t decodes = Draw(random, 2'000);
  return {prefill + 1, PrefillPairs(prefill + 1, Draw(random, 100'000)), decodes,
          decodes * Draw(random, 100'000)};
}

TEST(AnyShapeIsPredictedAndLearnt) {
  Random random(1);
  ProfileTable table(kRoofline);
  for (int i = 0; i < 2'000; ++i) {
    const BatchShape shape = RandomShape(random);
    CHECK(std::isfinite(table.StepMs(shape)));
    table.Observe(shape, std::exp(std::normal_distribution<>(3.0, 2.0)(random)));
  }
  CHECK(table.observed() == 2'000);
}

TEST(AnyBudgetKeepsItsLimits) {
  Random random(2);
  ProfileTable table(kRoofline);
  for (int i = 0; i < 500; ++i) {
    table.Observe(RandomShape(random), 50.0);
    std::vector<PrefillWork> waiting;
    for (std::int64_t n = Draw(random, 4); n > 0; --n) {
      waiting.push_back({1 + Draw(random, 20'000), Draw(random, 20'000)});
    }
    const BatchShape decodes{0, 0.0, Draw(random, 600), 0};
    const BatchLimits limits{static_cast<double>(Draw(random, 500)), Draw(random, 20'000),
                             Draw(random, 100)};
    const PrefillBudget budget = ChooseBudget(table, decodes, waiting, limits);
    CHECK(budget.tokens >= 0);
    CHECK(budget.tokens == 0 || budget.tokens + decodes.tokens() <= limits.max_tokens);
    CHECK(budget.tokens <= limits.min_prefill_tokens || budget.step_ms <= limits.step_ms);
  }
}

TEST(NoLimitTakesAllThatPaysOff) {
  const ProfileTable table(kRoofline);
  const std::vector<PrefillWork> waiting = {{64, 0}};
  const BatchLimits limits{std::numeric_limits<double>::infinity(), 8192, 0};
  CHECK(ChooseBudget(table, {}, waiting, limits).tokens == 64);
}

TEST(AnEmptyStepTakesNoTime) { CHECK(ProfileTable(kRoofline).StepMs({}) == 0.0); }

TEST(AnImpossibleRooflineIsNamed) {
  Roofline roofline = kRoofline;
  roofline.token_ms = -1.0;
  CHECK(THROWN(std::invalid_argument, ProfileTable(roofline)).find("token_ms") !=
        std::string::npos);
}

TEST(AFitNeedsASample) {
  CHECK(THROWN(std::invalid_argument, FitRoofline({})).find("at least one") != std::string::npos);
}

}  // namespace

RUN_TESTS()
