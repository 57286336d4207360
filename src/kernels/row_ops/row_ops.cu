// One block per row. Bytes are few; what counts is that there is one launch between two products.
#include <algorithm>

#include "base/units.h"
#include "device/cluster.cuh"
#include "kernels/linear/dot_product.cuh"
#include "kernels/quant_matmul/panel_columns.cuh"
#include "kernels/quant_matmul/panel_exact.cuh"
#include "kernels/route_topk/cold_answer.cuh"
#include "kernels/row_ops/conv_shift.cuh"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

__global__ void embed_kernel(DeviceMatrix table, const int32_t* tokens, float* x, int n_embd) {
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.x, token = tokens[row];
  const uint8_t* const panel = table.panels + static_cast<size_t>(token / 16) * table.panel_bytes;
  const auto decode = [&]<DType T>() {
    const int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c < n_embd) x[static_cast<int64_t>(row) * n_embd + c] = panel_value<T>(panel, token % 16, c);
  };
  for_float_type(table.dtype, decode);
  for_quant_type(table.dtype, decode);
}

// Four floats of a row that is being rounded for experts, by the thread of column 4c; the four threads of 16
// columns are neighbours and all take part. `top`: of the group, as bits. `out`: the row's chunks.
__device__ __forceinline__ void store_block_acts(BlockActs* out, int c, const float4& y, uint32_t top,
                                                 float factor) {
  const unsigned mask = 0xfu << (threadIdx.x & 28);
  const ActRounding rounding = act_rounding(top);
  const uint32_t codes = round_codes(y.x, y.y, y.z, y.w, rounding.inverse);
  int sum = __dp4a(static_cast<int>(codes), 0x01010101, 0);
  sum += __shfl_xor_sync(mask, sum, 1);
  sum += __shfl_xor_sync(mask, sum, 2);
  BlockActs& chunk = out[c / 64];
  const int sub = c / 8 % 8, half = c / 4 % 2;
  chunk.codes[sub][c % 4][half] = codes;
  if (c % 4 != 0) return;
  (half == 0 ? chunk.meta[sub].sum0 : chunk.meta[sub].sum1) = sum;
  const uint32_t parts = sum_parts(sum);
  const int group = 2 * sub + half;
  reinterpret_cast<uint8_t*>(&chunk.meta[group / 4].sum_bytes)[group % 4] = static_cast<uint8_t>(parts);
  reinterpret_cast<uint8_t*>(&chunk.meta[4 + group / 4].sum_bytes)[group % 4] =
      static_cast<uint8_t>(parts >> 8);
  if (half == 0) chunk.meta[sub].step = __fmul_rn(rounding.step, factor);
}

// A sum over 256 columns as dot_product.cuh makes it, by the 64 threads that have four of them each:
// continued(sum) adds the thread's to a sum. The two warps' halves go to `halves`.
template <class Continued>
__device__ __forceinline__ void add_columns(bool here, const Continued& continued, float& half) {
  float sum = here ? continued(0.0f) : 0.0f;
  const float before = __shfl_xor_sync(0xffffffffu, sum, 4);  // columns 16 before these
  if (here && (threadIdx.x & 4) != 0) sum = continued(before);
    // The lanes of later columns have the sums; the others' do not count.
#pragma unroll
  for (int mask : {1, 2, 8, 16}) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
  if (threadIdx.x % 32 == 4) half = sum;
}

// Over kLanes neighbours, all of which take part.
template <int kLanes>
__device__ __forceinline__ uint32_t neighbours_max(uint32_t x) {
  const unsigned mask = ((1u << kLanes) - 1) << (threadIdx.x % 32 & ~(kLanes - 1));
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) x = max(x, __shfl_xor_sync(mask, x, step));
  return x;
}

// Parts of a row and the weights they are added with.
constexpr int kMaxNormParts = 33;

