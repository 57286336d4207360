// A queue of GPU work, and a point in it. "One stream, one owner": everything else passes StreamView by
// value.
#pragma once

#include <cstdint>

struct CUstream_st;
struct CUevent_st;

namespace thermo {

struct StreamView {
  CUstream_st* handle = nullptr;
};

class Stream {
 public:
  Stream();  // throws CudaError
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamView view() const noexcept { return {handle_}; }
  // Waits for everything queued. False: the device failed, and stays failed.
  bool synchronize() const noexcept;

  // Whether the driver can write().
  static bool can_write() noexcept;
  // Queues writing a word of device memory. A reader that sees the word also sees what was queued before it,
  // even while this stream goes on.
  void write(uint64_t* to, uint64_t value) noexcept;

 private:
  CUstream_st* handle_ = nullptr;
};

class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(StreamView stream) noexcept;
  bool synchronize() const noexcept;
  bool reached() const noexcept;
  // What is queued on `stream` from now on starts after this point.
  void hold_back(StreamView stream) const noexcept;
  // Milliseconds between two recorded and reached events.
  static float elapsed_ms(const Event& begin, const Event& end) noexcept;

 private:
  CUevent_st* handle_ = nullptr;
};

}  // namespace thermo
