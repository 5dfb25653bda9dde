// The subset of GoogleTest that the *_gpu_test.cc files use, for machines without GoogleTest.
//
// The macros and the output lines are the same as in GoogleTest. Restrictions: only one thread at a
// time may evaluate expectations, and a fixture has at most one parameter and at most one
// INSTANTIATE_TEST_SUITE_P, which must follow its tests.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_SMALL_GTEST_GTEST_GTEST_H_
#define SLIPSTREAM_BENCHMARKS_GPU_SMALL_GTEST_GTEST_GTEST_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace testing {

template <class T>
struct TestParamInfo {
  T param;
  size_t index;
};

class Test {
 public:
  virtual ~Test() = default;
  virtual void SetUp() {}
  virtual void TearDown() {}
  virtual void TestBody() = 0;
};

template <class T>
class TestWithParam : public Test {
 public:
  using ParamType = T;
  static const T& GetParam() { return *param; }

  inline static const T* param = nullptr;  // Parameter of the running test.
};

template <class T, class... Others>
std::vector<T> Values(T first, Others... others) {
  return {first, static_cast<T>(others)...};
}

namespace internal {

enum class Outcome { kOk, kSkipped, kFailed };

struct Case {
  std::string name;
  std::function<std::unique_ptr<Test>()> make;
};

inline std::vector<Case>& Cases() {
  static std::vector<Case> cases;
  return cases;
}

inline Outcome& OutcomeNow() {
  static Outcome outcome = Outcome::kOk;
  return outcome;
}

template <class T>
bool AddTest(const std::string& name) {
  Cases().push_back({name, [] { return std::make_unique<T>(); }});
  return true;
}

// Returns the parameterized tests of a fixture, which Instantiate combines with parameters.
template <class Fixture>
std::vector<Case>& TestsOf() {
  static std::vector<Case> tests;
  return tests;
}

template <class Fixture, class T>
bool AddParamTest(const std::string& name) {
  TestsOf<Fixture>().push_back({name, [] { return std::make_unique<T>(); }});
  return true;
}

template <class Fixture, class Namer>
bool Instantiate(const std::string& suite, std::vector<typename Fixture::ParamType> values,
                 Namer name_of) {
  using Param = typename Fixture::ParamType;
  const auto kept = std::make_shared<const std::vector<Param>>(std::move(values));
  for (const Case& test : TestsOf<Fixture>()) {
    for (size_t i = 0; i < kept->size(); ++i) {
      const std::string of = name_of(TestParamInfo<Param>{(*kept)[i], i});
      Cases().push_back({suite + "." + test.name + "/" + of, [kept, i, make = test.make] {
                           Fixture::param = &(*kept)[i];
                           return make();
                         }});
    }
  }
  return true;
}
template <class Fixture>
bool Instantiate(const std::string& suite, std::vector<typename Fixture::ParamType> values) {
  return Instantiate<Fixture>(suite, std::move(values),
                              [](const auto& info) { return std::to_string(info.index); });
}

// Collects the text that is streamed into an expectation.
class Message {
 public:
  template <class T>
  Message& operator<<(const T& value) {
    text_ << value;
    return *this;
  }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

// Reports a failed or skipped expectation when a message is assigned. The assignment has the type
// void, so that ASSERT macros can expand to `return Report(...) = Message() << ...`.
class Report {
 public:
  Report(Outcome outcome, const char* file, int line, std::string what)
      : outcome_(outcome), file_(file), line_(line), what_(std::move(what)) {}
  void operator=(const Message& message) const {
    if (OutcomeNow() != Outcome::kFailed) OutcomeNow() = outcome_;
    std::cout << file_ << ":" << line_ << ": "
              << (outcome_ == Outcome::kFailed ? "Failure" : "Skipped") << "\n"
              << what_ << message.text() << std::endl;
  }

 private:
  Outcome outcome_;
  const char* file_;
  int line_;
  std::string what_;
};

template <class T, class = void>
struct IsPrinted : std::false_type {};
template <class T>
struct IsPrinted<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<T>())>>
    : std::true_type {};
template <class T, class = void>
struct IsRange : std::false_type {};
template <class T>
struct IsRange<T, std::void_t<decltype(std::declval<const T&>().begin())>> : std::true_type {};

template <class T>
void Print(std::ostream& out, const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    out.precision(17);
    out << +value;
  } else if constexpr (IsPrinted<const T&>::value) {
    out << value;
  } else if constexpr (IsRange<T>::value) {
    constexpr int kShown = 32;
    out << "{";
    int shown = 0;
    for (const auto& each : value) {
      if (shown > 0) out << ", ";
      if (shown++ == kShown) {
        out << "...";
        break;
      }
      Print(out, each);
    }
    out << "}";
  } else {
    out << sizeof(T) << " bytes";
  }
}

// Description of a failed expectation, or null if the expectation is met.
using Problem = std::unique_ptr<const std::string>;

