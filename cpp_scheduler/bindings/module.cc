// Python names for the core: nothing is decided here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "dynaserve/admission_margin.h"
#include "dynaserve/batch_rule.h"
#include "dynaserve/cost_model.h"
#include "dynaserve/profile_table.h"
#include "dynaserve/scheduler.h"
#include "dynaserve/types.h"
#include "values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynaserve {

namespace {

// Hashable, as the values that hold them are.
template <typename Value>
nb::typed<nb::tuple, Value, nb::ellipsis> Tuple(const std::vector<Value>& values) {
  nb::list list;
  for (const Value& value : values) list.append(value);
  return nb::borrow<nb::typed<nb::tuple, Value, nb::ellipsis>>(nb::tuple(list));
}

void BindEnums(nb::module_& m) {
  nb::enum_<PlacementReason>(m, "PlacementReason", "Why a request was cut, or runs whole.")
      .value("forced", PlacementReason::kForced)
      .value("policy", PlacementReason::kPolicy)
      .value("colocated", PlacementReason::kColocated)
      .value("single_instance", PlacementReason::kSingleInstance)
      .value("not_cuttable", PlacementReason::kNotCuttable)
      .value("split_at_start", PlacementReason::kSplitAtStart)
      .value("split_at_end", PlacementReason::kSplitAtEnd)
      .value("prompt_too_short", PlacementReason::kPromptTooShort)
      .value("whole_is_best", PlacementReason::kWholeIsBest)
      .value("levels_prefill", PlacementReason::kLevelsPrefill)
      .value("gathers_decodes", PlacementReason::kGathersDecodes)
      .value("balanced", PlacementReason::kBalanced)
      .value("whole_only", PlacementReason::kWholeOnly);
  nb::enum_<RevisionReason>(m, "RevisionReason", "Why a hand-off was changed on the way.")
      .value("alone_is_better", RevisionReason::kAloneIsBetter)
      .value("later_is_better", RevisionReason::kLaterIsBetter)
      .value("earlier_is_better", RevisionReason::kEarlierIsBetter)
      .value("gathers_decodes", RevisionReason::kGathersDecodes);
  nb::enum_<Policy>(m, "Policy", "How requests are cut when nothing forces a cut.")
      .value("colocated", Policy::kColocated)
      .value("disaggregated", Policy::kDisaggregated)
      .value("fixed", Policy::kFixed)
      .value("dynamic", Policy::kDynamic)
      .value("paper", Policy::kPaper)
      .value("exhaustive", Policy::kExhaustive);
  m.def("predicts", &Predicts, "policy"_a, "Whether the policy goes by a latency profile.");
}

void BindValues(nb::module_& m) {
  nb::class_<InstanceState> instance(m, "InstanceState", "What an instance reports about itself.");
  instance
      .def(nb::init<InstanceId, bool, InstanceLimits, bool>(), "instance_id"_a,
           "accepts_new"_a = true, "limits"_a = InstanceLimits{}, "whole_only"_a = false)
      .def_ro("instance_id", &InstanceState::instance_id)
      .def_ro("accepts_new", &InstanceState::accepts_new)
      .def_ro("limits", &InstanceState::limits)
      .def_ro("whole_only", &InstanceState::whole_only);
  AsValue(instance, "instance_id", "accepts_new", "limits", "whole_only");

  nb::class_<Slo> slo(m, "Slo", "Service-level objectives of a request; infinity: none.");
  slo.def(nb::init<double, double>(), nb::kw_only(), "ttft_ms"_a = Slo{}.ttft_ms,
          "tbt_ms"_a = Slo{}.tbt_ms)
      .def_ro("ttft_ms", &Slo::ttft_ms)
      .def_ro("tbt_ms", &Slo::tbt_ms);
  AsValue(slo, "ttft_ms", "tbt_ms");

  nb::class_<CachedPrefix> cached(m, "CachedPrefix",
                                  "What an instance's prefix cache has of a prompt.");
  cached.def(nb::init<InstanceId, std::int64_t>(), "instance_id"_a, "tokens"_a)
      .def_ro("instance_id", &CachedPrefix::instance_id)
      .def_ro("tokens", &CachedPrefix::tokens);
  AsValue(cached, "instance_id", "tokens");

  nb::class_<RequestSpec> request(m, "RequestSpec", "What the scheduler knows about a request.");
  request
      .def(nb::init<std::string, std::int64_t, std::int64_t, std::int64_t,
                    std::optional<std::int64_t>, bool, std::int64_t, Slo, std::vector<CachedPrefix>,
                    bool>(),
           nb::kw_only(), "request_id"_a, "prompt_tokens"_a, "max_output_tokens"_a,
           "expected_output_tokens"_a, "forced_split"_a = nb::none(), "may_cut"_a = true,
           "likely_output_tokens"_a = 0, "slo"_a = Slo{}, "cached"_a = std::vector<CachedPrefix>{},
           "fits_whole_only"_a = false)
      .def_ro("request_id", &RequestSpec::request_id)
      .def_ro("prompt_tokens", &RequestSpec::prompt_tokens)
      .def_ro("max_output_tokens", &RequestSpec::max_output_tokens)
      .def_ro("expected_output_tokens", &RequestSpec::expected_output_tokens)
      .def_ro("forced_split", &RequestSpec::forced_split)
      .def_ro("may_cut", &RequestSpec::may_cut)
      .def_ro("likely_output_tokens", &RequestSpec::likely_output_tokens)
      .def_ro("slo", &RequestSpec::slo)
      .def_prop_ro("cached", [](const RequestSpec& spec) { return Tuple(spec.cached); })
      .def_ro("fits_whole_only", &RequestSpec::fits_whole_only);
  AsValue(request, "request_id", "prompt_tokens", "max_output_tokens", "expected_output_tokens",
          "forced_split", "may_cut", "likely_output_tokens", "slo", "cached", "fits_whole_only");

  nb::class_<MicroRequest> part(m, "MicroRequest",
                                "One instance's part: the tokens [start_token, end_token).");
  part.def(nb::init<InstanceId, std::int64_t, std::int64_t>(), "instance_id"_a, "start_token"_a,
           "end_token"_a)
      .def_ro("instance_id", &MicroRequest::instance_id)
      .def_ro("start_token", &MicroRequest::start_token)
      .def_ro("end_token", &MicroRequest::end_token);
  AsValue(part, "instance_id", "start_token", "end_token");

  nb::class_<Candidate> candidate(m, "Candidate",
                                  "A placement that was predicted exactly; whole if beta is None.");
  candidate.def_ro("alpha", &Candidate::alpha)
      .def_ro("beta", &Candidate::beta)
      .def_ro("split_token", &Candidate::split_token)
      .def_ro("ttft_ms", &Candidate::ttft_ms)
      .def_ro("objective_ms", &Candidate::objective_ms);
  AsValue(candidate, "alpha", "beta", "split_token", "ttft_ms", "objective_ms");

  nb::class_<Prediction> prediction(m, "Prediction",
                                    "What a policy that predicts expected of its choice; "
                                    "milliseconds, from the decision on.");
  prediction.def_ro("ttft_ms", &Prediction::ttft_ms)
      .def_ro("hand_off_ms", &Prediction::hand_off_ms)
      .def_ro("decode_step_ms", &Prediction::decode_step_ms)
      .def_ro("objective_ms", &Prediction::objective_ms)
      .def_ro("whole_objective_ms", &Prediction::whole_objective_ms)
      .def_ro("probes", &Prediction::probes)
      .def_ro("gathering", &Prediction::gathering)
      .def_prop_ro(
          "candidates", [](const Prediction& p) { return Tuple(p.candidates); },
          "What was tried, in that order.");
  AsValue(prediction, "ttft_ms", "hand_off_ms", "decode_step_ms", "objective_ms",
          "whole_objective_ms", "probes", "gathering", "candidates");

  nb::class_<Placement> placement(m, "Placement",
                                  "Which instances run a request; whole if beta is None.");
  placement
      .def(nb::init<MicroRequest, std::optional<MicroRequest>, PlacementReason,
                    std::optional<Prediction>>(),
           "alpha"_a, "beta"_a.none(), "reason"_a, "prediction"_a = nb::none())
      .def_ro("alpha", &Placement::alpha)
      .def_ro("beta", &Placement::beta)
      .def_ro("reason", &Placement::reason)
      .def_ro("prediction", &Placement::prediction)
      .def_prop_ro("split_token", &Placement::split_token,
                   "The end of alpha; the cut if there is a beta.")
      .def_prop_ro("end_token", &Placement::end_token,
                   "Up to where the request is expected to be computed.");
  AsValue(placement, "alpha", "beta", "reason", "prediction");

  const Options usual;
  nb::class_<Options> options(m, "Options", "The policy, and what only some policies read.");
  options
      .def(nb::init<Policy, double, std::int64_t, double, double, double, double,
                    std::optional<std::int64_t>, std::int64_t>(),
           "policy"_a, "ratio"_a = usual.ratio, nb::kw_only(),
           "prefill_instances"_a = usual.prefill_instances, "hand_off_ms"_a = usual.hand_off_ms,
           "kv_token_ms"_a = usual.kv_token_ms, "kv_token_work_ms"_a = usual.kv_token_work_ms,
           "tolerance_ms"_a = usual.tolerance_ms, "gathering"_a = usual.gathering,
           "stride_tokens"_a = usual.stride_tokens)
      .def_ro("policy", &Options::policy)
      .def_ro("ratio", &Options::ratio)
      .def_ro("prefill_instances", &Options::prefill_instances)
      .def_ro("hand_off_ms", &Options::hand_off_ms)
      .def_ro("kv_token_ms", &Options::kv_token_ms)
      .def_ro("kv_token_work_ms", &Options::kv_token_work_ms)
      .def_ro("tolerance_ms", &Options::tolerance_ms)
      .def_ro("gathering", &Options::gathering)
      .def_ro("stride_tokens", &Options::stride_tokens);
  AsValue(options, "policy", "ratio", "prefill_instances", "hand_off_ms", "kv_token_ms",
          "kv_token_work_ms", "tolerance_ms", "gathering", "stride_tokens");

  nb::class_<Progress> progress(m, "Progress",
                                "How far a request is on an instance, as far as the caller knows.");
  progress
      .def(nb::init<std::string, std::int64_t, std::int64_t, bool>(), nb::kw_only(), "request_id"_a,
           "computed_tokens"_a, "expected_output_tokens"_a, "begun"_a = true)
      .def_ro("request_id", &Progress::request_id)
      .def_ro("computed_tokens", &Progress::computed_tokens)
      .def_ro("expected_output_tokens", &Progress::expected_output_tokens)
      .def_ro("begun", &Progress::begun, "False: it waits for its first step.");
  AsValue(progress, "request_id", "computed_tokens", "expected_output_tokens", "begun");

  nb::class_<OtherRequest> other(m, "OtherRequest",
                                 "A micro-request that another front-end has on an instance: it "
                                 "computes [computed_tokens, end_token).");
  other
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, bool>(), nb::kw_only(),
           "computed_tokens"_a, "prompt_tokens"_a, "end_token"_a, "waits"_a = false)
      .def_ro("computed_tokens", &OtherRequest::computed_tokens)
      .def_ro("prompt_tokens", &OtherRequest::prompt_tokens)
      .def_ro("end_token", &OtherRequest::end_token)
      .def_ro("waits", &OtherRequest::waits, "For the KV of its first half.");
  AsValue(other, "computed_tokens", "prompt_tokens", "end_token", "waits");
}

