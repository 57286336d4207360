#include "device/link_limit.h"

#include <cuda_runtime.h>

namespace thermo {
namespace {

using Time = unsigned long long;  // nanoseconds of the card's clock

__device__ Time now() {
  Time t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__global__ void reserve_kernel(Time* free_at, Time* over_at, Time duration) {
  Time seen = *free_at, next;
  for (;;) {
    const Time begin = now();
    next = (seen > begin ? seen : begin) + duration;
    const Time before = atomicCAS(free_at, seen, next);
    if (before == seen) break;
    seen = before;
  }
  *over_at = next;
}

__global__ void wait_kernel(const Time* over_at) {
  while (now() < *over_at) __nanosleep(200);
}

}  // namespace

LinkLimit::LinkLimit(uint64_t bytes_per_second)
    : bytes_per_second_(bytes_per_second),
      times_(bytes_per_second > 0 ? DeviceBuffer((1 + kLanes) * sizeof(Time)) : DeviceBuffer()) {}

void LinkLimit::begin(int lane, size_t n_bytes, StreamView stream) noexcept {
  if (bytes_per_second_ == 0) return;
  Time* const times = times_.as<Time>();
  const double ns = static_cast<double>(n_bytes) * 1e9 / static_cast<double>(bytes_per_second_);
  reserve_kernel<<<1, 1, 0, stream.handle>>>(times, times + 1 + lane, static_cast<Time>(ns));
}

void LinkLimit::end(int lane, StreamView stream) noexcept {
  if (bytes_per_second_ == 0) return;
  wait_kernel<<<1, 1, 0, stream.handle>>>(times_.as<Time>() + 1 + lane);
}

}  // namespace thermo
