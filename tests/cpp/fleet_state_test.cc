#include "dynaserve/fleet_state.h"

#include <stdexcept>

#include "check.h"

using namespace dynaserve;

namespace {

Placement Whole(const char* instance, std::int64_t tokens) {
  return {{instance, 0, tokens}, std::nullopt, PlacementReason::kColocated};
}

FleetState FleetOfTwo() {
  FleetState fleet;
  fleet.Observe({"b", true});
  fleet.Observe({"a", true});
  return fleet;
}

TEST(AcceptingIsInOrderOfIdAndSkipsDrainingInstances) {
  FleetState fleet = FleetOfTwo();
  fleet.Observe({"c", false});
  const std::vector<InstanceLoad> expected{{"a", 0, 0}, {"b", 0, 0}};
  CHECK(fleet.Accepting() == expected);
  fleet.Observe({"a", false});
  CHECK(fleet.Accepting().size() == 1);
}

TEST(ReserveCountsBothPartsAndReleaseReturnsThem) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", {{"a", 0, 4}, MicroRequest{"b", 4, 10}, PlacementReason::kPolicy});
  CHECK(fleet.IsReserved("r"));
  CHECK(fleet.ReservedTokens("a") == 4);
  CHECK(fleet.ReservedTokens("b") == 6);
  fleet.CheckInvariants();
  fleet.Release("r");
  CHECK(!fleet.IsReserved("r"));
  CHECK(fleet.ReservedTokens("a") == 0);
  CHECK(fleet.ReservedTokens("b") == 0);
  fleet.CheckInvariants();
}

TEST(NothingIsSplitToAnInstanceThatHasLeft) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", Whole("a", 10));
  fleet.Reserve("stays", Whole("b", 3));
  fleet.Remove("b");
  fleet.Split("r", "b", 4);
  CHECK(fleet.ReservedTokens("a") == 10);
  CHECK(fleet.ReservedTokens("b") == 3);
  fleet.CheckInvariants();
}

TEST(WhatOthersHaveReservedCountsUntilItIsSetAnew) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", Whole("a", 4));
  fleet.SetOthers("a", 6);
  fleet.SetOthers("never seen", 6);
  CHECK(fleet.ReservedTokens("a") == 10);
  CHECK(fleet.Accepting().front().reserved_tokens == 10);
  fleet.CheckInvariants();
  fleet.SetOthers("a", 1);
  CHECK(fleet.ReservedTokens("a") == 5);
  fleet.Remove("a");
  CHECK(fleet.ReservedTokens("a") == 4);
  fleet.SetOthers("a", 6);
  fleet.Release("r");
  fleet.Observe({"a", true});
  CHECK(fleet.ReservedTokens("a") == 0);
  fleet.CheckInvariants();
}

TEST(ReleaseIgnoresUnknownRequests) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", Whole("a", 4));
  fleet.Release("r");
  fleet.Release("r");
  fleet.Release("never seen");
  fleet.CheckInvariants();
}

TEST(ARemovedInstanceKeepsItsReservationsUntilTheyAreReleased) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", Whole("a", 4));
  fleet.Remove("a");
  CHECK(fleet.Accepting().size() == 1);
  CHECK(fleet.ReservedTokens("a") == 4);
  fleet.CheckInvariants();
  fleet.Release("r");
  CHECK(fleet.ReservedTokens("a") == 0);
  fleet.CheckInvariants();
}

TEST(AnInstanceThatComesBackStillCountsItsReservations) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", Whole("a", 4));
  fleet.Remove("a");
  fleet.Observe({"a", true});
  CHECK(fleet.Accepting().front() == (InstanceLoad{"a", 4, 0}));
  fleet.Release("r");
  CHECK(fleet.Accepting().front() == (InstanceLoad{"a", 0, 0}));
  fleet.CheckInvariants();
}

TEST(AReservationOfNoTokensIsStillReleased) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", Whole("a", 0));
  fleet.Remove("a");
  fleet.CheckInvariants();
  fleet.Release("r");
  fleet.CheckInvariants();
}

TEST(RemoveIgnoresUnknownInstances) {
  FleetState fleet = FleetOfTwo();
  fleet.Remove("z");
  CHECK(fleet.Accepting().size() == 2);
}

TEST(AnOverdrawnReservationIsReported) {
  FleetState fleet = FleetOfTwo();
  fleet.Reserve("r", {{"a", 4, 0}, std::nullopt, PlacementReason::kColocated});
  CHECK(THROWN(std::logic_error, fleet.CheckInvariants()) == "request \"r\" reserves -4 tokens");
}

}  // namespace

RUN_TESTS()
