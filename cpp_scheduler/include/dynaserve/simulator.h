// A discrete-event simulation of a fleet on a virtual clock, over the core that serves: placements
// by Scheduler, batches by batch_rule.h, latencies by a ProfileTable.
//
// What is not modelled: transfer bandwidth (KV arrives `hand_off_ms` after alpha's end, whatever
// its size), prefix caches, and the front-end's own time.  The latency of a step is the table's
// times a log-normal factor.
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
  std::int64_t expected_output_tokens = 0;
};

struct SimulationOptions {
  std::int64_t instances = 1;
  bool round_robin =
      false;  // whole requests in turn, as a plain balancer does; `placement` is unused
  Options placement;
  EngineOptions engine;
  double hand_off_ms = 2.0;
  double step_sigma = 0.0;  // of the logarithm of a step's latency
  double tbt_slo_ms = std::numeric_limits<double>::infinity();  // what a late gap is
  std::uint64_t seed = 1;
};

// Times are absolute.  split_token 0: ran whole.
struct SimulatedOutcome {
  double first_token_ms = 0.0;
  double end_ms = 0.0;
  double longest_gap_ms = 0.0;
  std::int64_t late_gaps = 0;
  std::int64_t split_token = 0;
};

struct SimulationResult {
  std::vector<SimulatedOutcome> outcomes;  // by request
  std::vector<InstanceUse> uses;           // by instance
  std::vector<std::int64_t> gap_counts;    // by bin, see GapBinMs()
  double end_ms = 0.0;
};

// Bin i holds the gaps between tokens in [GapBinMs(i), GapBinMs(i + 1)): 0.5 % wide.
double GapBinMs(std::size_t bin);

// Plays all requests, which are in order of arrival, to their end.
// Throws std::invalid_argument, naming the field, for options or requests that cannot be.
SimulationResult Simulate(const ProfileTable& table, std::span<const SimulatedRequest> requests,
                          const SimulationOptions& options);

}  // namespace dynaserve
