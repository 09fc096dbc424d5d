// Python names for the fleet plan and the search of one placement.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <string>
#include <vector>

#include "dynaserve/fleet_planner.h"
#include "dynaserve/hand_off_revision.h"
#include "dynaserve/paper_search.h"
#include "dynaserve/split_search.h"
#include "values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynaserve {
namespace {

void CheckIndex(const std::vector<SearchInstance>& instances, std::size_t index) {
  if (index < instances.size()) return;
  const std::string told =
      "instance " + std::to_string(index) + " of " + std::to_string(instances.size());
  throw nb::index_error(told.c_str());
}

void BindPlanner(nb::module_& m) {
  nb::class_<FleetDemand>(
      m, "FleetDemand",
      "What the fleet has to do now: decodes that run on average; prompt and output "
      "tokens that arrive per millisecond, the latter with its standard error, and the mean "
      "context of a decode of these; how long the KV of a token takes to move; and what a step "
      "of those that gather now costs over one of the fleet, in (0, 1].")
      .def(
          "__init__",
          [](FleetDemand* self, std::int64_t instances, double decodes, double mean_context_tokens,
             std::int64_t prompt_tokens, double prefill_rate, double output_rate,
             double output_rate_error, double answer_context_tokens, double kv_token_ms,
             double gathering_cost) {
            if (!(gathering_cost > 0.0 && gathering_cost <= 1.0)) {
              throw std::invalid_argument("gathering_cost is " + std::to_string(gathering_cost) +
                                          "; it must be in (0, 1]");
            }
            new (self) FleetDemand{.instances = instances,
                                   .decodes = decodes,
                                   .mean_context_tokens = mean_context_tokens,
                                   .prompt_tokens = prompt_tokens,
                                   .prefill_rate = prefill_rate,
                                   .output_rate = output_rate,
                                   .output_rate_error = output_rate_error,
                                   .answer_context_tokens = answer_context_tokens,
                                   .kv_token_ms = kv_token_ms,
                                   .gathering_cost = gathering_cost};
          },
          nb::kw_only(), "instances"_a, "decodes"_a, "mean_context_tokens"_a, "prompt_tokens"_a,
          "prefill_rate"_a = 0.0, "output_rate"_a = 0.0, "output_rate_error"_a = 0.0,
          "answer_context_tokens"_a = 0.0, "kv_token_ms"_a = 0.0, "gathering_cost"_a = 1.0);
  nb::class_<FleetPlan> plan(m, "FleetPlan",
                             "How many instances gather the decodes (0: none in particular), and "
                             "the prefill rate of the fleet, in tokens per millisecond.");
  plan.def_ro("gathering", &FleetPlan::gathering)
      .def_ro("is_short_of_room", &FleetPlan::is_short_of_room)
      .def_ro("is_short_of_steps", &FleetPlan::is_short_of_steps)
      .def_ro("prefill_rate", &FleetPlan::prefill_rate)
      .def_ro("colocated_rate", &FleetPlan::colocated_rate)
      .def_ro("lost_share", &FleetPlan::lost_share);
  AsValue(plan, "gathering", "is_short_of_room", "is_short_of_steps", "prefill_rate",
          "colocated_rate", "lost_share");
  m.def("prefill_rate", &PrefillRate, "table"_a, "limits"_a, "decodes"_a, "mean_context_tokens"_a,
        "prompt_tokens"_a, "Prefill tokens per millisecond of one instance beside these decodes.");
  m.def(
      "plan_fleet",
      [](const ProfileTable& table, const InstanceLimits& limits, const FleetDemand& demand,
         std::int64_t current, std::optional<std::int64_t> forced) {
        PlannerOptions options;
        options.forced = forced;
        return PlanFleet(table, limits, demand, current, options);
      },
      "table"_a, "limits"_a, "demand"_a, "current"_a, nb::kw_only(), "forced"_a = nb::none(),
      "The plan of the highest prefill rate; `current` stays among equals. forced: so many "
      "gather.");
}

void BindOutcome(nb::module_& m) {
  nb::class_<Outcome> outcome(m, "Outcome", "What a placement is predicted to do.");
  outcome
      .def(nb::init<double, double, double, double, double, double, double, double, double, double,
                    double, double, double>(),
           nb::kw_only(), "ttft_ms"_a = 0.0, "others_wait_ms"_a = 0.0, "lost_prefill_ms"_a = 0.0,
           "hand_off_ms"_a = 0.0, "gap_ms"_a = 0.0, "decode_step_ms"_a = 0.0,
           "decode_tokens"_a = 0.0, "overflow_tokens"_a = 0.0, "token_ms"_a = 0.0,
           "decodes_late_ms"_a = 0.0, "alpha_decode_step_ms"_a = 0.0, "alpha_decode_tokens"_a = 0.0,
           "alpha_decodes_late_ms"_a = 0.0)
      .def_ro("ttft_ms", &Outcome::ttft_ms)
      .def_ro("others_wait_ms", &Outcome::others_wait_ms)
      .def_ro("lost_prefill_ms", &Outcome::lost_prefill_ms)
      .def_ro("hand_off_ms", &Outcome::hand_off_ms)
      .def_ro("gap_ms", &Outcome::gap_ms)
      .def_ro("decode_step_ms", &Outcome::decode_step_ms)
      .def_ro("decode_tokens", &Outcome::decode_tokens)
      .def_ro("overflow_tokens", &Outcome::overflow_tokens)
      .def_ro("token_ms", &Outcome::token_ms)
      .def_ro("decodes_late_ms", &Outcome::decodes_late_ms)
      .def_ro("alpha_decode_step_ms", &Outcome::alpha_decode_step_ms)
      .def_ro("alpha_decode_tokens", &Outcome::alpha_decode_tokens)
      .def_ro("alpha_decodes_late_ms", &Outcome::alpha_decodes_late_ms);
  AsValue(outcome, "ttft_ms", "others_wait_ms", "lost_prefill_ms", "hand_off_ms", "gap_ms",
          "decode_step_ms", "decode_tokens", "overflow_tokens", "token_ms", "decodes_late_ms",
          "alpha_decode_step_ms", "alpha_decode_tokens", "alpha_decodes_late_ms");
  m.def("objective_ms", &ObjectiveMs, "outcome"_a, "slo"_a,
        "What a placement costs, in milliseconds: the number that the dynamic policy minimises.");
  m.def("others_wait_ms", &OthersWaitMs, "queue_ms"_a, "work_ms"_a, "arrivals_per_ms"_a,
        "What later requests wait longer for this work, in sum.");
}

}  // namespace