// kPieces: float4s of a thread. What counts are trips to L2 that wait for each other: the row, its parts'
// places and the parts, of which kTogether are read at once; and instructions, so a cluster of kSplit blocks
// has a row where rows are few.
template <int kPieces, int kThreads, int kTogether, int kSplit = 1>
__global__ void __launch_bounds__(kThreads) residual_norm_kernel(const __grid_constant__ ResidualNormArgs a) {
  static_assert(kSplit == 1 || kPieces == 1);
  __shared__ float squares[kPieces][kThreads / 32], dots[kPieces][kThreads / 32];
  __shared__ float row_squares[kSplit > 1 ? kMaxNormChunks : 1], row_dots[kSplit > 1 ? kMaxNormChunks : 1];
  __shared__ int64_t pairs[kMaxNormParts];
  __shared__ float weights[kMaxNormParts];
  const int n_threads = static_cast<int>(blockDim.x), n4 = a.n_embd / 4;
  const int rank = kSplit > 1 ? cluster_rank() : 0;
  const auto column = [&](int i) { return rank * n_threads + static_cast<int>(threadIdx.x) + i * n_threads; };
  float4 norm_weight[kPieces], gate_weight[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int c = column(i);
    if (c >= n4) break;
    norm_weight[i] = __ldg(reinterpret_cast<const float4*>(a.norm) + c);
    if (a.shared_gate != nullptr) gate_weight[i] = __ldg(reinterpret_cast<const float4*>(a.shared_gate) + c);
  }
  allow_next();
  wait_for_inputs();
  const int row = static_cast<int>(blockIdx.x) / kSplit;
  if (row >= a.n_rows) {
    shift_conv(a.conv, static_cast<int>(blockIdx.x) - a.n_rows * kSplit);
    return;
  }
  if constexpr (kSplit > 1) cluster_arrive();  // waited for before another block's memory is written
  const bool is_first = row == 0 && rank == 0;
  if (a.count != nullptr && is_first && threadIdx.x == 0) *a.count += 1;
  const int n_parts = a.parts == nullptr ? 0 : a.n_parts;
  if (static_cast<int>(threadIdx.x) < n_parts) {
    const int k = static_cast<int>(threadIdx.x), at = row * n_parts + k;
    pairs[k] = a.pair_of == nullptr ? row + static_cast<int64_t>(k) * a.n_rows : a.pair_of[at];
    weights[k] = a.pair_of == nullptr ? 1.0f : a.pair_weight[at];
  }
  float4* const x = reinterpret_cast<float4*>(a.x + static_cast<int64_t>(row) * a.n_embd);
  float4 v[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    if (column(i) < n4) v[i] = x[column(i)];
  const bool answered = a.cold_in.mail != nullptr && *a.cold_in.n_pairs > 0;
  const bool mail_out = a.cold_out.mail != nullptr && *a.cold_out.n_cold > 0;
  __syncthreads();
  if (answered) wait_until_near(a.cold_in, is_first);
  GridSum sum[kPieces][4];
  const auto add_parts = [&](const auto& add) {
#pragma unroll 1
    for (int first = 0; first < n_parts; first += kTogether) {
      // A part that is none counts as zeros.
      float4 part[kTogether][kPieces];
      float weight[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const bool has = first + k < n_parts && pairs[min(first + k, kMaxNormParts - 1)] >= 0;
        weight[k] = has ? weights[first + k] : 0.0f;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          part[k][i] = has && column(i) < n4
                           ? reinterpret_cast<const float4*>(a.parts + pairs[first + k] * a.n_embd)[column(i)]
                           : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k)
#pragma unroll
        for (int i = 0; i < kPieces; ++i) add(i, weight[k], part[k][i]);
    }
  };
  if (a.on_grid)
    add_parts([&](int i, float weight, const float4& p) {
      sum[i][0].add(weight, p.x), sum[i][1].add(weight, p.y);
      sum[i][2].add(weight, p.z), sum[i][3].add(weight, p.w);
    });
  else
    add_parts(
        [&](int i, float, const float4& p) { v[i].x += p.x, v[i].y += p.y, v[i].z += p.z, v[i].w += p.w; });
  const int warp = threadIdx.x / 32, n_warps = n_threads / 32;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int c = column(i);
    if (answered && c < n4) {
      const int64_t at = static_cast<int64_t>(row) * a.n_embd + 4 * c;
      const uint32_t expected = ticket_of(a.cold_in);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j].add_part(take_answer(a.cold_in, at + j, expected));
    }
    if (a.on_grid && c < n4) {
      v[i].x += sum[i][0].value(), v[i].y += sum[i][1].value();
      v[i].z += sum[i][2].value(), v[i].w += sum[i][3].value();
    }
    if (n_parts > 0 && c < n4) x[c] = v[i];
    add_columns(
        c < n4, [&](float from) { return add_squares(from, v[i]); }, squares[i][warp]);
    if (a.shared_gate != nullptr)  // before the factor
      add_columns(
          c < n4, [&](float from) { return add_products(from, v[i], norm_weight[i], gate_weight[i]); },
          dots[i][warp]);
  }
  __syncthreads();  // every thread has its piece of the answer
  if (answered && is_first && threadIdx.x == 0) a.cold_in.record->went_ns = device_clock_ns();
  // Chunk k is of warps 2k and 2k + 1, counted through the pieces or the blocks.
  if constexpr (kSplit > 1) {
    const int n_here = n_warps / 2, chunk = static_cast<int>(threadIdx.x) % n_here,
              to = static_cast<int>(threadIdx.x) / n_here;
    cluster_wait();
    if (to < kSplit) {
      put_in_block(&row_squares[rank * n_here + chunk], to,
                   __fadd_rn(squares[0][2 * chunk], squares[0][2 * chunk + 1]));
      if (a.shared_gate != nullptr)
        put_in_block(&row_dots[rank * n_here + chunk], to,
                     __fadd_rn(dots[0][2 * chunk], dots[0][2 * chunk + 1]));
    }
    cluster_arrive();
    cluster_wait();
  }
  const auto all_columns = [&](const float(&halves)[kPieces][kThreads / 32], const float* of_row) {
    if constexpr (kSplit > 1) return add_chunks(of_row, dot_chunks(a.n_embd));
    float sum = 0.0f;
    for (int i = 0, chunk = 0; i < kPieces; ++i)
#pragma unroll 4
      for (int pair = 0; pair < n_warps && chunk < dot_chunks(a.n_embd); pair += 2, ++chunk)
        sum = __fadd_rn(sum, __fadd_rn(halves[i][pair], halves[i][pair + 1]));
    return sum;
  };
  const float scale = norm_factor(all_columns(squares, row_squares), a.n_embd, a.eps);
  const ActsOut h{static_cast<half*>(a.h.f16), a.h.f32, a.h.f16_stride, a.h.f32_stride, a.h.scale};
  const float factor = a.factor_last ? scale : 1.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int c = column(i);
    if (c >= n4) break;
    const float4 w = norm_weight[i], weighted = times(v[i], w);
    const float4 y{v[i].x * scale * w.x, v[i].y * scale * w.y, v[i].z * scale * w.z, v[i].w * scale * w.w};
    if (h.f32 != nullptr) *reinterpret_cast<float4*>(h.f32 + row * h.f32_stride + 4 * c) = y;
    if (mail_out)
      *reinterpret_cast<float4*>(a.cold_out.x + static_cast<int64_t>(row) * a.n_embd + 4 * c) = weighted;
    if (h.f16 != nullptr) {
      const half2 pair[2] = {__floats2half2_rn(y.x, y.z),
                             __floats2half2_rn(y.y, y.w)};  // the order of act_place()
      *reinterpret_cast<uint2*>(h.f16 + row * h.f16_stride + act_place(4 * c)) =
          *reinterpret_cast<const uint2*>(pair);
    }
    v[i] = a.factor_last ? weighted : y;
    if (a.h.blocks32 != nullptr)
      store_block_acts(static_cast<BlockActs*>(a.h.blocks32) + row * a.h.blocks_stride, c, v[i],
                       neighbours_max<8>(max_bits(v[i].x, v[i].y, v[i].z, v[i].w)), factor);
  }
  if (a.h.blocks256 != nullptr) {
    // 256 columns belong to two warps.
    __shared__ uint32_t tops[kPieces][kThreads / 32];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool here = column(i) < n4;
      const uint32_t top = warp_max(here ? max_bits(v[i].x, v[i].y, v[i].z, v[i].w) : 0u);
      if (threadIdx.x % 32 == 0) tops[i][warp] = top;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int c = column(i);
      if (c >= n4) break;
      store_block_acts(static_cast<BlockActs*>(a.h.blocks256) + row * a.h.blocks_stride, c, v[i],
                       max(tops[i][warp & ~1], tops[i][warp | 1]), factor);
    }
  }
  if (threadIdx.x != 0 || rank != 0) return;
  if (a.factor != nullptr) a.factor[row] = scale;
  if (mail_out) a.cold_out.record->x_scale[row] = scale;
  if (a.shared_gate != nullptr) a.shared_logit[row] = __fmul_rn(all_columns(dots, row_dots), scale);
}

