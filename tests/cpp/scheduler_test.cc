#include "dynaserve/scheduler.h"

#include <limits>
#include <map>
#include <random>
#include <stdexcept>

#include "check.h"

using namespace dynaserve;

namespace {

RequestSpec Request(const std::string& id, std::int64_t prompt = 10, std::int64_t limit = 20,
                    std::int64_t expected = 11) {
  return {id, prompt, limit, expected, std::nullopt, true};
}

Scheduler FleetOfTwo(const Options& options = {}) {
  Scheduler scheduler(options);
  scheduler.Observe({"a", true});
  scheduler.Observe({"b", true});
  return scheduler;
}

std::string RefusalOf(const RequestSpec& request) {
  Scheduler scheduler = FleetOfTwo();
  const std::string message = THROWN(std::invalid_argument, scheduler.Place(request));
  CHECK(scheduler.ReservedTokens("a") == 0);
  CHECK(scheduler.ReservedTokens("b") == 0);
  return message;
}

TEST(RatioOutsideTheUnitIntervalIsRefused) {
  CHECK(THROWN(std::invalid_argument, Scheduler({Policy::kFixed, 1.5})) ==
        "ratio is 1.5, outside [0, 1]");
  CHECK(THROWN(std::invalid_argument, Scheduler({Policy::kFixed, -0.1})) ==
        "ratio is -0.1, outside [0, 1]");
  THROWN(std::invalid_argument,
         Scheduler({Policy::kFixed, std::numeric_limits<double>::quiet_NaN()}));
}

TEST(TokenCountsOutOfRangeAreRefused) {
  CHECK(RefusalOf(Request("r", -1)) == "prompt_tokens is -1, outside [0, 1099511627776]");
  CHECK(RefusalOf(Request("r", 1, -2)) == "max_output_tokens is -2, outside [0, 1099511627776]");
  CHECK(RefusalOf(Request("r", 1, 1, -3)) ==
        "expected_output_tokens is -3, outside [0, 1099511627776]");
  RefusalOf(Request("r", 1, std::numeric_limits<std::int64_t>::max()));
}

TEST(ForcedSplitOutsideTheRequestIsRefused) {
  RequestSpec request = Request("r");
  request.forced_split = 31;
  CHECK(RefusalOf(request) ==
        "forced_split is 31, outside [0, 30] (prompt_tokens + max_output_tokens)");
  request.forced_split = -1;
  RefusalOf(request);
  request.forced_split = 30;
  CHECK(FleetOfTwo().Place(request)->reason == PlacementReason::kSplitAtEnd);
}

TEST(ARequestIsPlacedOnceUntilItFinishes) {
  Scheduler scheduler = FleetOfTwo();
  scheduler.Place(Request("r"));
  CHECK(THROWN(std::invalid_argument, scheduler.Place(Request("r"))) ==
        "request_id \"r\" is already placed");
  CHECK(scheduler.ReservedTokens("a") + scheduler.ReservedTokens("b") == 20);
  scheduler.Finish("r");
  CHECK(scheduler.Place(Request("r")));
}

TEST(NothingIsReservedWhenNoInstanceAccepts) {
  Scheduler scheduler(Options{});
  scheduler.Observe({"a", false});
  CHECK(!scheduler.Place(Request("r")));
  scheduler.Observe({"a", true});
  CHECK(scheduler.Place(Request("r")));
}

TEST(EqualInstancesTakeTurns) {
  Scheduler scheduler(Options{});
  for (const char* id : {"a", "b", "c"}) scheduler.Observe({id, true});
  std::string order;
  for (int i = 0; i < 6; ++i) {
    const std::string id = std::to_string(i);
    order += scheduler.Place(Request(id))->alpha.instance_id;
    scheduler.Finish(id);
  }
  CHECK(order == "abcabc");
}

TEST(TheLargestTokenCountsDoNotOverflow) {
  Scheduler scheduler = FleetOfTwo({Policy::kFixed, 1.0});
  const std::int64_t most = std::int64_t{1} << 40;
  CHECK(scheduler.Place(Request("r", most, most, most))->reason == PlacementReason::kSplitAtEnd);
}

// Random calls against a std::map of the placements: sums must agree after every call.
TEST(ReservationsMatchAModelUnderRandomCalls) {
  for (const Policy policy : {Policy::kColocated, Policy::kDisaggregated, Policy::kFixed}) {
    std::mt19937 rng(7);
    const auto draw = [&rng](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    Scheduler scheduler({policy, 0.4});
    std::map<std::string, Placement> model;
    for (int step = 0; step < 3000; ++step) {
      const std::string instance(1, static_cast<char>('a' + draw(5)));
      const std::string request = std::to_string(draw(20));
      const int action = draw(10);
      if (action < 2) {
        scheduler.Observe({instance, draw(4) > 0});
      } else if (action == 2) {
        scheduler.Remove(instance);
      } else if (action < 7 && !model.contains(request)) {
        const auto placement = scheduler.Place(Request(request, draw(50), draw(50), draw(50)));
        if (placement) model.emplace(request, *placement);
      } else {
        scheduler.Finish(request);
        model.erase(request);
      }
      std::map<std::string, std::int64_t> sums;
      for (const auto& [id, placement] : model) {
        sums[placement.alpha.instance_id] += placement.alpha.tokens();
        if (placement.beta) sums[placement.beta->instance_id] += placement.beta->tokens();
      }
      for (const char* id : {"a", "b", "c", "d", "e"})
        CHECK(scheduler.ReservedTokens(id) == sums[id]);
      scheduler.CheckInvariants();
    }
  }
}

}  // namespace

RUN_TESTS()