void BindScheduler(nb::module_& m) {
  nb::class_<Scheduler>(
      m, "Scheduler",
      "Decides which instance computes which tokens of a request.  Not thread-safe.")
      .def(nb::init<const Options&, const ProfileTable*>(), "options"_a,
           "table"_a.none() = nb::none(),
           "table: copied; a policy that predicts does as colocated until it has one.\nValueError: "
           "the ratio is outside [0, 1], or another number is negative or not finite.")
      .def(
          "observe", &Scheduler::Observe, "instance"_a,
          "Adds the instance, or replaces what was known about it.\nValueError: impossible limits.")
      .def("learn", &Scheduler::Learn, "table"_a, "now_ms"_a,
           "Policies that predict do so by this table from now on.")
      .def("remove", &Scheduler::Remove, "instance_id"_a,
           "Forgets the instance; its requests stay reserved until `finish`.")
      .def("place", &Scheduler::Place, "request"_a, "now_ms"_a = 0.0,
           "Chooses instances and cut and reserves their tokens; None: no instance accepts new "
           "work.\nValueError: the request is already placed, or a token count is out of range.")
      .def("finish", &Scheduler::Finish, "request_id"_a, "now_ms"_a = 0.0,
           "Releases what `place` reserved; unknown ids are ignored.")
      .def("learn_length", &Scheduler::LearnLength, "output_tokens"_a, "expected_tokens"_a,
           "An answer has ended by itself or at its limit; expected_tokens: what would be expected "
           "of it now.\nValueError: a number is not in [1, 2^40].")
      .def(
          "report",
          [](Scheduler& scheduler, const InstanceId& instance_id,
             const std::vector<Progress>& progress,
             double now_ms) { scheduler.Report(instance_id, progress, now_ms); },
          "instance_id"_a, "progress"_a, "now_ms"_a,
          "Actual progress on an instance replaces the predicted.")
      .def(
          "report_others",
          [](Scheduler& scheduler, const InstanceId& instance_id,
             const std::vector<OtherRequest>& others,
             double now_ms) { scheduler.ReportOthers(instance_id, others, now_ms); },
          "instance_id"_a, "others"_a, "now_ms"_a,
          "All that other front-ends have on the instance now.\nValueError: a token count is "
          "negative or above 2^40.")
      .def("predict_end_ms", &Scheduler::PredictEndMs, "request_id"_a, "now_ms"_a,
           "When a placed request would end if others came as they did lately; None under policies "
           "that do not predict, or where it should have ended.")
      .def("predict_hand_off_ms", &Scheduler::PredictHandOffMs, "request_id"_a, "now_ms"_a,
           "When the alpha of a placed request would reach its cut, as instances are now; None "
           "under policies that do not predict, or where it is not cut.")
      .def("revise", &Scheduler::Revise, "request_id"_a, "now_ms"_a,
           "Whether the hand-off of a request should come elsewhere, or not at all, or one that "
           "decodes whole be cut, and enters it; None: it stays.")
      .def("recut", &Scheduler::Recut, "request_id"_a, "split_token"_a.none(), "now_ms"_a,
           "The caller has moved the hand-off, or lifted it (None): it is not revised any more.\n"
           "ValueError: the token is out of range.")
      .def("cut_whole", &Scheduler::CutWhole, "request_id"_a, "beta"_a, "split_token"_a, "now_ms"_a,
           "The caller cuts a request that runs whole.\nValueError: the token is out of range.")
      .def("parked", &Scheduler::Parked, "request_id"_a, "computed_tokens"_a, "now_ms"_a,
           "The alpha stands at its hand-off point.\nValueError: the token is out of range.")
      .def("observe_step", &Scheduler::ObserveStep, "instance_id"_a, "shape"_a, "measured_ms"_a,
           "now_ms"_a,
           "A measured step moves the instance's cost scale.\nValueError: it has no tokens, or a "
           "time that is not positive.")
      .def("set_kv_token_ms", &Scheduler::SetKvTokenMs, "kv_token_ms"_a, nb::kw_only(), "work_ms"_a,
           "What it takes to move the KV of a token, as transfers told, and of the steps of either "
           "instance.\nValueError: one is negative or not finite.")
      .def("cost_scale", &Scheduler::CostScale, "instance_id"_a,
           "Latency of the instance's steps over the table's, as observed steps tell.")
      .def("reserved_tokens", &Scheduler::ReservedTokens, "instance_id"_a,
           "Tokens of the unfinished micro-requests on the instance.")
      .def("check_invariants", &Scheduler::CheckInvariants,
           "RuntimeError: a reservation is negative, orphaned or counted twice.");
}

