// The device's side of cold_mail.h: handing pairs over, and taking the answer.
#pragma once

#include "device/launch.cuh"
#include "kernels/route_topk/cold_mail.h"

namespace thermo {

__device__ __forceinline__ uint32_t ticket_of(const DeviceCold& cold) {
  return layer_ticket(*cold.ticket, cold.layer);
}

// Hands the mail over: one thread, ordered after those that wrote the pairs and the rows.
__device__ __forceinline__ void post_mail(const DeviceCold& cold, int n_pairs) {
  cold.record->n_pairs = n_pairs;
  cold.record->posted_ns = device_clock_ns();
  __threadfence_system();
  *const_cast<volatile uint32_t*>(&cold.mail->posted) = ticket_of(cold);
}

// A parcel of this layer, if it is of this step and here. What was copied in front of the word is visible
// after this.
__device__ __forceinline__ CameParcel look_at_parcel(const DeviceCold& cold, int i) {
  uint64_t word;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(cold.announced + i) : "memory");
  if (parcel_ticket(word) != ticket_of(cold)) return {};
  return {cold.places[parcel_place(word)], parcel_expert(word)};
}

// How many of n_cold distinct experts are read where they lie in host memory.
__device__ __forceinline__ int fetched_of(const DeviceCold& cold, int n_cold) {
  if (n_cold == 0) return 0;
  return n_cold <= kMaxFetchTable ? cold.fetch_of[n_cold]
                                  : cold.fetch_of[kMaxFetchTable] * n_cold / kMaxFetchTable;
}

inline constexpr uint64_t kAnswerTimeoutNs = 20'000'000'000;

// Until the answer is being written. Asking the host takes a microsecond and bandwidth that the fetch lane
// wants, and many that ask for one line hold each other up (128 blocks: 50 us): one block asks and tells the
// others.
__device__ __forceinline__ void wait_until_near(const DeviceCold& cold, bool leader) {
  if (threadIdx.x == 0) {
    const uint32_t expected = ticket_of(cold);
    const uint64_t begin = device_clock_ns();
    if (leader) cold.record->ready_ns = begin;
    uint32_t seen;
    do {
      if (leader)
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(&cold.mail->near) : "memory");
      else
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(cold.near) : "memory");
      if (seen != expected && device_clock_ns() - begin > kAnswerTimeoutNs) {
        cold.mail->gave_up = expected;
        seen = expected;
      }
    } while (seen != expected);
    if (leader)
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(cold.near), "r"(expected) : "memory");
  }
  __syncthreads();
}

// Number `at` of the answer, once it is there.
__device__ __forceinline__ long long take_answer(const DeviceCold& cold, int64_t at, uint32_t expected) {
  uint4 a;
  uint32_t tries = 0;
  do {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w)
                 : "l"(cold.y + at)
                 : "memory");
    if (++tries > 10'000'000) {
      cold.mail->gave_up = expected;
      break;
    }
  } while (a.y != expected || a.w != expected);
  return static_cast<long long>(static_cast<unsigned long long>(a.z) << 32 | a.x);
}

}  // namespace thermo
