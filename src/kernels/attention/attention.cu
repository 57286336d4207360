// Three launches: prepare (norm and rotation of heads, write into the cache), attend, finish (merge the
// parts, gate, hand over).
//
// attend: a block of 4 warps takes one row, 4 or 8 query heads of one kv head, and a part of the cache. A
// lane holds head_dim / 32 elements of the queries and of the sums; four slots at a time are loaded, scored
// and added. The scores of a slot are summed over the warp by halving, after which a lane has the score of
// one head. Bound by latency and instructions, not by bytes: 8 heads need 230 registers, so a decoded row
// takes 4 at a time and reads the cache twice.
#include "base/check.h"
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/attention/attention_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

constexpr int kFewHeads = 4, kManyHeads = 8;  // query heads of a block: with few rows, with many
constexpr int kWarps = 4;                     // of an attending block
constexpr int kSlots = 4;                     // slots in flight of a warp
constexpr int kMinPart = 64;                  // slots that are worth a block

__host__ __device__ constexpr int64_t head_bytes(KvType type, int dim) {
  return type == KvType::F32 ? 4 * dim : type == KvType::F16 ? 2 * dim : dim / 32 * 34;
}

// ---- prepare ----

__device__ void store_head(KvType type, std::byte* at, const float* x, int dim, int lane) {
  if (type == KvType::F32) {
    for (int d = lane; d < dim; d += 32) reinterpret_cast<float*>(at)[d] = x[d];
  } else if (type == KvType::F16) {
    for (int d = lane; d < dim; d += 32) reinterpret_cast<half*>(at)[d] = __float2half_rn(x[d]);
  } else {
    for (int b = 0; b < dim / 32; ++b) {
      float top = fabsf(x[b * 32 + lane]);
      for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      const float d = top / 127.0f;
      const int q = d > 0.0f ? __float2int_rn(x[b * 32 + lane] / d) : 0;
      if (lane == 0) *reinterpret_cast<half*>(at + b * 34) = __float2half_rn(d);
      *reinterpret_cast<int8_t*>(at + b * 34 + 2 + lane) = static_cast<int8_t>(q);
    }
  }
}

// One warp per head: queries, then keys, then values.
__global__ void __launch_bounds__(128) prepare_heads_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  __shared__ float shared[4][256];
  allow_next();
  wait_for_inputs();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.y, head = blockIdx.x * 4 + warp, dim = a.head_dim;
  if (head >= a.n_head + 2 * a.n_head_kv) return;
  const bool is_q = head < a.n_head, is_v = head >= a.n_head + a.n_head_kv;
  const int kv_head = (head - a.n_head) % a.n_head_kv;
  const int q_step = a.head_gate == HeadGate::SigmoidElement ? 2 * dim : dim;
  const float* const from =
      is_q ? a.q_full + (static_cast<int64_t>(row) * a.n_head + head) * q_step
           : (is_v ? a.v : a.k) + (static_cast<int64_t>(row) * a.n_head_kv + kv_head) * dim;
  float* const x = shared[warp];
  float square = 0.0f;
  for (int d = lane; d < dim; d += 32) {
    x[d] = from[d];
    square += x[d] * x[d];
  }
  if (!is_v) {
    const float scale = rsqrtf(warp_sum(square) / static_cast<float>(dim) + a.eps);
    const float* const weight = is_q ? a.q_norm : a.k_norm;
    for (int d = lane; d < dim; d += 32) x[d] *= scale * weight[d];
    __syncwarp();
    const int half_rot = a.n_rot / 2;
    for (int i = lane; i < half_rot; i += 32) {
      float s, c;
      sincosf(static_cast<float>(a.rows.position[row]) * a.inv_freq[i], &s, &c);
      s *= a.rope_magnitude;
      c *= a.rope_magnitude;
      const float u = x[i], v = x[half_rot + i];
      x[i] = u * c - v * s;
      x[half_rot + i] = u * s + v * c;
    }
  }
  __syncwarp();
  if (is_q) {
    for (int d = lane; d < dim; d += 32) a.q[(static_cast<int64_t>(row) * a.n_head + head) * dim + d] = x[d];
    return;
  }
  const int group = a.rows.group[row];
  if (group < 0) return;
  const int64_t slot = a.rows.group_past[group] + row - a.rows.group_begin[group];
  const KvType type = is_v ? a.kv.v_type : a.kv.k_type;
  std::byte* const base = (is_v ? a.kv.v : a.kv.k) + a.rows.group_sequence[group] * a.kv.sequence_bytes;
  store_head(type, base + (slot * a.n_head_kv + kv_head) * head_bytes(type, dim), x, dim, lane);
}

// ---- attend ----