void BindSearch(nb::module_& m) {
  BindPlanner(m);
  BindOutcome(m);

  nb::class_<SearchInstance>(m, "SearchInstance", "One instance that accepts new work.")
      .def(
          "__init__",
          [](SearchInstance* self, ExecutionPredictor& predictor, bool keeps_free,
             std::int64_t cached_tokens, std::int64_t promised_tokens,
             std::optional<std::uint64_t> own_key) {
            new (self)
                SearchInstance{&predictor, keeps_free, cached_tokens, promised_tokens, own_key};
          },
          "predictor"_a, nb::kw_only(), "keeps_free"_a = false, "cached_tokens"_a = 0,
          "promised_tokens"_a = 0, "own_key"_a = nb::none(), nb::keep_alive<1, 2>());
  nb::class_<SearchRequest>(m, "SearchRequest", "What the search knows about a request.")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, bool, Slo>(), nb::kw_only(),
           "prompt_tokens"_a, "expected_output_tokens"_a, "likely_output_tokens"_a,
           "may_cut"_a = true, "slo"_a = Slo{})
      .def_ro("prompt_tokens", &SearchRequest::prompt_tokens)
      .def_ro("expected_output_tokens", &SearchRequest::expected_output_tokens)
      .def_ro("slo", &SearchRequest::slo);
  const SearchOptions usual;
  nb::class_<SearchOptions>(m, "SearchOptions", "What the search knows beside the instances.")
      .def(nb::init<double, double, double, double, double, std::int64_t, std::int64_t, double,
                    double, double, double, double>(),
           nb::kw_only(), "hand_off_ms"_a = usual.hand_off_ms, "kv_token_ms"_a = usual.kv_token_ms,
           "kv_token_work_ms"_a = usual.kv_token_work_ms,
           "hand_off_price_ms"_a = usual.hand_off_price_ms,
           "hand_off_price_share"_a = usual.hand_off_price_share,
           "least_part_tokens"_a = usual.least_part_tokens,
           "least_cut_prompt_tokens"_a = usual.least_cut_prompt_tokens,
           "arrivals_per_ms"_a = usual.arrivals_per_ms, "lost_share"_a = usual.lost_share,
           "prefill_pressure"_a = usual.prefill_pressure,
           "mean_context_tokens"_a = usual.mean_context_tokens,
           "level_step_ms"_a = usual.level_step_ms);
  nb::class_<Choice> choice(m, "Choice",
                            "Indices of the instances, the cut, and what it is predicted to cost.");
  choice.def_ro("alpha", &Choice::alpha)
      .def_ro("beta", &Choice::beta)
      .def_ro("split_token", &Choice::split_token)
      .def_ro("outcome", &Choice::outcome)
      .def_ro("objective_ms", &Choice::objective_ms)
      .def_ro("whole_objective_ms", &Choice::whole_objective_ms)
      .def_ro("alpha_start_ms", &Choice::alpha_start_ms)
      .def_ro("hand_off_ms", &Choice::hand_off_ms)
      .def_ro("beta_start_ms", &Choice::beta_start_ms)
      .def_ro("probes", &Choice::probes);
  AsValue(choice, "alpha", "beta", "split_token", "outcome", "objective_ms", "whole_objective_ms",
          "alpha_start_ms", "hand_off_ms", "beta_start_ms", "probes");

  using Instances = std::vector<SearchInstance>;
  nb::class_<SplitSearch>(m, "SplitSearch", "The choice for one request; reserves nothing.")
      .def(nb::init<>())
      .def(
          "find",
          [](SplitSearch& search, const Instances& instances, const SearchRequest& request,
             const SearchOptions& options, double now_ms) {
            CheckIndex(instances, 0);
            return search.Find(instances, request, options, now_ms);
          },
          "instances"_a, "request"_a, "options"_a, "now_ms"_a,
          "The lowest objective that was found, whole or cut.")
      .def(
          "try_whole",
          [](SplitSearch& search, const Instances& instances, std::size_t index,
             const SearchRequest& request, const SearchOptions& options, double now_ms) {
            CheckIndex(instances, index);
            return search.TryWhole(instances, index, request, options, now_ms);
          },
          "instances"_a, "index"_a, "request"_a, "options"_a, "now_ms"_a)
      .def(
          "try_cut",
          [](SplitSearch& search, const Instances& instances, std::size_t alpha, std::size_t beta,
             std::int64_t split_token, const SearchRequest& request, const SearchOptions& options,
             double now_ms) {
            CheckIndex(instances, alpha);
            CheckIndex(instances, beta);
            return search.TryCut(instances, alpha, beta, split_token, request, options, now_ms);
          },
          "instances"_a, "alpha"_a, "beta"_a, "split_token"_a, "request"_a, "options"_a,
          "now_ms"_a);

  nb::class_<PendingHandOff>(m, "PendingHandOff", "A hand-off that is still to come.")
      .def(nb::init<SearchInstance, SearchInstance, std::uint64_t, std::uint64_t, std::int64_t,
                    double>(),
           nb::kw_only(), "alpha"_a, "beta"_a, "alpha_key"_a, "beta_key"_a, "split_token"_a,
           "waited_ms"_a = 0.0, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  nb::class_<Revision> revision(m, "Revision",
                                "Another cut, or none (None), and what it and the old one cost.");
  revision
      .def(
          "__init__",
          [](Revision* self, std::optional<std::int64_t> split_token, RevisionReason reason,
             double objective_ms, double kept_objective_ms, double hand_off_ms, int probes,
             std::optional<InstanceId> beta) {
            new (self) Revision{split_token,       std::move(beta), reason, objective_ms,
                                kept_objective_ms, hand_off_ms,     probes};
          },
          "split_token"_a.none(), "reason"_a, nb::kw_only(), "objective_ms"_a,
          "kept_objective_ms"_a, "hand_off_ms"_a = 0.0, "probes"_a = 0, "beta"_a = nb::none())
      .def_ro("split_token", &Revision::split_token)
      .def_ro("beta", &Revision::beta, "Of a request that ran whole.")
      .def_ro("reason", &Revision::reason)
      .def_ro("objective_ms", &Revision::objective_ms)
      .def_ro("kept_objective_ms", &Revision::kept_objective_ms)
      .def_ro("hand_off_ms", &Revision::hand_off_ms)
      .def_ro("probes", &Revision::probes);
  AsValue(revision, "split_token", "beta", "reason", "objective_ms", "kept_objective_ms",
          "hand_off_ms", "probes");
  m.def(
      "revise_hand_off",
      [](SplitSearch& search, const PendingHandOff& pending, const SearchRequest& request,
         const SearchOptions& options, double now_ms, double least_gain_ms,
         double least_gain_share) {
        return ReviseHandOff(search, pending, request, options, {least_gain_ms, least_gain_share},
                             now_ms);
      },
      "search"_a, "pending"_a, "request"_a, "options"_a, "now_ms"_a,
      "least_gain_ms"_a = RevisionOptions{}.least_gain_ms,
      "least_gain_share"_a = RevisionOptions{}.least_gain_share,
      "Whether a pending hand-off should come elsewhere, or not at all; None: it stays.");
  m.def("revised_objective_ms", &RevisedObjectiveMs, "search"_a, "pending"_a,
        "split_token"_a.none(), "request"_a, "options"_a, "now_ms"_a,
        "What keeping, moving or lifting (None) a hand-off costs; infinity: it cannot be done.");

  nb::class_<BalancedSplit>(m, "BalancedSplit", "Where the paper's Algorithm 1 cuts.")
      .def_ro("split_token", &BalancedSplit::split_token)
      .def_ro("imbalance_ms", &BalancedSplit::imbalance_ms)
      .def_ro("probes", &BalancedSplit::probes);
  m.def(
      "find_balanced_split",
      [](ExecutionPredictor& alpha, ExecutionPredictor& beta, std::int64_t prompt_tokens,
         std::int64_t end_token, double tolerance_ms, double now_ms) {
        if (end_token < 1) throw nb::value_error("a request without tokens has no split");
        return FindBalancedSplit(alpha, beta, prompt_tokens, end_token, tolerance_ms, now_ms);
      },
      "alpha"_a, "beta"_a, "prompt_tokens"_a, "end_token"_a, "tolerance_ms"_a, "now_ms"_a,
      "The paper's Algorithm 1: a binary search for equal completion times.\nValueError: there is "
      "nothing to compute.");
}

}  // namespace dynaserve
