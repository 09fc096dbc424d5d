// Python names for the simulator: nothing is decided here.
#include "dynaserve/simulator.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynaserve {

void BindSimulator(nb::module_& m) {
  nb::enum_<Batching>(m, "Batching", "How a simulated instance forms its steps.")
      .value("fixed_chunk", Batching::kFixedChunk)
      .value("slo", Batching::kSlo);

  nb::class_<EngineOptions>(m, "EngineOptions", "A simulated instance.")
      .def(nb::init<Batching, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double,
                    double>(),
           nb::kw_only(), "batching"_a, "max_step_tokens"_a, "max_running"_a, "kv_tokens"_a,
           "min_prefill_tokens"_a, "slo_ms"_a, "margin"_a);

  nb::class_<SimulatedRequest>(m, "SimulatedRequest", "A request of a simulation.")
      .def(nb::init<double, std::int64_t, std::int64_t, std::int64_t>(), "arrival_ms"_a,
           "prompt_tokens"_a, "output_tokens"_a, "expected_output_tokens"_a);

  const SimulationOptions usual;
  nb::class_<SimulationOptions>(m, "SimulationOptions", "A simulated fleet.")
      .def(
          nb::init<std::int64_t, bool, Options, EngineOptions, double, double, double, std::int64_t,
                   bool, double, bool, double, double, double, double, double, std::uint64_t>(),
          nb::kw_only(), "instances"_a, "round_robin"_a, "placement"_a, "engine"_a, "hand_off_ms"_a,
          "kv_token_ms"_a = usual.kv_token_ms, "kv_token_work_ms"_a = usual.kv_token_work_ms,
          "kv_block_tokens"_a = usual.kv_block_tokens, "streams_kv"_a = usual.streams_kv,
          "report_every_ms"_a = usual.report_every_ms, "revises"_a = usual.revises, "step_sigma"_a,
          "drift_sigma"_a = usual.drift_sigma, "drift_ms"_a = usual.drift_ms, "tbt_slo_ms"_a,
          "ttft_slo_ms"_a = usual.ttft_slo_ms, "seed"_a);

  nb::class_<SimulatedOutcome>(m, "SimulatedOutcome", "What became of a request; absolute times.")
      .def_ro("first_token_ms", &SimulatedOutcome::first_token_ms)
      .def_ro("end_ms", &SimulatedOutcome::end_ms)
      .def_ro("longest_gap_ms", &SimulatedOutcome::longest_gap_ms)
      .def_ro("late_gaps", &SimulatedOutcome::late_gaps)
      .def_ro("split_token", &SimulatedOutcome::split_token)
      .def_ro("hand_off_wait_ms", &SimulatedOutcome::hand_off_wait_ms);

  nb::class_<InstanceUse>(m, "InstanceUse", "What an instance did in all.")
      .def_ro("steps", &InstanceUse::steps)
      .def_ro("busy_ms", &InstanceUse::busy_ms)
      .def_ro("tokens", &InstanceUse::tokens)
      .def_ro("attention_pairs", &InstanceUse::attention_pairs)
      .def_ro("kv_token_ms", &InstanceUse::kv_token_ms)
      .def_ro("most_kv_tokens", &InstanceUse::most_kv_tokens)
      .def_ro("preemptions", &InstanceUse::preemptions);

  nb::class_<SimulationResult>(m, "SimulationResult", "By request, by instance, by bin of gaps.")
      .def_ro("outcomes", &SimulationResult::outcomes)
      .def_ro("uses", &SimulationResult::uses)
      .def_ro("gap_counts", &SimulationResult::gap_counts)
      .def_ro("moved", &SimulationResult::moved, "Hand-offs, after their placement.")
      .def_ro("lifted", &SimulationResult::lifted)
      .def_ro("cut_late", &SimulationResult::cut_late, "Requests that had been placed whole.")
      .def_ro("end_ms", &SimulationResult::end_ms);

  m.def("gap_bin_ms", &GapBinMs, "bin"_a, "The lower end of a bin of gap_counts.");
  m.def(
      "simulate",
      [](const std::vector<ProfileTable>& tables, const std::vector<SimulatedRequest>& requests,
         const SimulationOptions& options) {  // tables of its own: reading one writes into it
        const nb::gil_scoped_release unlocked;
        return Simulate(tables, requests, options);
      },
      "tables"_a, "requests"_a, "options"_a,
      "Plays all requests, in order of arrival, to their end.\ntables: of each instance, or one "
      "for "
      "all.\nValueError: tables, options or requests that cannot be.");
}

}  // namespace dynaserve
