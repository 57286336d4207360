// Two kernels. The first reads the row once with many blocks: every thread walks a run of logits and keeps
// its maximum; 16 runs are a group. The second, one block for a row, looks for a floor that n_wanted of the
// 1024 group maxima reach (so at least n_wanted logits do), then reads again only the runs that hold
// something from the floor up: about 300 of 16384, and as many tokens are listed.
//
// The result goes straight to page-locked host memory, so that the step needs no copy after its graph.
//
// On an H200, 248,320 logits: 4.9 us, and 3.5 us for the best token or 10.4 for a list (ncu; two kernels that
// return at once take 4.4). In a step the device time grows by 25 and 30 us, more than the kernels explain,
// and the wall time is that of a step that copies the row: 1.886 ms against 1.884. What is won is the host's
// walk over a megabyte, 16 to 20 us a token. Not tried yet: leaving the result on the device and copying it.
#include <cmath>

#include "device/launch.cuh"
#include "kernels/sample/sample_cuda.h"

namespace thermo {
namespace {

constexpr int kGroups = 1024;  // a thread of the second kernel each
constexpr int kSubs = 16;      // runs of a group
constexpr int kRuns = kGroups * kSubs;
constexpr int kScanGroups = 32;  // of a block of the first kernel: a warp reads neighbours
constexpr int kScanThreads = kScanGroups * kSubs;
constexpr int kScanBlocks = kGroups / kScanGroups;
constexpr int kMaxWork = 2048;  // runs that are read again

// Logits [id, ...] of run (group, sub): group + kGroups * (sub + kSubs * step).
__device__ __forceinline__ int first_of(int group, int sub) {
  return group + kGroups * sub;
}

// The maximum of some logits, its lowest id, and the sum of exp(logit - max). The quick exponential is off by
// a millionth where it matters; a sum is good for 1e-5.
struct Part {
  float max;
  int32_t best;
  float sum;

  static __device__ __forceinline__ Part none() { return {-INFINITY, -1, 0.0f}; }

  // values[i] has the id first + i * stride. Equal logits keep the lowest id: ids rise.
  template <int kCount>
  __device__ __forceinline__ void add(const float (&values)[kCount], int32_t first, int32_t stride) {
    const float before = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (values[i] > max) {
        max = values[i];
        best = first + i * stride;
      }
    if (max == -INFINITY) return;
    sum *= __expf(before - max);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += values[i] > -INFINITY ? __expf(values[i] - max) : 0.0f;
  }
  __device__ __forceinline__ void merge(const Part& other) {
    if (other.best < 0) return;
    const float top = fmaxf(max, other.max);
    sum = (best < 0 ? 0.0f : sum * __expf(max - top)) + other.sum * __expf(other.max - top);
    if (other.max > max || (other.max == max && other.best < best)) best = other.best;
    max = top;
  }
};

__device__ __forceinline__ Part merge_lanes(Part part) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    Part other;
    other.max = __shfl_xor_sync(0xffffffffu, part.max, mask);
    other.best = __shfl_xor_sync(0xffffffffu, part.best, mask);
    other.sum = __shfl_xor_sync(0xffffffffu, part.sum, mask);
    part.merge(other);
  }
  return part;
}

// Of one row.
struct Scratch {
  float run_max[kRuns];  // [sub][group]
  float group_max[kGroups];
  Part parts[kScanBlocks];
};

__global__ void __launch_bounds__(kScanThreads) scan_kernel(const TopLogitsArgs a) {
  __shared__ Part warp_parts[kSubs];
  __shared__ float maxima[kSubs][kScanGroups];
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.y;
  if (row >= *a.n_rows || a.n_wanted[row] == 0) return;
  const int lane = threadIdx.x % 32, sub = threadIdx.x / 32, group = blockIdx.x * kScanGroups + lane;
  const float* const logits = a.logits + static_cast<int64_t>(row) * a.n_vocab;
  Scratch& scratch = reinterpret_cast<Scratch*>(a.scratch)[row];

  Part part = Part::none();
  constexpr int kAhead = 16;  // all of a run of 248,320 logits
  for (int first = first_of(group, sub); first < a.n_vocab; first += kAhead * kRuns) {
    float values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      values[i] = first + i * kRuns < a.n_vocab ? logits[first + i * kRuns] : -INFINITY;
    part.add(values, first, kRuns);
  }
  scratch.run_max[sub * kGroups + group] = part.max;
  maxima[sub][lane] = part.max;
  part = merge_lanes(part);
  if (lane == 0) warp_parts[sub] = part;
  __syncthreads();
  if (sub != 0) return;
  float max = maxima[0][lane];
#pragma unroll
  for (int s = 1; s < kSubs; ++s) max = fmaxf(max, maxima[s][lane]);
  scratch.group_max[group] = max;
  part = merge_lanes(lane < kSubs ? warp_parts[lane] : Part::none());
  if (lane == 0) scratch.parts[blockIdx.x] = part;
}

