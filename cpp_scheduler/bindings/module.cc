// Python names for the core: nothing is decided here.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "dynaserve/scheduler.h"
#include "dynaserve/types.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynaserve {
namespace {

// A value is compared, hashed and shown by its fields, as a frozen dataclass is.
template <typename Value, typename... Names>
void AsValue(nb::class_<Value>& cls, Names... names) {
  cls.def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"));
  cls.def("__hash__",
          [names...](nb::handle self) { return nb::hash(nb::make_tuple(self.attr(names)...)); });
  cls.def("__repr__", [names...](nb::handle self) {
    nb::list fields;
    (fields.append(nb::str("{}={!r}").format(names, self.attr(names))), ...);
    return nb::str("{}({})").format(self.type().attr("__name__"),
                                    nb::str(", ").attr("join")(fields));
  });
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
      .value("prompt_too_short", PlacementReason::kPromptTooShort);
  nb::enum_<Policy>(m, "Policy", "How requests are cut when nothing forces a cut.")
      .value("colocated", Policy::kColocated)
      .value("disaggregated", Policy::kDisaggregated)
      .value("fixed", Policy::kFixed);
}

void BindValues(nb::module_& m) {
  nb::class_<InstanceState> instance(m, "InstanceState", "What an instance reports about itself.");
  instance.def(nb::init<InstanceId, bool>(), "instance_id"_a, "accepts_new"_a = true)
      .def_ro("instance_id", &InstanceState::instance_id)
      .def_ro("accepts_new", &InstanceState::accepts_new);
  AsValue(instance, "instance_id", "accepts_new");

  nb::class_<RequestSpec> request(m, "RequestSpec", "What the scheduler knows about a request.");
  request
      .def(nb::init<std::string, std::int64_t, std::int64_t, std::int64_t,
                    std::optional<std::int64_t>, bool>(),
           nb::kw_only(), "request_id"_a, "prompt_tokens"_a, "max_output_tokens"_a,
           "expected_output_tokens"_a, "forced_split"_a = nb::none(), "may_cut"_a = true)
      .def_ro("request_id", &RequestSpec::request_id)
      .def_ro("prompt_tokens", &RequestSpec::prompt_tokens)
      .def_ro("max_output_tokens", &RequestSpec::max_output_tokens)
      .def_ro("expected_output_tokens", &RequestSpec::expected_output_tokens)
      .def_ro("forced_split", &RequestSpec::forced_split)
      .def_ro("may_cut", &RequestSpec::may_cut);
  AsValue(request, "request_id", "prompt_tokens", "max_output_tokens", "expected_output_tokens",
          "forced_split", "may_cut");

  nb::class_<MicroRequest> part(m, "MicroRequest",
                                "One instance's part: the tokens [start_token, end_token).");
  part.def(nb::init<InstanceId, std::int64_t, std::int64_t>(), "instance_id"_a, "start_token"_a,
           "end_token"_a)
      .def_ro("instance_id", &MicroRequest::instance_id)
      .def_ro("start_token", &MicroRequest::start_token)
      .def_ro("end_token", &MicroRequest::end_token);
  AsValue(part, "instance_id", "start_token", "end_token");

  nb::class_<Placement> placement(m, "Placement",
                                  "Which instances run a request; whole if beta is None.");
  placement
      .def(nb::init<MicroRequest, std::optional<MicroRequest>, PlacementReason>(), "alpha"_a,
           "beta"_a.none(), "reason"_a)
      .def_ro("alpha", &Placement::alpha)
      .def_ro("beta", &Placement::beta)
      .def_ro("reason", &Placement::reason)
      .def_prop_ro("split_token", &Placement::split_token,
                   "The end of alpha; the cut if there is a beta.");
  AsValue(placement, "alpha", "beta", "reason");

  nb::class_<Options> options(m, "Options", "The policy; `ratio` is read by `fixed` only.");
  options.def(nb::init<Policy, double>(), "policy"_a, "ratio"_a = Options{}.ratio)
      .def_ro("policy", &Options::policy)
      .def_ro("ratio", &Options::ratio);
  AsValue(options, "policy", "ratio");
}

void BindScheduler(nb::module_& m) {
  nb::class_<Scheduler>(
      m, "Scheduler",
      "Decides which instance computes which tokens of a request.  Not thread-safe.")
      .def(nb::init<const Options&>(), "options"_a, "ValueError: the ratio is outside [0, 1].")
      .def("observe", &Scheduler::Observe, "instance"_a,
           "Adds the instance, or replaces what was known about it.")
      .def("remove", &Scheduler::Remove, "instance_id"_a,
           "Forgets the instance; its requests stay reserved until `finish`.")
      .def("place", &Scheduler::Place, "request"_a,
           "Chooses instances and cut and reserves their tokens; None: no instance accepts new "
           "work.\nValueError: the request is already placed, or a token count is out of range.")
      .def("finish", &Scheduler::Finish, "request_id"_a,
           "Releases what `place` reserved; unknown ids are ignored.")
      .def("reserved_tokens", &Scheduler::ReservedTokens, "instance_id"_a,
           "Tokens of the unfinished micro-requests on the instance.")
      .def("check_invariants", &Scheduler::CheckInvariants,
           "RuntimeError: a reservation is negative, orphaned or counted twice.");
}

}  // namespace
}  // namespace dynaserve

NB_MODULE(_core, m) {
  // Values that live until the interpreter exits are normal (module constants), not leaks.
  nb::set_leak_warnings(false);
  m.doc() = "The C++ scheduler core; import it through `dynaserve.global_scheduler`.";
  dynaserve::BindEnums(m);
  dynaserve::BindValues(m);
  dynaserve::BindScheduler(m);
}