void BindCostModel(nb::module_& m) {
  nb::class_<BatchShape> shape(m, "BatchShape",
                               "What one engine step computes; `prefill_pairs` sums "
                               "`prefill_pairs(tokens, context_tokens)` over its prefills.");
  shape
      .def(nb::init<std::int64_t, double, std::int64_t, std::int64_t>(), nb::kw_only(),
           "prefill_tokens"_a = 0, "prefill_pairs"_a = 0.0, "decodes"_a = 0,
           "decode_context_tokens"_a = 0)
      .def_ro("prefill_tokens", &BatchShape::prefill_tokens)
      .def_ro("prefill_pairs", &BatchShape::prefill_pairs)
      .def_ro("decodes", &BatchShape::decodes)
      .def_ro("decode_context_tokens", &BatchShape::decode_context_tokens)
      .def_prop_ro("tokens", &BatchShape::tokens);
  AsValue(shape, "prefill_tokens", "prefill_pairs", "decodes", "decode_context_tokens");

  nb::class_<StepSample> sample(m, "StepSample", "A measured engine step.");
  sample.def(nb::init<BatchShape, double>(), "shape"_a, "measured_ms"_a)
      .def_ro("shape", &StepSample::shape)
      .def_ro("measured_ms", &StepSample::measured_ms);

  nb::class_<Roofline> roofline(m, "Roofline",
                                "Latency of a step in five terms; non-decreasing in all of them.");
  roofline
      .def(nb::init<double, double, double, double, double, double>(), nb::kw_only(),
           "overhead_ms"_a, "token_ms"_a, "knee_tokens"_a, "pair_ms"_a, "decode_ms"_a,
           "context_ms"_a)
      .def_ro("overhead_ms", &Roofline::overhead_ms)
      .def_ro("token_ms", &Roofline::token_ms)
      .def_ro("knee_tokens", &Roofline::knee_tokens)
      .def_ro("pair_ms", &Roofline::pair_ms)
      .def_ro("decode_ms", &Roofline::decode_ms)
      .def_ro("context_ms", &Roofline::context_ms)
      .def("step_ms", nb::overload_cast<const BatchShape&>(&Roofline::StepMs, nb::const_),
           "shape"_a);
  AsValue(roofline, "overhead_ms", "token_ms", "knee_tokens", "pair_ms", "decode_ms", "context_ms");

  m.def("prefill_pairs", &PrefillPairs, "tokens"_a, "context_tokens"_a,
        "Pairs of (new token, token it attends to) of one prefill.");
  m.def(
      "fit_roofline", [](const std::vector<StepSample>& samples) { return FitRoofline(samples); },
      "samples"_a,
      "The roofline of least mean squared relative error.\nValueError: no sample, or one without "
      "tokens or with a time that is not positive.");
}