// The lane's kPer elements of a head.
template <int kPer>
__device__ __forceinline__ void load_elements(KvType type, const std::byte* head, int lane,
                                              float (&x)[kPer]) {
  const int first = lane * kPer;
  if (type == KvType::F16) {
    const half* const p = reinterpret_cast<const half*>(head) + first;
    if constexpr (kPer == 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = __half22float2(as_half2(w[i]));
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
      }
    } else if constexpr (kPer == 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      const float2 f = __half22float2(as_half2(v.x)), h = __half22float2(as_half2(v.y));
      x[0] = f.x, x[1] = f.y, x[2] = h.x, x[3] = h.y;
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[i] = __half2float(p[i]);
    }
  } else if (type == KvType::F32) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = reinterpret_cast<const float*>(head)[first + i];
  } else {
    const std::byte* const block = head + first / 32 * 34;
    const float d = __half2float(*reinterpret_cast<const half*>(block));
    if constexpr (kPer >= 2) {
#pragma unroll
      for (int i = 0; i < kPer; i += 2) {  // blocks are aligned to 2 bytes only
        const uint16_t v = *reinterpret_cast<const uint16_t*>(block + 2 + first % 32 + i);
        x[i] = d * static_cast<float>(static_cast<int8_t>(v & 255));
        x[i + 1] = d * static_cast<float>(static_cast<int8_t>(v >> 8));
      }
    } else {
      x[0] = d * static_cast<float>(*reinterpret_cast<const int8_t*>(block + 2 + first % 32));
    }
  }
}

// Sums of kHeads values over the warp; lane l gets the sum of value l / (32 / kHeads).
template <int kHeads>
__device__ __forceinline__ float sum_heads(const float (&s)[kHeads], int lane) {
  static_assert(kHeads == 4 || kHeads == 8);
  float x[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) x[i] = s[i];
  int mask = 16;
#pragma unroll
  for (int half = kHeads / 2; half > 0; half /= 2, mask /= 2) {
    const bool up = lane & mask;
#pragma unroll
    for (int i = 0; i < half; ++i)
      x[i] = (up ? x[i + half] : x[i]) + __shfl_xor_sync(0xffffffffu, up ? x[i] : x[i + half], mask);
  }
#pragma unroll
  for (int rest = 16 / kHeads; rest > 0; rest /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], rest);
  return x[0];
}

struct RowReach {
  int begin, end;  // slots that may be seen
  int part;        // slots of a part
  int n_parts;
};

__device__ __forceinline__ RowReach reach_of(const DeviceAttentionArgs& a, int row, int group) {
  const int past = a.rows.group_past[group], position = a.rows.position[row];
  RowReach r;
  r.begin = a.window > 0 ? max(0, min(past, position - a.window + 1)) : 0;
  r.end = past + row - a.rows.group_begin[group] + 1;
  const int n = r.end - r.begin;
  r.part = max(kMinPart, (n + a.n_splits - 1) / a.n_splits);
  r.part = (r.part + 15) / 16 * 16;
  r.n_parts = (n + r.part - 1) / r.part;
  return r;
}

