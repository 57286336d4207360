// Hidden states of one network that another one reads. They stay where they were computed, in main memory or
// in a GPU's, and only backends that compute there look at them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/host_buffer.h"

namespace thermo {

// Some rows of them.
struct StateRows {
  const float* data = nullptr;  // in the backend's memory
  int n_taps = 0;
  int n_embd = 0;
  int64_t tap_stride = 0;  // floats
  int64_t row_stride = 0;
  int n = 0;                      // rows
  const int32_t* rows = nullptr;  // which, in this order; nullptr: 0, 1, 2, ...

  int width() const { return n_taps * n_embd; }
  const float* at(int tap, int i) const {
    return data + tap * tap_stride + (rows == nullptr ? i : rows[i]) * row_stride;
  }
  StateRows part(int begin, int count) const {
    StateRows some = *this;
    some.n = count;
    if (rows == nullptr)
      some.data += begin * row_stride;
    else
      some.rows += begin;
    return some;
  }
  // REQUIRES: rows is nullptr.
  StateRows pick(std::span<const int32_t> which) const {
    StateRows some = *this;
    some.n = static_cast<int>(which.size());
    some.rows = which.data();
    return some;
  }
};

// Memory for rows of states, made by a backend: all taps of a row lie one after the other.
class StateBuffer {
 public:
  virtual ~StateBuffer() = default;

  StateRows rows(int begin, int count) const {
    const int64_t width = static_cast<int64_t>(n_taps_) * n_embd_;
    return {.data = data_ + begin * width,
            .n_taps = n_taps_,
            .n_embd = n_embd_,
            .tap_stride = n_embd_,
            .row_stride = width,
            .n = count};
  }
  // Rows `at` and those after it become `from`, which may be other rows of this buffer.
  virtual void put(int at, const StateRows& from) noexcept = 0;
  // One row, from and to main memory.
  virtual void read(int row, std::span<float> to) const noexcept = 0;
  virtual void write(int row, std::span<const float> from) noexcept = 0;

 protected:
  StateBuffer(int n_taps, int n_embd) : n_taps_(n_taps), n_embd_(n_embd) {}
  float* row(int i) const { return data_ + static_cast<int64_t>(i) * n_taps_ * n_embd_; }

  int n_taps_, n_embd_;
  float* data_ = nullptr;
};

// In main memory.
class HostStates final : public StateBuffer {
 public:
  HostStates(int n_rows, int n_taps, int n_embd);
  void put(int at, const StateRows& from) noexcept override;
  void read(int row, std::span<float> to) const noexcept override;
  void write(int row, std::span<const float> from) noexcept override;

 private:
  HostBuffer memory_;
};

}  // namespace thermo
