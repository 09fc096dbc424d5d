// A discrete-event simulation of a fleet on a virtual clock, over the core that serves: placements
// by Scheduler, batches by batch_rule.h, latencies by a ProfileTable.
//
// What is not modelled: prefix caches and the front-end's own time.  The latency of a step is the
// table's times a log-normal factor.
//
// Each instance has one link out and one in.  A transfer of KV holds alpha's link out and beta's
// link in, first come, first served, for as long as its tokens take; blocks that one step has
// filled leave together at its end, the last one when alpha ends.  beta is ready `hand_off_ms`
// after the later of alpha's end and the last arrival; alpha's KV stays where it is until beta
// begins, or both their instances stand still.
//
// The schedulers learn what a front-end learns: where alphas stand, and every `report_every_ms` how
// far the requests are that emit tokens, and with Batching::kSlo also measured steps and how far
// prompts are; then they may move or lift the hand-offs of alphas on that instance.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "dynaserve/profile_table.h"
#include "dynaserve/simulated_instance.h"
#include "dynaserve/types.h"

namespace dynaserve {

struct SimulatedRequest {
  double arrival_ms = 0.0;
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t expected_output_tokens = 0;  // all that policies know of the answer's length
};

struct SimulationOptions {
  std::int64_t instances = 1;
  bool round_robin =
      false;  // whole requests in turn, as a plain balancer does; `placement` is unused
  Options placement;
  EngineOptions engine;
  double hand_off_ms = 2.0;
  double kv_token_ms = 0.0;       // on a link; 0: bandwidth is no limit
  double kv_token_work_ms = 0.0;  // by which moving it lengthens the next step of both instances
  std::int64_t kv_block_tokens = 16;  // tokens that leave together
  bool streams_kv = true;             // false: all KV leaves at alpha's end
  double report_every_ms = 200.0;     // infinity: never
  bool revises = true;                // false: a hand-off stays where it was placed
  double step_sigma = 0.0;            // of the logarithm of a step's latency
  // Of the speed of an instance, whose logarithm wanders around 0 (Ornstein-Uhlenbeck) and is
  // forgotten within some drift_ms; its instance learns from its steps then, as engines do, and its
  // margin grows as their errors do.
  double drift_sigma = 0.0;
  double drift_ms = 5000.0;
  // What a late gap is, and what requests ask for; the latter also of their first tokens.
  double tbt_slo_ms = std::numeric_limits<double>::infinity();
  double ttft_slo_ms = std::numeric_limits<double>::infinity();
  std::uint64_t seed = 1;
};

// Times are absolute.  split_token 0: ran whole.
struct SimulatedOutcome {
  double first_token_ms = 0.0;
  double end_ms = 0.0;
  double longest_gap_ms = 0.0;
  std::int64_t late_gaps = 0;
  std::int64_t split_token = 0;
  double hand_off_wait_ms = 0.0;  // from alpha's end until all KV is there, without hand_off_ms
};

struct SimulationResult {
  std::vector<SimulatedOutcome> outcomes;  // by request
  std::vector<InstanceUse> uses;           // by instance
  std::vector<std::int64_t> gap_counts;    // by bin, see GapBinMs()
  std::int64_t moved = 0, lifted = 0;      // hand-offs, after their placement
  std::int64_t cut_late = 0;               // requests that had been placed whole
  double end_ms = 0.0;
};

// Bin i holds the gaps between tokens in [GapBinMs(i), GapBinMs(i + 1)): 0.5 % wide.
double GapBinMs(std::size_t bin);

// Plays all requests, which are in order of arrival, to their end.  tables: what steps take on each
// instance, by which it plans them, or one for all; the scheduler begins with the first one, and
// hears what the steps of each took.
// Throws std::invalid_argument, naming the field, for tables, options or requests that cannot be.
SimulationResult Simulate(std::span<const ProfileTable> tables,
                          std::span<const SimulatedRequest> requests,
                          const SimulationOptions& options);

}  // namespace dynaserve