__global__ void copy_floats_kernel(const float4* from, float4* to, size_t n) {
  wait_for_inputs();
  allow_next();
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    to[i] = from[i];
}

}  // namespace

void copy_floats_cuda(const float* from, float* to, size_t n, StreamView stream) noexcept {
  const size_t n4 = n / 4;
  launch(copy_floats_kernel, static_cast<unsigned>(std::min<size_t>(ceil_div(n4, size_t{256}), 512)), 256, 0,
         stream, reinterpret_cast<const float4*>(from), reinterpret_cast<float4*>(to), n4);
}

void embed_cuda(const DeviceMatrix& table, const int32_t* tokens, int n_rows, float* x, int n_embd,
                StreamView stream) noexcept {
  launch(embed_kernel, dim3(static_cast<unsigned>(n_rows), static_cast<unsigned>(ceil_div(n_embd, 256))), 256,
         0, stream, table, tokens, x, n_embd);
}

void residual_norm_cuda(const ResidualNormArgs& args, StreamView stream) noexcept {
  const auto start = [&](auto* kernel, int n_threads) {
    launch(kernel, static_cast<unsigned>(args.n_rows + shift_conv_blocks(args.conv, n_threads)),
           static_cast<unsigned>(n_threads), 0, stream, args);
  };
  // A thread has four columns at a time, 64 of them have the 256 that share a step. Up to 2048 columns a
  // cluster was no faster (H200, 4 to 16 rows 1 % slower); with 5120 a decoded row of 27B took 6.04 ms
  // instead of 6.28.
  constexpr int kSplit = 4, kMaxSplitThreads = 512, kMaxSplitRows = 64;
  const int n4 = args.n_embd / 4, half = 64 * ceil_div(n4, 128), part = n4 / kSplit;
  if (has_clusters() && n4 > 512 && n4 % (64 * kSplit) == 0 && part <= kMaxSplitThreads &&
      args.n_rows <= kMaxSplitRows) {
    const int n_rows = args.n_rows + ceil_div(shift_conv_blocks(args.conv, part), kSplit);
    return launch_clusters(residual_norm_kernel<1, kMaxSplitThreads, 5, kSplit>, kSplit,
                           static_cast<unsigned>(kSplit * n_rows), static_cast<unsigned>(part), 0, stream,
                           args);
  }
  if (n4 <= 512) return start(residual_norm_kernel<1, 512, 5>, 512);
  if (half <= 640) return start(residual_norm_kernel<2, 640, 4>, half);
  if (half <= 1024) return start(residual_norm_kernel<2, 1024, 2>, half);
  start(residual_norm_kernel<4, 1024, 1>, 1024);
}

}  // namespace thermo