void BindProfileTable(nb::module_& m) {
  nb::class_<ProfileBin> bin(m, "ProfileBin", "What one bin of a profile table has learnt.");
  bin.def(nb::init<std::uint32_t, double, double>(), "index"_a, "log_ratio"_a, "weight"_a)
      .def_ro("index", &ProfileBin::index)
      .def_ro("log_ratio", &ProfileBin::log_ratio)
      .def_ro("weight", &ProfileBin::weight);
  AsValue(bin, "index", "log_ratio", "weight");

  nb::class_<ProfileTable>(m, "ProfileTable",
                           "Predicts the latency of engine steps and learns from measured ones.  "
                           "Not thread-safe.")
      .def(nb::init<const Roofline&>(), "roofline"_a,
           "ValueError: a coefficient is negative or not finite, or the knee is below 1.")
      .def(
          "step_ms", &ProfileTable::StepMs, "shape"_a,
          "Predicted latency; it never falls when tokens, pairs, decodes or the mean context grow.")
      .def("observe", &ProfileTable::Observe, "shape"_a, "measured_ms"_a,
           "Learns from a step.\nValueError: it has no tokens, or a time that is not positive.")
      .def("bins", &ProfileTable::Bins, "The bins that have learnt something, by index.")
      .def(
          "worst_contradiction",
          [](const ProfileTable& table) {
            const Contradiction worst = table.WorstContradiction();
            return std::pair(worst.index, worst.factor);
          },
          "(index of the bin that others contradict most, factor between it and what is read "
          "there).")
      .def(
          "restore",
          [](ProfileTable& table, const std::vector<ProfileBin>& bins, double log_scale,
             double sigma) { table.Restore(bins, log_scale, sigma); },
          "bins"_a, "log_scale"_a, "sigma"_a,
          "Replaces what was learnt.\nValueError: an index is out of range or order, a number is "
          "not finite, or a weight or sigma is negative.")
      .def_prop_ro("roofline", &ProfileTable::roofline)
      .def_prop_ro("log_scale", &ProfileTable::log_scale)
      .def_prop_ro("sigma", &ProfileTable::sigma,
                   "Standard deviation of log(measured / predicted) over recent steps.")
      .def_prop_ro("observed", &ProfileTable::observed);
  m.def(
      "profile_axes",
      [] {
        return std::vector<std::vector<double>>{{kTokenBins.begin(), kTokenBins.end()},
                                                {kDecodeBins.begin(), kDecodeBins.end()},
                                                {kContextBins.begin(), kContextBins.end()}};
      },
      "Where a table has its bins: tokens of a step, decodes, mean context of a decode.");
}

