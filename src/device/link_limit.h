// Makes the link to the card slower than it is, to measure what a person with another one can expect. All
// copies share one link: each reserves its time on it when it starts, and what follows on its stream waits
// until that time is over. The waiting is done by a kernel of one thread, so that no thread of the processor
// takes part.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/buffer.h"
#include "device/stream.h"

namespace thermo {

class LinkLimit {
 public:
  // 0: no limit, and begin() and end() do nothing. Throws CudaError.
  explicit LinkLimit(uint64_t bytes_per_second);

  static constexpr int kLanes = 2;  // streams that copy at the same time, each with a number of its own
  // Around the copies of n_bytes on a stream.
  void begin(int lane, size_t n_bytes, StreamView stream) noexcept;
  void end(int lane, StreamView stream) noexcept;

 private:
  uint64_t bytes_per_second_;
  DeviceBuffer times_;  // when the link is free, then for each lane when its copies are over
};

}  // namespace thermo
