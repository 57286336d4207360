// One warp's share of a product of few activation rows: one panel, every n-th chunk of 256 columns, any
// weight type. Partial sums go to shared memory, where the warps of a block add them up.
//
// Quantised weights pass through shared memory: the warp asks for two chunks (2 to 4 KB each) ahead with
// asynchronous copies, which need no registers, so all warps of the card have all of their bytes in flight.
// The first chunks are asked for before `ready()` is called: between kernels that is the wait for the one
// before, so weights travel while it ends. The activations of a chunk are copied the same way when they are
// few, so that they cost one trip to L2.
#pragma once

#include "kernels/linear/copy_async.cuh"
#include "kernels/linear/stage_chunk.cuh"
#include "kernels/quant_matmul/panel_columns.cuh"

namespace thermo {

inline constexpr int kPartFloats = 16 * 8;          // of 8 activation rows: part[act][row]
inline constexpr int kStageRowBytes = 512 + 64;     // 256 columns; neighbours are half the banks apart
inline constexpr int kTableBytes = 16 * 16 * 8;     // scales of a chunk
inline constexpr int kMaxChunkBytes = 16 * 8 * 34;  // Q8_0
inline constexpr int kMaxWarpStageBytes = kTableBytes + 2 * (kMaxChunkBytes + 8 * kStageRowBytes);

// Shared memory of a warp: the scales, and per chunk in flight its bytes and (NT8 is 1) n_acts rows of
// activations.
__host__ __device__ constexpr int chunk_stage_bytes(const DeviceMatrix& w, int n_acts) {
  return 64 + w.body_bytes + n_acts * kStageRowBytes;
}
__host__ __device__ constexpr int warp_stage_bytes(const DeviceMatrix& w, int n_acts, int chunks_in_flight) {
  return is_float_type(w.dtype) ? 0 : kTableBytes + chunks_in_flight * chunk_stage_bytes(w, n_acts);
}

// Float weights: part[act * 16 + row] = the warp's share.
template <class RowOf>
__device__ __forceinline__ void float_product(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                              int chunk_step, const DeviceActs& x, const RowOf& row_of,
                                              int n_acts, int lane, float* part) {
  const int n_cols = w.n_cols, n_chunks = (n_cols + 255) / 256;
  for_float_type(w.dtype, [&]<DType T>() {
    constexpr int kActs = 4;  // at a time: more would not fit the registers
    for (int first = 0; first < n_acts; first += kActs) {
      const float* rows[kActs];
#pragma unroll
      for (int a = 0; a < kActs; ++a) rows[a] = x.f32 + row_of(min(first + a, n_acts - 1)) * x.f32_stride;
      float acc[kActs][4] = {};
      for (int chunk = first_chunk; chunk < n_chunks; chunk += chunk_step)
        multiply_columns<T, kActs>(
            panel, chunk * 256, min(n_cols, chunk * 256 + 256), lane,
            [&](int a, int c) { return rows[a][c]; }, acc);
      finish_columns<kActs>(acc);
#pragma unroll
      for (int a = 0; a < kActs; ++a)
        if (lane >> 2 == a && first + a < n_acts)
          *reinterpret_cast<float4*>(part + (first + a) * 16 + 4 * (lane & 3)) = {acc[a][0], acc[a][1],
                                                                                  acc[a][2], acc[a][3]};
    }
  });
}

// `row_of(a)`: activation row a = 0 .. 8 * NT8 - 1 of the tile; called after ready(). `panel` may be null:
// nothing to do but ready(). `stage`: warp_stage_bytes() of shared memory of this warp, for `in_flight`
// chunks: one or two.
template <int NT8, class RowOf, class Ready>
__device__ __forceinline__ void warp_product(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                             int chunk_step, const DeviceActs& x, const RowOf& row_of,
                                             int n_acts, int lane, std::byte* stage, int in_flight,
                                             float* part, const Ready& ready) {
  const int n_cols = w.n_cols;
  const int n_chunks = (n_cols + 255) / 256;
  if (panel == nullptr) {
    ready();
    return;
  }
  if (is_float_type(w.dtype)) {
    ready();
    float_product(w, panel, first_chunk, chunk_step, x, row_of, n_acts, lane, part);
    return;
  }

  const int g = lane >> 2, t = lane & 3;
  float2* const table = reinterpret_cast<float2*>(stage);
  std::byte* const chunks = stage + kTableBytes;
  const int chunk_bytes = chunk_stage_bytes(w, NT8 == 1 ? n_acts : 0);
  float acc[NT8][4] = {};

  const auto stage_acts = [&](int chunk, int which) {
    if constexpr (NT8 == 1) {
      std::byte* const to = chunks + which * chunk_bytes + 64 + w.body_bytes + lane * 16;
      if (lane < (n_cols - chunk * 256) / 8)
#pragma unroll 1
        for (int a = 0; a < n_acts; ++a)
          copy16(to + a * kStageRowBytes,
                 static_cast<const half*>(x.f16) + row_of(a) * x.f16_stride + chunk * 256 + lane * 8, true);
    }
  };
  if (first_chunk < n_chunks) stage_chunk(chunks, w, panel, first_chunk, lane);
  const bool has_second = in_flight > 1 && first_chunk + chunk_step < n_chunks;
  if (has_second) stage_chunk(chunks + chunk_bytes, w, panel, first_chunk + chunk_step, lane);
  ready();
  const uint4* rows[NT8];
  if constexpr (NT8 > 1) {
#pragma unroll
    for (int n = 0; n < NT8; ++n)
      rows[n] = 8 * n + g >= n_acts ? nullptr
                                    : reinterpret_cast<const uint4*>(static_cast<const half*>(x.f16) +
                                                                     row_of(8 * n + g) * x.f16_stride) +
                                          t;
  }
  if (first_chunk < n_chunks) stage_acts(first_chunk, 0);
  copy_commit();
  if (has_second) stage_acts(first_chunk + chunk_step, 1);
  copy_commit();
  int which = 0;
#pragma unroll 1
  for (int chunk = first_chunk; chunk < n_chunks; chunk += chunk_step, which ^= in_flight - 1) {
    const int n_subs = min(8, (n_cols - chunk * 256) / 32);
    const std::byte* const here = chunks + which * chunk_bytes;
    if (in_flight > 1)
      copy_wait<1>();
    else
      copy_wait<0>();
    __syncwarp();
    const uint4* const acts =
        reinterpret_cast<const uint4*>(here + 64 + w.body_bytes + g * kStageRowBytes) + t;
    const auto load_b = [&](int s, int n) {
      if constexpr (NT8 == 1) {
        return g >= n_acts ? uint4{0, 0, 0, 0} : acts[s * 4];
      } else {
        return rows[n] == nullptr ? uint4{0, 0, 0, 0} : rows[n][chunk * 32 + s * 4];
      }
    };
    for_quant_type(w.dtype, [&]<DType T>() {
      const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(here);
      StagedChunk<T>::build_table(bytes, chunk & ((1 << w.unit_log2) - 1), n_subs, lane, table);
      __syncwarp();
      StagedChunk<T>::template multiply<NT8>(bytes, table, n_subs, (n_acts + 7) / 8, lane, load_b, acc);
    });
    __syncwarp();
    const int ahead = chunk + in_flight * chunk_step;
    if (ahead < n_chunks) {
      stage_chunk(chunks + which * chunk_bytes, w, panel, ahead, lane);
      stage_acts(ahead, which);
    }
    copy_commit();
  }
#pragma unroll
  for (int n = 0; n < NT8; ++n) {
    float* const out = part + n * kPartFloats + 2 * t * 16 + 2 * g;
    *reinterpret_cast<float2*>(out) = {acc[n][0] * x.scale, acc[n][2] * x.scale};
    *reinterpret_cast<float2*>(out + 16) = {acc[n][1] * x.scale, acc[n][3] * x.scale};
  }
}

// log2 of the warps that share a panel. A warp with two chunks spreads the cost of its start, but a matrix of
// few panels needs every warp it can get.
__host__ __device__ constexpr int split_log2(int n_cols, int n_panels, bool dot) {
  const int n_chunks = (n_cols + 255) / 256;
  if (dot)
    n_panels = n_panels > 400 ? n_panels : 0;  // up to there every warp of a matrix is resident at once
  if (n_chunks >= 8) return n_panels > 200 ? 2 : 3;
  return n_chunks >= 4 ? (n_panels > 200 ? 1 : 2) : n_chunks >= 2 ? 1 : 0;
}
__host__ __device__ constexpr int chunks_per_warp(int n_cols, int split) {
  return ((n_cols + 255) / 256 + split - 1) / split;
}

}  // namespace thermo
