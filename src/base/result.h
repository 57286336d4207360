// What a refused request returns. Routine failures (context full, bad sampling value) travel as
// Result<T>; loading and configuration throw the types of base/error.h instead.
//
// The member names are those of C++23 std::expected, so the switch later is one alias.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "base/check.h"
#include "base/error.h"

namespace thermo {

enum class ErrorCode {
  InvalidArgument,
  ContextFull,
  OutOfMemory,
  Unsupported,
  Cancelled,
  DeviceFault,
  Busy,  // later it may work
  Internal
};

struct Error {
  ErrorCode code;
  std::string message;  // one sentence: what was seen, what was expected, what to try
  Remedy remedy = Remedy::None;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }

  // REQUIRES: has_value().
  T& value() & {
    THERMO_CHECK(has_value(), "Result::value() on an error");
    return std::get<0>(state_);
  }
  const T& value() const& {
    THERMO_CHECK(has_value(), "Result::value() on an error");
    return std::get<0>(state_);
  }
  T&& value() && {
    THERMO_CHECK(has_value(), "Result::value() on an error");
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  // REQUIRES: !has_value().
  const Error& error() const {
    THERMO_CHECK(!has_value(), "Result::error() on a value");
    return std::get<1>(state_);
  }

 private:
  std::variant<T, Error> state_;
};

// The Result of something that has no value.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)), ok_(false) {}

  bool ok() const noexcept { return ok_; }
  explicit operator bool() const noexcept { return ok_; }
  const Error& error() const {
    THERMO_CHECK(!ok_, "Status::error() on success");
    return error_;
  }

 private:
  Error error_{};
  bool ok_ = true;
};

}  // namespace thermo
