#include "dynaserve/live_fleet.h"

#include <cstdlib>
#include <new>
#include <random>
#include <set>

#include "check.h"
#include "dynaserve/scheduler.h"

using namespace dynaserve;

namespace {

std::size_t allocations = 0;

}  // namespace

void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

const Roofline kA100{12.0, 0.105, 160.0, 1.1e-6, 0.05, 1.3e-4};

TEST(PredictionsAllocateNothingOnceWarm) {
  const ProfileTable table(kA100);
  InstanceLimits limits;
  limits.step_ms = 50.0;
  ExecutionPredictor first(table, limits), second(table, limits);
  for (std::uint64_t key = 0; key < 100; ++key) {
    first.Add({key, 200, 0, 300 + static_cast<std::int64_t>(key), 0.0}, 0.0);
    second.Add({key, 0, 400, 100, 0.0}, 0.0);
  }
  const std::vector<SearchInstance> instances = {{&first, false, 0, 0}, {&second, true, 0, 0}};
  SplitSearch search;
  SearchOptions options;
  options.lost_share = 0.2;
  options.prefill_pressure = 1.0;
  SearchRequest request{3000, 200, 300, true, {}};
  const auto prompt = [](int number) { return 500 + 200 * number; };
  for (int warm = 0; warm < 10; ++warm) {
    request.prompt_tokens = prompt(warm);
    search.Find(instances, request, options, 1.0);
  }
  const std::size_t before = allocations;
  for (int again = 0; again < 10; ++again) {
    request.prompt_tokens = prompt(again);
    CHECK(search.Find(instances, request, options, 1.0 + again).objective_ms > 0.0);
  }
  CHECK(allocations == before);
}

TEST(SecondThoughtsAllocateNothingOnceWarm) {
  const ProfileTable table(kA100);
  ExecutionPredictor first(table, {}), second(table, {});
  first.Add({0, 0, 3000, 0, 0.0}, 0.0);
  second.Add({1, 3000, 1000, 100, 900.0}, 0.0);
  for (std::uint64_t key = 2; key < 50; ++key) second.Add({key, 0, 500, 200, 0.0}, 0.0);
  const PendingHandOff pending{{&first, false, 0, 0}, {&second, false, 0, 0}, 0, 1, 3000, 0.0};
  const SearchRequest request{4000, 101, 200, true, {}};
  SplitSearch search;
  CHECK(ReviseHandOff(search, pending, request, {}, {}, 0.0));
  const std::size_t before = allocations;
  for (int again = 0; again < 10; ++again) {
    CHECK(ReviseHandOff(search, pending, request, {}, {}, 0.0));
  }
  CHECK(allocations == before);
}

// Under the sanitizers: whatever is called, promises are kept and every cut is legal.
TEST(RandomCallsKeepTheBooks) {
  for (const Policy policy : {Policy::kDynamic, Policy::kPaper}) {
    std::mt19937 rng(11);
    const auto draw = [&rng](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    const ProfileTable table(kA100);
    Options options;
    options.policy = policy;
    Scheduler scheduler(options, &table);
    std::set<std::string> live;
    double now_ms = 0.0;
    for (int step = 0; step < 1500; ++step) {
      now_ms += draw(300);
      const std::string instance(1, static_cast<char>('a' + draw(4)));
      const std::string id = std::to_string(draw(60));
      const int action = draw(25);
      if (action < 3) {
        InstanceState state{instance, draw(5) > 0, {}};
        state.limits.step_ms = 40.0 + draw(2) * 50.0;
        state.limits.kv_tokens = 60'000;
        scheduler.Observe(state);
      } else if (action == 3) {
        scheduler.Remove(instance);
      } else if (action == 4) {
        const BatchShape shape{draw(500), 0.0, 1 + draw(20), draw(10'000)};
        scheduler.ObserveStep(instance, shape, 1.0 + draw(200), now_ms);
      } else if (action < 8) {
        std::vector<Progress> progress;
        for (const std::string& request : live)
          progress.push_back({request, draw(4000), draw(500), draw(3) > 0});
        scheduler.Report(instance, progress, now_ms);
      } else if (action < 15 && !live.contains(id)) {
        RequestSpec request{id, draw(4000), 1 + draw(400), 1 + draw(400), {}, draw(8) > 0, 0, {}};
        const auto placement = scheduler.Place(request, now_ms);
        if (!placement) continue;
        live.insert(id);
        CHECK(placement->beta.has_value() == IsCut(placement->reason));
        if (!placement->beta) continue;
        CHECK(placement->beta->instance_id != placement->alpha.instance_id);
        CHECK(placement->split_token() > 0);
        CHECK(placement->beta->tokens() > 0);
      } else if (action < 17) {
        const auto revision = scheduler.Revise(id, now_ms);
        CHECK(!revision || revision->objective_ms < revision->kept_objective_ms);
      } else if (action == 17) {
        std::optional<std::int64_t> split;
        if (draw(3) > 0) split = draw(5000);
        scheduler.Recut(id, split, now_ms);
      } else if (action == 18) {
        scheduler.Parked(id, draw(5000), now_ms);
      } else if (action == 19) {
        std::vector<OtherRequest> others;
        for (int n = draw(5); n > 0; --n)
          others.push_back({draw(4000), draw(4000), draw(4000), draw(2) > 0});
        scheduler.ReportOthers(instance, others, now_ms);
      } else {
        scheduler.Finish(id, now_ms);
        live.erase(id);
      }
      scheduler.CheckInvariants();
    }
  }
}

}  // namespace

RUN_TESTS()
