// What the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/operators.h>

namespace dynaserve {

// A value is compared, hashed and shown by its fields, as a frozen dataclass is.
template <typename Value, typename... Names>
void AsValue(nanobind::class_<Value>& cls, Names... names) {
  namespace nb = nanobind;
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

void BindExecution(nanobind::module_& m);
void BindSimulator(nanobind::module_& m);
void BindSearch(nanobind::module_& m);

}  // namespace dynaserve