template <int kDim, int kHeads>
__global__ void __launch_bounds__(32 * kWarps) attend_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  constexpr int kPer = kDim / 32, kLanesOfHead = 32 / kHeads;
  __shared__ float sums[kHeads][kDim];
  __shared__ float tops[kWarps][kHeads], totals[kWarps][kHeads];
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.z, part = blockIdx.y;
  const int group = a.rows.group[row];
  if (group < 0) return;
  const RowReach reach = reach_of(a, row, group);
  if (part >= reach.n_parts) return;
  const int per_kv = a.n_head / a.n_head_kv;
  const int head_groups = (per_kv + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.x / head_groups, first_in_kv = blockIdx.x % head_groups * kHeads;
  const int n_heads = min(kHeads, per_kv - first_in_kv);
  const int first_head = kv_head * per_kv + first_in_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __align__(16) float q[kHeads][kPer];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float* const from =
        a.q + (static_cast<int64_t>(row) * a.n_head + first_head + min(h, n_heads - 1)) * kDim + lane * kPer;
    if constexpr (kPer >= 4) {
#pragma unroll
      for (int i = 0; i < kPer; i += 4)
        *reinterpret_cast<float4*>(&q[h][i]) = *reinterpret_cast<const float4*>(from + i);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) q[h][i] = from[i];
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) q[h][i] *= a.scale;
  }

  const int begin = reach.begin + part * reach.part, end = min(reach.end, begin + reach.part);
  const int64_t sequence = a.rows.group_sequence[group] * a.kv.sequence_bytes;
  const int64_t k_step = head_bytes(a.kv.k_type, kDim), v_step = head_bytes(a.kv.v_type, kDim);
  const std::byte* const keys = a.kv.k + sequence + kv_head * k_step;
  const std::byte* const values = a.kv.v + sequence + kv_head * v_step;
  const int past = a.rows.group_past[group], group_begin = a.rows.group_begin[group],
            position = a.rows.position[row];
  const auto sees = [&](int slot) {
    if (slot >= end) return false;
    if (slot < past) return a.window <= 0 || slot > position - a.window;
    const int j = slot - past;
    if (a.rows.tree && !(a.rows.ancestors[row] >> j & 1)) return false;
    return a.window <= 0 || a.rows.position[group_begin + j] > position - a.window;
  };

  float acc[kHeads][kPer] = {};
  float top = -INFINITY, total = 0.0f;  // of head lane / kLanesOfHead
  for (int slot = begin + warp * kSlots; slot < end; slot += kWarps * kSlots) {
    float k[kSlots][kPer], v[kSlots][kPer];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int64_t at = static_cast<int64_t>(min(slot + s, end - 1)) * a.n_head_kv;
      load_elements<kPer>(a.kv.k_type, keys + at * k_step, lane, k[s]);
      load_elements<kPer>(a.kv.v_type, values + at * v_step, lane, v[s]);
    }
    float score[kSlots], new_top = top;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      float dot[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        dot[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < kPer; ++i) dot[h] = fmaf(q[h][i], k[s][i], dot[h]);
      }
      score[s] = sum_heads<kHeads>(dot, lane);
      if (!sees(slot + s)) score[s] = -INFINITY;
      new_top = fmaxf(new_top, score[s]);
    }
    if (__all_sync(0xffffffffu, new_top == -INFINITY)) continue;
    const float shrink = new_top == -INFINITY ? 1.0f : __expf(top - new_top);
    top = new_top;
    total *= shrink;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      score[s] = top == -INFINITY ? 0.0f : __expf(score[s] - top);
      total += score[s];
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= n_heads) break;
      const float f = __shfl_sync(0xffffffffu, shrink, kLanesOfHead * h);
#pragma unroll
      for (int i = 0; i < kPer; ++i) acc[h][i] *= f;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const float w = __shfl_sync(0xffffffffu, score[s], kLanesOfHead * h);
#pragma unroll
        for (int i = 0; i < kPer; ++i) acc[h][i] = fmaf(w, v[s][i], acc[h][i]);
      }
    }
  }

  // Merge the warps.
  if (lane % kLanesOfHead == 0) {
    tops[warp][lane / kLanesOfHead] = top;
    totals[warp][lane / kLanesOfHead] = total;
  }
  for (int i = threadIdx.x; i < kHeads * kDim; i += 32 * kWarps) sums[i / kDim][i % kDim] = 0.0f;
  __syncthreads();
  float all_top[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    all_top[h] = tops[0][h];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all_top[h] = fmaxf(all_top[h], tops[w][h]);
  }
  for (int w = 0; w < kWarps; ++w) {  // in turn: one order of sums
    if (warp == w)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= n_heads) break;
        const float f = tops[w][h] == -INFINITY ? 0.0f : __expf(tops[w][h] - all_top[h]);
#pragma unroll
        for (int i = 0; i < kPer; ++i) sums[h][lane * kPer + i] += f * acc[h][i];
      }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < n_heads * (kDim + 2); i += 32 * kWarps) {
    const int h = i / (kDim + 2), d = i % (kDim + 2);
    float x;
    if (d < kDim) {
      x = sums[h][d];
    } else {
      float t = tops[0][h], l = 0.0f;
      for (int w = 1; w < kWarps; ++w) t = fmaxf(t, tops[w][h]);
      for (int w = 0; w < kWarps; ++w)
        l += tops[w][h] == -INFINITY ? 0.0f : totals[w][h] * __expf(tops[w][h] - t);
      x = d == kDim ? t : l;
    }
    a.partial[((static_cast<int64_t>(row) * a.n_head + first_head + h) * a.n_splits + part) * (kDim + 2) +
              d] = x;
  }
}

// ---- finish ----

