// The simulator: cases worked out by hand, conservation, and a step-by-step oracle.
#include "dynaserve/simulator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace dynaserve {
namespace {

// One for all instances.
std::vector<ProfileTable> One(ProfileTable table) { return {std::move(table)}; }

// Every step takes overhead_ms and token_ms a token.
ProfileTable Linear(double overhead_ms, double token_ms) {
  return ProfileTable(Roofline{overhead_ms, token_ms, 1.0, 0.0, 0.0, 0.0});
}

SimulationOptions Fleet(std::int64_t instances, Policy policy) {
  SimulationOptions options;
  options.instances = instances;
  options.placement.policy = policy;
  return options;
}

bool Near(double value, double expected) { return std::abs(value - expected) < 1e-6; }

std::int64_t Sum(const std::vector<std::int64_t>& values) {
  std::int64_t sum = 0;
  for (const std::int64_t value : values) sum += value;
  return sum;
}

TEST(TwoRequestsOnOneInstanceTakeTheStepsThatWereWorkedOutByHand) {
  // Steps of 10 ms and 0.1 ms a token; at most 100 tokens in a step.
  SimulationOptions options = Fleet(1, Policy::kColocated);
  options.engine.max_step_tokens = 100;
  const std::vector<SimulatedRequest> requests = {{0.0, 150, 3, 3}, {5.0, 60, 2, 2}};
  const SimulationResult result = Simulate(One(Linear(10.0, 0.1)), requests, options);
  // 0-20: 100 of A.  20-40: 50 of A (its first token at 40) and 50 of B.
  // 40-51.1: A's second token and B's last 10 tokens (B's first token).  51.1-61.3: both end.
  CHECK(Near(result.outcomes[0].first_token_ms, 40.0));
  CHECK(Near(result.outcomes[1].first_token_ms, 51.1));
  CHECK(Near(result.outcomes[0].end_ms, 61.3));
  CHECK(Near(result.outcomes[1].end_ms, 61.3));
  CHECK(Near(result.outcomes[0].longest_gap_ms, 11.1));
  CHECK(result.uses[0].steps == 4);
}

TEST(TwoCutRequestsFollowTheirKv) {
  // Both prefill on the first instance and decode on the second; a token of KV takes 0.5 ms.
  SimulationOptions options = Fleet(2, Policy::kDisaggregated);
  options.kv_token_ms = 0.5;
  options.hand_off_ms = 1.0;
  const std::vector<SimulatedRequest> requests = {{0.0, 80, 3, 3}, {0.0, 40, 3, 3}};
  const SimulationResult result = Simulate(One(Linear(10.0, 0.0)), requests, options);
  // A's prefill ends at 10, B's at 20 (it came while A's step ran).  The link is busy with A's KV
  // until 50, with B's until 70.  A decodes at 51 and 61, B at 71 and 81.
  CHECK(Near(result.outcomes[0].first_token_ms, 10.0));
  CHECK(Near(result.outcomes[1].first_token_ms, 20.0));
  CHECK(Near(result.outcomes[0].hand_off_wait_ms, 40.0));
  CHECK(Near(result.outcomes[1].hand_off_wait_ms, 50.0));
  CHECK(Near(result.outcomes[0].end_ms, 71.0));
  CHECK(Near(result.outcomes[1].end_ms, 91.0));
  CHECK(result.outcomes[0].split_token == 80 && result.outcomes[1].split_token == 40);
}

// One instance, round robin, fixed chunks, memory without end: the simplest program that can be
// right.
struct Naive {
  double ends_ms = 0.0;
  double first_ms = 0.0;
  std::int64_t computed = 0;
  std::int64_t emitted = 0;
};

std::vector<Naive> PlayNaively(const std::vector<SimulatedRequest>& requests, std::int64_t chunk,
                               std::int64_t seats, double overhead_ms, double token_ms) {
  std::vector<Naive> states(requests.size());
  std::deque<std::size_t> waiting;
  std::vector<std::size_t> running;
  double now_ms = 0.0;
  std::size_t next = 0;
  while (next < requests.size() || !waiting.empty() || !running.empty()) {
    if (waiting.empty() && running.empty()) now_ms = std::max(now_ms, requests[next].arrival_ms);
    while (next < requests.size() && requests[next].arrival_ms <= now_ms) waiting.push_back(next++);
    std::vector<std::int64_t> share(requests.size(), 0);
    std::int64_t total = 0;
    for (const std::size_t i : running) {
      if (states[i].computed >= requests[i].prompt_tokens) share[i] = 1;
      total += share[i];
    }
    std::int64_t left = chunk - total;
    const auto fill = [&](std::size_t i) {
      share[i] = std::min(left, requests[i].prompt_tokens - states[i].computed);
      left -= share[i];
      total += share[i];
    };
    for (const std::size_t i : running) {
      if (share[i] == 0 && left > 0) fill(i);
    }
    while (!waiting.empty() && left > 0 && static_cast<std::int64_t>(running.size()) < seats) {
      running.push_back(waiting.front());
      waiting.pop_front();
      fill(running.back());
    }
    now_ms += overhead_ms + token_ms * static_cast<double>(total);
    std::vector<std::size_t> stay;
    for (const std::size_t i : running) {
      Naive& state = states[i];
      state.computed += share[i];
      if (share[i] > 0 && state.computed >= requests[i].prompt_tokens) {
        if (++state.emitted == 1) state.first_ms = now_ms;
      }
      if (state.emitted == requests[i].output_tokens) {
        state.ends_ms = now_ms;
      } else {
        stay.push_back(i);
      }
    }
    running = stay;
  }
  return states;
}

TEST(RandomRunsAreThoseOfANaiveProgram) {
  std::mt19937 random(1);
  const auto draw = [&](int least, int most) {
    return least + static_cast<int>(random() % static_cast<unsigned>(most - least + 1));
  };
  for (int round = 0; round < 200; ++round) {
    SimulationOptions options = Fleet(1, Policy::kColocated);
    options.round_robin = true;
    options.engine.max_running = draw(1, 12);
    // Decodes always find room in a step, as they do on real instances.
    options.engine.max_step_tokens = draw(static_cast<int>(options.engine.max_running), 120);
    std::vector<SimulatedRequest> requests;
    double at_ms = 0.0;
    for (int i = 0; i < 30; ++i) {
      at_ms += draw(0, 60) + 0.25;  // never at the very end of a step
      const int output = draw(1, 25);
      requests.push_back({at_ms, draw(1, 300), output, output});
    }
    const double overhead_ms = draw(1, 20), token_ms = 0.125 * draw(0, 4);
    const SimulationResult result = Simulate(One(Linear(overhead_ms, token_ms)), requests, options);
    const std::vector<Naive> expected =
        PlayNaively(requests, options.engine.max_step_tokens, options.engine.max_running,
                    overhead_ms, token_ms);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CHECK(Near(result.outcomes[i].first_token_ms, expected[i].first_ms));
      CHECK(Near(result.outcomes[i].end_ms, expected[i].ends_ms));
    }
  }
}