template <class A, class B, class Compare>
Problem ProblemOf(const char* text, const A& a, const B& b, Compare compare) {
  if (compare(a, b)) return nullptr;
  std::ostringstream out;
  out << "Expected: " << text << "\n  Actual: ";
  Print(out, a);
  out << "\n     and: ";
  Print(out, b);
  out << "\n";
  return std::make_unique<const std::string>(out.str());
}

inline Problem ProblemOf(const char* text, bool is_met) {
  if (is_met) return nullptr;
  return std::make_unique<const std::string>("Expected: " + std::string(text) + "\n");
}

// Returns whether two floats differ by at most four units in the last place. NaN is never near.
inline bool AreNear(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return false;
  const auto order = [](float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return int64_t{bits} < 0 ? int64_t{INT32_MIN} - bits : int64_t{bits};
  };
  const int64_t apart = order(a) - order(b);
  return -4 <= apart && apart <= 4;
}

inline Outcome RunOne(const Case& each) {
  OutcomeNow() = Outcome::kOk;
  try {
    const std::unique_ptr<Test> test = each.make();
    test->SetUp();
    if (OutcomeNow() == Outcome::kOk) test->TestBody();
    test->TearDown();
  } catch (const std::exception& error) {
    Report(Outcome::kFailed, "unknown file", 0, error.what()) = Message();
  }
  return OutcomeNow();
}

}  // namespace internal
}  // namespace testing

// The switch and the `else` keep the macro from capturing an `else` of a surrounding `if`.
#define SMALL_GTEST_(problem, on_failure)                                                    \
  switch (0)                                                                                 \
  case 0:                                                                                    \
  default:                                                                                   \
    if (const ::testing::internal::Problem why_not = (problem); why_not == nullptr) {        \
    } else                                                                                   \
      on_failure::testing::internal::Report(::testing::internal::Outcome::kFailed, __FILE__, \
                                            __LINE__, *why_not) = ::testing::internal::Message()
#define SMALL_GTEST_COMPARE_(a, op, b, on_failure)                                                \
  SMALL_GTEST_(::testing::internal::ProblemOf(                                                    \
                   #a " " #op " " #b, a, b, [](const auto& x, const auto& y) { return x op y; }), \
               on_failure)

#define EXPECT_TRUE(condition) \
  SMALL_GTEST_(::testing::internal::ProblemOf(#condition, static_cast<bool>(condition)), )
#define EXPECT_FALSE(condition) \
  SMALL_GTEST_(::testing::internal::ProblemOf("not " #condition, !(condition)), )
#define EXPECT_EQ(a, b) SMALL_GTEST_COMPARE_(a, ==, b, )
#define EXPECT_NE(a, b) SMALL_GTEST_COMPARE_(a, !=, b, )
#define EXPECT_LT(a, b) SMALL_GTEST_COMPARE_(a, <, b, )
#define EXPECT_LE(a, b) SMALL_GTEST_COMPARE_(a, <=, b, )
#define EXPECT_GT(a, b) SMALL_GTEST_COMPARE_(a, >, b, )
#define EXPECT_GE(a, b) SMALL_GTEST_COMPARE_(a, >=, b, )
#define EXPECT_FLOAT_EQ(a, b) \
  SMALL_GTEST_(::testing::internal::ProblemOf(#a " near " #b, a, b, ::testing::internal::AreNear), )
#define ASSERT_TRUE(condition) \
  SMALL_GTEST_(::testing::internal::ProblemOf(#condition, static_cast<bool>(condition)), return)
#define ASSERT_EQ(a, b) SMALL_GTEST_COMPARE_(a, ==, b, return)
#define GTEST_SKIP()                                                                             \
  return ::testing::internal::Report(::testing::internal::Outcome::kSkipped, __FILE__, __LINE__, \
                                     "") = ::testing::internal::Message()

#define SMALL_GTEST_CLASS_(suite, name, parent, add)                                       \
  class suite##_##name##_Test : public parent {                                            \
   public:                                                                                 \
    void TestBody() override;                                                              \
  };                                                                                       \
  [[maybe_unused]] static const bool suite##_##name##_is_added = ::testing::internal::add; \
  void suite##_##name##_Test::TestBody()
#define TEST(suite, name) \
  SMALL_GTEST_CLASS_(suite, name, ::testing::Test, AddTest<suite##_##name##_Test>(#suite "." #name))
#define SMALL_GTEST_PAIR_(a, b) a, b
#define TEST_P(suite, name)              \
  SMALL_GTEST_CLASS_(suite, name, suite, \
                     AddParamTest<SMALL_GTEST_PAIR_(suite, suite##_##name##_Test)>(#name))
#define INSTANTIATE_TEST_SUITE_P(prefix, suite, ...)               \
  [[maybe_unused]] static const bool prefix##_##suite##_is_added = \
      ::testing::internal::Instantiate<suite>(#prefix "/" #suite, __VA_ARGS__)

#endif  // SLIPSTREAM_BENCHMARKS_GPU_SMALL_GTEST_GTEST_GTEST_H_