__global__ void finish_heads_kernel(const __grid_constant__ DeviceAttentionArgs a) {
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.y, head = blockIdx.x, d = threadIdx.x, dim = a.head_dim;
  const int group = a.rows.group[row];
  float x = 0.0f;
  if (group >= 0) {
    const int n = reach_of(a, row, group).n_parts;
    const float* const parts =
        a.partial + (static_cast<int64_t>(row) * a.n_head + head) * a.n_splits * (dim + 2);
    float top = -INFINITY, total = 0.0f;
    for (int p = 0; p < n; ++p) top = fmaxf(top, parts[p * (dim + 2) + dim]);
    for (int p = 0; p < n; ++p) {
      const float* const part = parts + p * (dim + 2);
      const float f = part[dim] == -INFINITY ? 0.0f : __expf(part[dim] - top);
      x = fmaf(f, part[d], x);
      total = fmaf(f, part[dim + 1], total);
    }
    x = total > 0.0f ? x / total : 0.0f;
  }
  const int64_t at = static_cast<int64_t>(row) * a.n_head + head;
  switch (a.head_gate) {
    case HeadGate::SigmoidElement:
      x *= sigmoid_device(a.q_full[at * 2 * dim + dim + d]);
      break;
    case HeadGate::SoftplusHead:
      x *= softplus_device(a.gate[at]);
      break;
    case HeadGate::SoftplusElement:
      x *= softplus_device(a.gate[at * dim + d]);
      break;
  }
  const ActsOut out{static_cast<half*>(a.out.f16), a.out.f32, a.out.f16_stride, a.out.f32_stride,
                    a.out.scale};
  out.put(row, head * dim + d, x);
}

// path[d] >= d, so a thread that moves its own bytes of every row in turn overwrites nothing that is still
// needed.
__global__ void kv_move_kernel(const __grid_constant__ DeviceKvMoveArgs a) {
  allow_next();
  wait_for_inputs();
  const int64_t k_bytes = a.n_head_kv * head_bytes(a.kv.k_type, a.head_dim),
                v_bytes = a.n_head_kv * head_bytes(a.kv.v_type, a.head_dim);
  const int64_t i = 2 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i >= k_bytes + v_bytes) return;
  const bool is_v = i >= k_bytes;
  std::byte* const base = (is_v ? a.kv.v + (i - k_bytes) : a.kv.k + i) + a.past * (is_v ? v_bytes : k_bytes);
  const int64_t step = is_v ? v_bytes : k_bytes;
  for (int d = 0; d < *a.n_path; ++d)
    if (a.path[d] != d)
      *reinterpret_cast<uint16_t*>(base + d * step) =
          *reinterpret_cast<const uint16_t*>(base + a.path[d] * step);
}

}  // namespace

void kv_move_cuda(const DeviceKvMoveArgs& a, StreamView stream) noexcept {
  const int64_t bytes =
      a.n_head_kv * (head_bytes(a.kv.k_type, a.head_dim) + head_bytes(a.kv.v_type, a.head_dim));
  launch(kv_move_kernel, static_cast<unsigned>(ceil_div<int64_t>(bytes, 512)), 256, 0, stream, a);
}

namespace {

// Few rows: short code and many blocks. Many rows: each byte of the cache read by as few blocks as registers
// allow.
int heads_of_block(int n_rows) {
  return n_rows > 32 ? kManyHeads : kFewHeads;
}

template <int kDim>
void launch_attend(const DeviceAttentionArgs& a, StreamView stream) {
  const int heads = heads_of_block(a.n_rows);
  const dim3 grid(static_cast<unsigned>(a.n_head_kv * ceil_div(a.n_head / a.n_head_kv, heads)),
                  static_cast<unsigned>(a.n_splits), static_cast<unsigned>(a.n_rows));
  launch(heads == kFewHeads ? attend_kernel<kDim, kFewHeads> : attend_kernel<kDim, kManyHeads>, grid,
         32 * kWarps, 0, stream, a);
}

}  // namespace

int attention_splits(int n_rows, int n_head, int n_head_kv, int n_multiprocessors) noexcept {
  const int blocks = n_rows * n_head_kv * ceil_div(n_head / n_head_kv, heads_of_block(n_rows));
  const int splits = ceil_div(2 * n_multiprocessors, blocks);
  return n_rows > 32 ? 1 : splits < 1 ? 1 : splits > kMaxAttentionSplits ? kMaxAttentionSplits : splits;
}

void attention_cuda(const DeviceAttentionArgs& a, StreamView stream) noexcept {
  const unsigned rows = static_cast<unsigned>(a.n_rows);
  launch(prepare_heads_kernel, dim3(static_cast<unsigned>(ceil_div(a.n_head + 2 * a.n_head_kv, 4)), rows),
         128, 0, stream, a);
  switch (a.head_dim) {
    case 32:
      launch_attend<32>(a, stream);
      break;
    case 64:
      launch_attend<64>(a, stream);
      break;
    case 128:
      launch_attend<128>(a, stream);
      break;
    case 256:
      launch_attend<256>(a, stream);
      break;
    default:
      THERMO_CHECK(false, "head_dim was checked at load");
  }
  launch(finish_heads_kernel, dim3(static_cast<unsigned>(a.n_head), rows), static_cast<unsigned>(a.head_dim),
         0, stream, a);
}

}  // namespace thermo