TEST(EveryTokenIsComputedOnceUnderEveryPolicy) {
  std::mt19937 random(2);
  for (const Policy policy : {Policy::kColocated, Policy::kDisaggregated, Policy::kFixed,
                              Policy::kDynamic, Policy::kPaper, Policy::kExhaustive}) {
    for (int round = 0; round < 10; ++round) {
      SimulationOptions options = Fleet(1 + round % 4, policy);
      options.placement.ratio = 0.7;
      options.kv_token_ms = round % 3 == 0 ? 0.0 : 0.3;
      options.engine.batching = Batching::kSlo;
      options.engine.slo_ms = 60.0;
      options.engine.max_step_tokens = 128;
      std::vector<SimulatedRequest> requests;
      double tokens = 0.0;
      std::int64_t gaps = 0;
      for (int i = 0; i < 40; ++i) {
        const auto prompt = 1 + static_cast<std::int64_t>(random() % 300);
        const auto output = 1 + static_cast<std::int64_t>(random() % 40);
        // What is expected is wrong more often than not.
        requests.push_back(
            {20.0 * i, prompt, output, 1 + static_cast<std::int64_t>(random() % 40)});
        tokens += static_cast<double>(prompt + output - 1);
        gaps += output - 1;
      }
      const SimulationResult result = Simulate(One(Linear(5.0, 0.2)), requests, options);
      double computed = 0.0;
      for (const InstanceUse& use : result.uses) computed += use.tokens;
      CHECK(computed == tokens);
      CHECK(Sum(result.gap_counts) == gaps);
    }
  }
}

TEST(StepsAreShortWhileAnAnswerIsAboutToCome) {
  const ProfileTable table = Linear(10.0, 0.1);
  EngineOptions engine;
  engine.batching = Batching::kSlo;
  engine.slo_ms = 50.0;
  SimulatedInstance instance(table, engine);
  instance.Add({0, false, 2000, 0, 2000, 2010, 0.0, false});
  std::vector<StepResult> results;
  const auto step = [&](double now_ms) {
    const double step_ms = instance.BeginStep(now_ms);
    instance.EndStep(now_ms + step_ms, step_ms, results);
    return step_ms;
  };
  instance.Expect(1, 100, 0.0);
  instance.Expect(2, 200, 0.0);
  const double short_ms = step(0.0);  // the one that comes has a step of 10.1 ms left
  CHECK(short_ms > 35.0 && short_ms <= 39.9);
  instance.ExpectNoMore(2);
  CHECK(Near(step(100.0), short_ms));
  instance.ExpectNoMore(1);
  CHECK(step(200.0) > 140.0);  // all that is left
}

