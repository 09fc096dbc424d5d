#include "dynaserve/placement.h"

#include <vector>

#include "check.h"

using namespace dynaserve;

namespace {

constexpr Options kColocated{Policy::kColocated};
constexpr Options kDisaggregated{Policy::kDisaggregated};

Options Fixed(double ratio) { return {Policy::kFixed, ratio}; }

RequestSpec Request(std::int64_t prompt, std::int64_t limit, std::int64_t expected) {
  return {"r", prompt, limit, expected, std::nullopt, true};
}

RequestSpec ForcedAt(std::int64_t split, RequestSpec request = Request(10, 20, 11)) {
  request.forced_split = split;
  return request;
}

// Instances a, b, c, ... with these reservations, none used before.
std::vector<InstanceLoad> Fleet(const std::vector<std::int64_t>& reserved) {
  std::vector<InstanceLoad> fleet;
  for (const std::int64_t tokens : reserved) {
    fleet.push_back({std::string(1, static_cast<char>('a' + fleet.size())), tokens, 0});
  }
  return fleet;
}

Placement Whole(const char* instance, std::int64_t end, PlacementReason reason) {
  return {{instance, 0, end}, std::nullopt, reason};
}

Placement Cut(const char* alpha, const char* beta, std::int64_t split, std::int64_t end,
              PlacementReason reason = PlacementReason::kPolicy) {
  return {{alpha, 0, split}, MicroRequest{beta, split, end}, reason};
}

TEST(TheLastOutputTokenIsNotComputed) {
  CHECK(ComputedTokens(10, 5) == 14);
  CHECK(ComputedTokens(10, 1) == 10);
  CHECK(ComputedTokens(10, 0) == 10);
}

TEST(NoInstanceMeansNoPlacement) { CHECK(!ChoosePlacement(kColocated, Request(10, 20, 11), {})); }

TEST(ColocatedRunsWholeOnTheLeastReserved) {
  CHECK(ChoosePlacement(kColocated, Request(10, 20, 11), Fleet({5, 2, 9})) ==
        Whole("b", 20, PlacementReason::kColocated));
}

TEST(AWholeOnlyInstanceTakesWhatFitsItWhenItIsTheLeastReserved) {
  std::vector<InstanceLoad> fleet = Fleet({5, 2});
  fleet[1].whole_only = true;
  RequestSpec request = Request(10, 20, 11);
  CHECK(!ChooseWholeOnly(request, fleet));
  request.fits_whole_only = true;
  CHECK(ChooseWholeOnly(request, fleet) == Whole("b", 20, PlacementReason::kWholeOnly));
  CHECK(!ChooseWholeOnly(ForcedAt(5, request), fleet));
  fleet[0].reserved_tokens = 1;
  CHECK(!ChooseWholeOnly(request, fleet));
}

TEST(AmongEqualsTheOldestReservationWins) {
  std::vector<InstanceLoad> fleet = Fleet({0, 0, 0});
  fleet[0].last_reserved = 3;
  fleet[1].last_reserved = 1;
  fleet[2].last_reserved = 2;
  CHECK(ChoosePlacement(kColocated, Request(1, 2, 2), fleet)->alpha.instance_id == "b");
}

TEST(DisaggregatedCutsAtThePromptAndKeepsTheGroups) {
  CHECK(ChoosePlacement(kDisaggregated, Request(10, 20, 11), Fleet({9, 8, 0, 1, 2})) ==
        Cut("b", "c", 10, 20));
}

TEST(DisaggregatedForcedSplitKeepsTheGroups) {
  CHECK(ChoosePlacement(kDisaggregated, ForcedAt(4), Fleet({9, 0, 1})) ==
        Cut("a", "b", 4, 20, PlacementReason::kForced));
}

TEST(DisaggregatedWholeRequestsRunWhereTheyDecode) {
  RequestSpec request = Request(10, 20, 11);
  request.may_cut = false;
  CHECK(ChoosePlacement(kDisaggregated, request, Fleet({0, 9})) ==
        Whole("b", 20, PlacementReason::kNotCuttable));
}

TEST(DisaggregatedPromptWithOneOutputTokenRunsWhereItPrefills) {
  CHECK(ChoosePlacement(kDisaggregated, Request(10, 1, 1), Fleet({9, 0})) ==
        Whole("a", 10, PlacementReason::kSplitAtEnd));
}

TEST(FixedCutsAtTheRatioOfTheExpectedTokens) {
  CHECK(ChoosePlacement(Fixed(0.3), Request(10, 20, 11), Fleet({1, 0, 2})) == Cut("b", "a", 6, 20));
}

TEST(FixedRoundsHalfUp) {
  CHECK(ChoosePlacement(Fixed(0.5), Request(10, 20, 2), Fleet({0, 0}))->split_token() == 6);
}

TEST(FixedAtTheEdgesRunsWhole) {
  CHECK(ChoosePlacement(Fixed(0.0), Request(10, 20, 11), Fleet({1, 0}))->reason ==
        PlacementReason::kSplitAtStart);
  CHECK(ChoosePlacement(Fixed(1.0), Request(10, 11, 11), Fleet({1, 0}))->reason ==
        PlacementReason::kSplitAtEnd);
}

TEST(BetaPlansOneTokenForACutPastTheExpectedEnd) {
  CHECK(ChoosePlacement(kColocated, ForcedAt(25), Fleet({0, 0})) ==
        Cut("a", "b", 25, 26, PlacementReason::kForced));
}

TEST(ForcedSplitIsLegalUpToTheOutputLimit) {
  const std::vector<InstanceLoad> fleet = Fleet({0, 0});
  CHECK(ChoosePlacement(kColocated, ForcedAt(0), fleet) ==
        Whole("a", 20, PlacementReason::kSplitAtStart));
  CHECK(ChoosePlacement(kColocated, ForcedAt(1), fleet)->reason == PlacementReason::kForced);
  CHECK(ChoosePlacement(kColocated, ForcedAt(28), fleet)->reason == PlacementReason::kForced);
  CHECK(ChoosePlacement(kColocated, ForcedAt(29), fleet) ==
        Whole("a", 20, PlacementReason::kSplitAtEnd));
}

TEST(OneInstanceRunsEverythingWhole) {
  for (const Options& options : {kDisaggregated, Fixed(0.5)}) {
    CHECK(ChoosePlacement(options, ForcedAt(4), Fleet({7})) ==
          Whole("a", 20, PlacementReason::kSingleInstance));
  }
}

TEST(ARequestThatMayNotBeCutRunsWhole) {
  RequestSpec request = ForcedAt(4);
  request.may_cut = false;
  CHECK(ChoosePlacement(Fixed(0.5), request, Fleet({1, 0})) ==
        Whole("b", 20, PlacementReason::kNotCuttable));
}

TEST(OneTokenCannotBeCut) {
  CHECK(ChoosePlacement(Fixed(0.5), Request(1, 1, 1), Fleet({0, 0})) ==
        Whole("a", 1, PlacementReason::kPromptTooShort));
}

TEST(AnExpectationAboveTheLimitCountsAsTheLimit) {
  CHECK(ChoosePlacement(kColocated, Request(10, 5, 100), Fleet({0}))->alpha.end_token == 14);
}

}  // namespace

RUN_TESTS()
