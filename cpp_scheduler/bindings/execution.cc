// Python names for the execution predictor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <utility>
#include <vector>

#include "dynaserve/execution_predictor.h"
#include "values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynaserve {
namespace {

void BindRequests(nb::module_& m) {
  nb::class_<VirtualRequest> request(m, "VirtualRequest",
                                     "One micro-request as an instance sees it: prefill in chunks, "
                                     "then one decode token a step.");
  request
      .def(nb::init<std::uint64_t, std::int64_t, std::int64_t, std::int64_t, double, bool>(),
           nb::kw_only(), "key"_a, "context_tokens"_a = 0, "prefill_tokens"_a = 0,
           "decode_tokens"_a = 0, "ready_ms"_a = 0.0, "is_beta"_a = false)
      .def_ro("key", &VirtualRequest::key)
      .def_ro("context_tokens", &VirtualRequest::context_tokens)
      .def_ro("prefill_tokens", &VirtualRequest::prefill_tokens)
      .def_ro("decode_tokens", &VirtualRequest::decode_tokens)
      .def_ro("ready_ms", &VirtualRequest::ready_ms)
      .def_ro("is_beta", &VirtualRequest::is_beta);
  AsValue(request, "key", "context_tokens", "prefill_tokens", "decode_tokens", "ready_ms",
          "is_beta");

  const InstanceLimits usual;
  nb::class_<InstanceLimits> limits(m, "InstanceLimits", "What an instance may run at once.");
  limits
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, double, double>(),
           nb::kw_only(), "max_requests"_a = usual.max_requests,
           "max_step_tokens"_a = usual.max_step_tokens,
           "min_prefill_tokens"_a = usual.min_prefill_tokens, "kv_tokens"_a = usual.kv_tokens,
           "step_ms"_a = usual.step_ms, "admit_ms"_a = usual.admit_ms)
      .def_ro("max_requests", &InstanceLimits::max_requests)
      .def_ro("max_step_tokens", &InstanceLimits::max_step_tokens)
      .def_ro("min_prefill_tokens", &InstanceLimits::min_prefill_tokens)
      .def_ro("kv_tokens", &InstanceLimits::kv_tokens)
      .def_ro("step_ms", &InstanceLimits::step_ms)
      .def_ro("admit_ms", &InstanceLimits::admit_ms);
  AsValue(limits, "max_requests", "max_step_tokens", "min_prefill_tokens", "kv_tokens", "step_ms",
          "admit_ms");

  nb::class_<Forecast> forecast(m, "Forecast",
                                "What becomes of a micro-request; absolute milliseconds, infinity "
                                "for what was not simulated.");
  forecast.def_ro("start_ms", &Forecast::start_ms)
      .def_ro("prefill_end_ms", &Forecast::prefill_end_ms)
      .def_ro("end_ms", &Forecast::end_ms)
      .def_ro("last_prefill_tokens", &Forecast::last_prefill_tokens)
      .def_ro("first_prefill_end_ms", &Forecast::first_prefill_end_ms);
  AsValue(forecast, "start_ms", "prefill_end_ms", "end_ms", "last_prefill_tokens",
          "first_prefill_end_ms");

  nb::enum_<Horizon>(m, "Horizon", "How far a prediction goes.")
      .value("prefill_end", Horizon::kPrefillEnd)
      .value("end", Horizon::kEnd);
}

}  // namespace

void BindExecution(nb::module_& m) {
  BindRequests(m);
  nb::class_<ExecutionPredictor>(m, "ExecutionPredictor",
                                 "The virtual batches that one instance is going to run.  Times "
                                 "never go back.  Not thread-safe.")
      .def(nb::init<const ProfileTable&, const InstanceLimits&>(), "table"_a, "limits"_a,
           nb::keep_alive<1, 2>(), "ValueError: a limit is out of range.")
      .def("predict", &ExecutionPredictor::Predict, "newcomer"_a, "now_ms"_a,
           "horizon"_a = Horizon::kEnd,
           "What would become of a request that came now.\nValueError: it has no tokens, or a "
           "negative count.")
      .def("add", &ExecutionPredictor::Add, "request"_a, "now_ms"_a,
           "Adds a request to the waiting ones.\nValueError: as `predict`.")
      .def("remove", &ExecutionPredictor::Remove, "key"_a, "now_ms"_a,
           "Takes a request out; False: it is not there (any more).")
      .def(
          "replace",
          [](ExecutionPredictor& predictor, const std::vector<VirtualRequest>& running,
             const std::vector<VirtualRequest>& waiting,
             double now_ms) { predictor.Replace(running, waiting, now_ms); },
          "running"_a, "waiting"_a, "now_ms"_a,
          "Replaces what was predicted by what is.\nValueError: as `predict`; nothing changes.")
      .def("set_cost_scale", &ExecutionPredictor::SetCostScale, "cost_scale"_a, "now_ms"_a,
           "Every later latency is the table's times this.\nValueError: it is not positive.")
      .def_prop_ro("cost_scale", &ExecutionPredictor::cost_scale)
      .def("prefill_free_ms", &ExecutionPredictor::PrefillFreeMs, "now_ms"_a,
           "When the first prefill token of a request that came now could be computed.")
      .def("prefill_tokens", &ExecutionPredictor::PrefillTokens, "now_ms"_a,
           "before"_a = nb::none(), "enough"_a = std::numeric_limits<std::int64_t>::max(),
           "Prefill tokens that are admitted or wait, before those of the request of that key; "
           "counts no further than to `enough`.")
      .def("find", &ExecutionPredictor::Find, "key"_a, "now_ms"_a,
           "A request as it stands now; None: it is not there (any more).")
      .def("predict_rest", &ExecutionPredictor::PredictRest, "key"_a, "now_ms"_a,
           "What would become of it from now on if nothing else came; None: it is not there (any "
           "more).")
      .def("change", &ExecutionPredictor::Change, "changed"_a, "now_ms"_a,
           "Gives the request of that key other work, in its place; a beta that is ready later "
           "waits again.  False: it is not there, or decodes already and is to compute prefill.\n"
           "ValueError: as `predict`.")
      .def("predict_change", &ExecutionPredictor::PredictChange, "changed"_a, "now_ms"_a,
           "horizon"_a = Horizon::kEnd,
           "What would become of it then; None where `change` returns False.")
      .def(
          "play_out",
          [](ExecutionPredictor& predictor, double now_ms) {
            std::vector<std::pair<std::uint64_t, Forecast>> ended;
            predictor.PlayOut(now_ms, [&](std::uint64_t key, const Forecast& forecast) {
              ended.emplace_back(key, forecast);
            });
            return ended;
          },
          "now_ms"_a, "Plays everything to its end: (key, forecast) of each, as they end.");
}

}  // namespace dynaserve