TEST(AStepEndsInTimeForAnAnswerThatComesWhileItRuns) {
  const ProfileTable table = Linear(10.0, 0.1);
  EngineOptions engine;
  engine.batching = Batching::kSlo;
  engine.slo_ms = 50.0;
  SimulatedInstance instance(table, engine);
  instance.Add({0, false, 2000, 0, 2000, 2010, 0.0, false});
  instance.Expect(1, 100, 300.0);
  instance.Expect(1, 100, 60.0);  // the last that was told counts
  const double step_ms = instance.BeginStep(0.0);
  CHECK(step_ms > 90.0 && step_ms <= 99.9);
}

TEST(APromptAloneGoesOnThoughAnAnswerIsAboutToCome) {
  // A step takes 10 ms at least, and 4.9 are left.
  const ProfileTable table = Linear(10.0, 0.1);
  EngineOptions options;
  options.batching = Batching::kSlo;
  options.slo_ms = 15.0;
  options.min_prefill_tokens = 0;
  SimulatedInstance instance(table, options);
  instance.Add({.request = 0, .prompt = 100, .known = 100, .end = 100});
  instance.Expect(1, 100, 0.0);
  CHECK(Near(instance.BeginStep(0.0), 10.1));
  CHECK(instance.use().preemptions == 0);
}

TEST(APromptThatRunsLosesItsKvBeforeADecodeThatCameLater) {
  EngineOptions options;
  options.max_step_tokens = 10;
  options.kv_tokens = 115;
  const ProfileTable table = Linear(10.0, 0.0);
  SimulatedInstance instance(table, options);
  instance.Add({0, false, 100, 0, 100, 100, 0.0, false});
  std::vector<StepResult> results;
  double now_ms = 0.0;
  while (instance.use().preemptions == 0) {
    const double step_ms = instance.BeginStep(now_ms);
    now_ms += step_ms;
    instance.EndStep(now_ms, step_ms, results);
    if (instance.use().steps == 1) instance.Add({1, true, 20, 20, 21, 60, now_ms, false});
    CHECK(instance.use().steps < 20);
  }
  CHECK(instance.running().size() == 1 && instance.running().front().request == 1);
  CHECK(instance.waiting().size() == 1 && instance.waiting().front().computed == 0);
}

TEST(WhatComesWithItsKvRunsFirstAndDecodesBeforeIt) {
  const ProfileTable table = Linear(10.0, 0.1);
  SimulatedInstance instance(table, EngineOptions{});
  instance.Add({0, false, 100, 0, 100, 110, 0.0, false});
  instance.Add({1, true, 100, 50, 100, 110, 0.0, false});
  instance.Add({2, true, 100, 100, 101, 110, 0.0, false});
  instance.Add({3, true, 100, 60, 100, 110, 0.0, false});
  std::vector<std::uint32_t> order;
  for (const SimulatedSequence& sequence : instance.waiting()) order.push_back(sequence.request);
  CHECK(order == std::vector<std::uint32_t>({2, 1, 3, 0}));
}

TEST(EachInstanceMayHaveATableOfItsOwn) {
  const std::vector<SimulatedRequest> requests = {{0.0, 100, 1, 1}, {0.0, 100, 1, 1}};
  const std::vector<ProfileTable> tables = {Linear(5.0, 0.1), Linear(5.0, 0.4)};
  const SimulationResult result = Simulate(tables, requests, Fleet(2, Policy::kColocated));
  CHECK(Near(result.outcomes[0].end_ms, 15.0));
  CHECK(Near(result.outcomes[1].end_ms, 45.0));
  const std::string said =
      THROWN(std::invalid_argument, Simulate(tables, requests, Fleet(3, Policy::kColocated)));
  CHECK(said == "2 tables for 3 instances; there must be one, or one of each");
}

TEST(ATableByWhichStepsTakeNoTimeIsRefused) {
  const std::vector<SimulatedRequest> requests = {{0.0, 10, 1, 1}};
  const auto refusal = [&](const Roofline& roofline) {
    return THROWN(std::invalid_argument,
                  Simulate(One(ProfileTable(roofline)), requests, Fleet(1, Policy::kColocated)));
  };
  CHECK(refusal({0.0, 0.0, 1.0, 0.0, 1.0, 0.0}) ==
        "by this table one token of prefill takes no time; every step does");
  CHECK(refusal({0.0, 0.0, 1.0, 1.0, 0.0, 0.0}) ==
        "by this table one decode takes no time; every step does");
}

TEST(AStrideOfNothingIsRefused) {
  SimulationOptions options = Fleet(2, Policy::kExhaustive);
  options.placement.stride_tokens = 0;
  const std::vector<SimulatedRequest> requests = {{0.0, 10, 1, 1}};
  const std::string said =
      THROWN(std::invalid_argument, Simulate(One(Linear(1.0, 0.1)), requests, options));
  CHECK(said == "stride_tokens is 0; it must be at least 1");
}

}  // namespace
}  // namespace dynaserve

RUN_TESTS()