// Bits in the order of the floats. REQUIRES: no NaN.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A value that at least n_wanted of the block's maxima reach, and hardly more; -inf when fewer are above
// that. A little too many is as good as the exact place and is found in a few halvings. `lowest`, `highest`:
// shared memory.
__device__ float find_floor(float group_max, int n_wanted, uint32_t* lowest, uint32_t* highest) {
  const uint32_t key = key_of(group_max);
  const bool empty = group_max == -INFINITY;
  uint32_t low = empty ? 0xffffffffu : key, high = empty ? 0u : key;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    low = min(low, __shfl_xor_sync(0xffffffffu, low, mask));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, mask));
  }
  if (threadIdx.x % 32 == 0) {
    atomicMin(lowest, low);
    atomicMax(highest, high);
  }
  if (__syncthreads_count(!empty) < n_wanted) return -INFINITY;
  low = *lowest;  // reached by all that are not empty
  high = *highest;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const int n = __syncthreads_count(key >= middle);
    if (n < n_wanted) {
      high = middle - 1;
      continue;
    }
    low = middle;
    if (n <= n_wanted + n_wanted / 8) break;
  }
  return float_of(low);
}

__global__ void __launch_bounds__(kGroups) list_kernel(const TopLogitsArgs a) {
  __shared__ TokenLogit list[kMaxTopTokens];
  __shared__ int work[kMaxWork];
  __shared__ int n_work, n_listed;
  __shared__ uint32_t lowest, highest;
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.x, n_wanted = a.n_wanted[row];
  if (row >= *a.n_rows || n_wanted == 0) return;
  const int thread = threadIdx.x;
  const Scratch& scratch = reinterpret_cast<const Scratch*>(a.scratch)[row];
  TopLogits& out = a.out[row];
  if (thread < 32) {
    const Part part = merge_lanes(scratch.parts[thread]);
    if (thread == 0) {
      out.max = part.max;
      out.best = part.best;
      out.sum_exp = part.sum;
      out.unused = 0;
      if (n_wanted == 1) {
        out.floor = INFINITY;
        out.n = TopLogits::kNotListed;
      }
    }
  }
  if (n_wanted == 1) return;

  // The runs are on their way while the floor is looked for.
  const float group_max = scratch.group_max[thread];
  float run_max[kSubs];
#pragma unroll
  for (int s = 0; s < kSubs; ++s) run_max[s] = scratch.run_max[s * kGroups + thread];
  if (thread == 0) {
    n_work = n_listed = 0;
    lowest = 0xffffffffu;
    highest = 0;
  }
  __syncthreads();
  const float floor = find_floor(group_max, n_wanted, &lowest, &highest);
  if (group_max >= floor && group_max > -INFINITY) {
#pragma unroll
    for (int s = 0; s < kSubs; ++s) {
      if (!(run_max[s] >= floor) || run_max[s] == -INFINITY) continue;
      const int at = atomicAdd(&n_work, 1);
      if (at < kMaxWork) work[at] = first_of(thread, s);
    }
  }
  __syncthreads();

  const float* const logits = a.logits + static_cast<int64_t>(row) * a.n_vocab;
  const int steps = (a.n_vocab + kRuns - 1) / kRuns, n_items = min(n_work, kMaxWork) * steps;
  constexpr int kAhead = 6;  // 300 runs of 16 in one round
  for (int first = thread; first < n_items; first += kAhead * kGroups) {
    int ids[kAhead];
    float values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int item = first + i * kGroups;
      ids[i] = item < n_items ? work[item / steps] + item % steps * kRuns : a.n_vocab;
      values[i] = ids[i] < a.n_vocab ? logits[ids[i]] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!(values[i] >= floor) || values[i] == -INFINITY) continue;
      const int at = atomicAdd(&n_listed, 1);
      if (at < kMaxTopTokens) list[at] = {values[i], ids[i]};
    }
  }
  __syncthreads();
  const bool fits = n_work <= kMaxWork && n_listed <= kMaxTopTokens;
  if (thread == 0) {
    out.floor = floor;
    out.n = fits ? n_listed : TopLogits::kNotListed;
  }
  if (fits)
    for (int i = thread; i < n_listed; i += kGroups) out.tokens[i] = list[i];
}

}  // namespace

size_t top_logits_scratch_floats() {
  static_assert(sizeof(Scratch) % sizeof(float) == 0);
  return sizeof(Scratch) / sizeof(float);
}

void top_logits_cuda(const TopLogitsArgs& args, StreamView stream) noexcept {
  if (args.max_rows <= 0) return;
  const auto rows = static_cast<unsigned>(args.max_rows);
  launch(scan_kernel, dim3(kScanBlocks, rows), kScanThreads, 0, stream, args);
  launch(list_kernel, dim3(rows), kGroups, 0, stream, args);
}

}  // namespace thermo
