// Tests without a framework: TEST(Name) { CHECK(...); } and one RUN_TESTS() per file.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace check {

using Test = std::pair<const char*, void (*)()>;

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, void (*body)()) { Tests().emplace_back(name, body); }
};

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  std::exit(1);
}

inline int RunAll() {
  for (const auto& [name, body] : Tests()) {
    std::printf("%s\n", name);
    std::fflush(stdout);  // the name of a test that aborts must be seen
    body();
  }
  return Tests().empty() ? 1 : 0;
}

// Runs `body`; returns the message of the `Error` it throws.
template <typename Error, typename Body>
std::string MessageOf(const char* file, int line, Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  Fail(file, line, "nothing was thrown");
}

}  // namespace check

#define TEST(name)                                             \
  static void name();                                          \
  static const check::Registration name##_entry(#name, &name); \
  static void name()
#define CHECK(condition) \
  ((condition) ? static_cast<void>(0) : check::Fail(__FILE__, __LINE__, #condition))
#define THROWN(Error, expression) \
  check::MessageOf<Error>(__FILE__, __LINE__, [&] { static_cast<void>(expression); })
#define RUN_TESTS() \
  int main() { return check::RunAll(); }