void BindBatchRule(nb::module_& m) {
  nb::enum_<BudgetReason>(m, "BudgetReason", "What kept a prefill budget from being larger.")
      .value("all_work", BudgetReason::kAllWork)
      .value("max_tokens", BudgetReason::kMaxTokens)
      .value("step_limit", BudgetReason::kStepLimit)
      .value("efficiency", BudgetReason::kEfficiency)
      .value("minimum_share", BudgetReason::kMinimumShare);

  nb::class_<PrefillWork> work(m, "PrefillWork", "A prompt, or the rest of one, that waits.");
  work.def(nb::init<std::int64_t, std::int64_t>(), "tokens"_a, "context_tokens"_a = 0)
      .def_ro("tokens", &PrefillWork::tokens)
      .def_ro("context_tokens", &PrefillWork::context_tokens);
  AsValue(work, "tokens", "context_tokens");

  nb::class_<BatchLimits> limits(m, "BatchLimits", "What one step may not exceed.");
  limits
      .def(nb::init<double, std::int64_t, std::int64_t>(), nb::kw_only(), "step_ms"_a,
           "max_tokens"_a, "min_prefill_tokens"_a = 0)
      .def_ro("step_ms", &BatchLimits::step_ms)
      .def_ro("max_tokens", &BatchLimits::max_tokens)
      .def_ro("min_prefill_tokens", &BatchLimits::min_prefill_tokens);
  AsValue(limits, "step_ms", "max_tokens", "min_prefill_tokens");

  nb::class_<PrefillBudget> budget(m, "PrefillBudget", "Prefill tokens of the next step, and why.");
  budget.def_ro("tokens", &PrefillBudget::tokens)
      .def_ro("step_ms", &PrefillBudget::step_ms)
      .def_ro("reason", &PrefillBudget::reason)
      .def_ro("within", &PrefillBudget::within);
  AsValue(budget, "tokens", "step_ms", "reason", "within");

  m.def(
      "shape_with",
      [](const BatchShape& decodes, const std::vector<PrefillWork>& waiting,
         std::int64_t prefill_tokens) { return ShapeWith(decodes, waiting, prefill_tokens); },
      "decodes"_a, "waiting"_a, "prefill_tokens"_a,
      "The step that computes this much of the waiting work, in order, beside the decodes.");
  m.def(
      "choose_budget",
      [](const ProfileTable& table, const BatchShape& decodes,
         const std::vector<PrefillWork>& waiting,
         const BatchLimits& limits) { return ChooseBudget(table, decodes, waiting, limits); },
      "table"_a, "decodes"_a, "waiting"_a, "limits"_a,
      "The prefill budget within the limits that costs least per token.\nValueError: a limit is "
      "negative, or waiting work has no tokens.");
  nb::class_<AdmissionMargin>(m, "AdmissionMargin",
                              "How far within the TBT SLO a step of decodes alone has to stay, by "
                              "prediction, for one more of them to begin; follows what is late.")
      .def(nb::init<>())
      .def("observe", &AdmissionMargin::Observe, "gaps"_a, "late"_a, "left"_a,
           "gaps: between tokens, that ended with a step; late: of these; left: decodes that will "
           "have no more of them here.\nValueError: not 0 <= late <= gaps, or left is negative.")
      .def("share", &AdmissionMargin::Share, "sigma"_a,
           "Of the SLO.  sigma: of the logarithm of measured over predicted latency.")
      .def_prop_ro("sigmas", &AdmissionMargin::sigmas)
      .def_ro_static("MOST_SIGMAS", &AdmissionMargin::kMostSigmas)
      .def_ro_static("LEAST_SIGMAS", &AdmissionMargin::kLeastSigmas);
  m.def("leaves_room_for_decode", &LeavesRoomForDecode, "table"_a, "decodes"_a, "context_tokens"_a,
        "step_ms"_a,
        "Whether the decodes and one more of this context stay within the limit, by themselves.");
}

}  // namespace
}  // namespace dynaserve

NB_MODULE(_core, m) {
  // Values that live until the interpreter exits are normal (module constants), not leaks.
  nb::set_leak_warnings(false);
  m.doc() = "The C++ scheduler core; import it through `dynaserve.global_scheduler`.";
  dynaserve::BindCostModel(m);
  dynaserve::BindProfileTable(m);
  dynaserve::BindBatchRule(m);
  dynaserve::BindExecution(m);
  dynaserve::BindEnums(m);
  dynaserve::BindValues(m);
  dynaserve::BindScheduler(m);
  dynaserve::BindSearch(m);
  dynaserve::BindSimulator(m);
}
