// One warp's share of a product of one to four activation rows with weights of a type that has_dot(): one
// panel, every n-th chunk of 256 columns. The first chunk's weights are loaded into registers and the
// second's asked into L2 before `ready()` is called: between kernels that is the wait for the one before, so
// weights travel while it ends.
#pragma once

#include "kernels/quant_matmul/panel_mma8.cuh"

namespace thermo {

// Brings a chunk as far as L2.
__device__ __forceinline__ void prefetch_chunk(const DeviceMatrix& w, const uint8_t* panel, int chunk,
                                               int lane) {
  const int body = (chunk >> w.unit_log2) * w.unit_bytes + (chunk & ((1 << w.unit_log2) - 1)) * w.body_bytes;
  const int at = body + lane * 128;
  if (lane * 128 < 64 + w.body_bytes && at < static_cast<int>(w.panel_bytes))
    asm volatile("prefetch.global.L2 [%0];" ::"l"(panel + at));
}

template <class Body>
__host__ __device__ __forceinline__ void for_dot_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::Q4_K:
      body.template operator()<DType::Q4_K>();
      break;
    case DType::Q5_K:
      body.template operator()<DType::Q5_K>();
      break;
    case DType::Q6_K:
      body.template operator()<DType::Q6_K>();
      break;
    default:
      body.template operator()<DType::Q8_0>();
      break;
  }
}

// Activation rows that lie as DotActs in memory. Row a of the tile is row_of(a) of x.
template <class RowOf>
struct StoredActs {
  const DeviceActs& x;
  const RowOf& row_of;

  __device__ __forceinline__ void prepare(int, int, int) const {}
  __device__ __forceinline__ const DotActs& get(int chunk, int a) const {
    return static_cast<const DotActs*>(x.i8)[row_of(a) * x.i8_stride + chunk];
  }
};

// Activation rows in the f16 form, rounded by the warp that needs them. `stage`: kActs of this warp.
template <int kActs, class RowOf>
struct RoundedActs {
  const DeviceActs& x;
  const RowOf& row_of;
  DotActs* stage;

  __device__ __forceinline__ void prepare(int chunk, int n_cols, int lane) const {
    __syncwarp();
#pragma unroll
    for (int a = 0; a < kActs; ++a)
      make_dot_acts(static_cast<const half*>(x.f16) + row_of(a) * x.f16_stride, chunk, n_cols, x.scale, lane,
                    stage[a]);
    __syncwarp();
  }
  __device__ __forceinline__ const DotActs& get(int, int a) const {
    return stage[a];
  }
};

// One row that the block has put into shared memory (make_norm_acts).
struct SharedActs {
  const DotActs* chunks;

  __device__ __forceinline__ void prepare(int, int, int) const {}
  __device__ __forceinline__ const DotActs& get(int chunk, int) const { return chunks[chunk]; }
};

// part[a * 16 + row] = the warp's share of a matrix of type T. `panel` null: nothing to do but ready().
template <DType T, int kActs, class Acts, class Ready>
__device__ __forceinline__ void dot_product_of(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                               int chunk_step, const Acts& acts, int lane, float* part,
                                               const Ready& ready) {
  if (panel == nullptr) {
    ready();
    return;
  }
  const int n_chunks = dot_chunks(w.n_cols), s = lane >> 2;
  float acc[kActs][4] = {};
  DotChunk<T> data;
  const auto load = [&](int chunk) {
    if (chunk < n_chunks) data.load(panel, chunk, min(8, (w.n_cols - chunk * 256) / 32), lane);
  };
  load(first_chunk);
  if (first_chunk + chunk_step < n_chunks) prefetch_chunk(w, panel, first_chunk + chunk_step, lane);
  ready();
#pragma unroll 1
  for (int chunk = first_chunk; chunk < n_chunks; chunk += chunk_step) {
    if (chunk != first_chunk) load(chunk);
    acts.prepare(chunk, w.n_cols, lane);
    data.template multiply<kActs>([&](int a) -> const DotActs& { return acts.get(chunk, a); },
                                  chunk * 256 + s * 32 < w.n_cols, lane, acc);
  }
  store_dot<kActs>(acc, lane, part);
}

template <int kActs, class Acts, class Ready>
__device__ __forceinline__ void dot_product(const DeviceMatrix& w, const uint8_t* panel, int first_chunk,
                                            int chunk_step, const Acts& acts, int lane, float* part,
                                            const Ready& ready) {
  for_dot_type(w.dtype, [&]<DType T>() {
    dot_product_of<T, kActs>(w, panel, first_chunk, chunk_step, acts, lane, part, ready);
  });
}

// The norm that a product of one row reads through: the row is x * weight / sqrt(mean(x^2) + eps).
// x * weight is rounded and published before the mean is known: it is a factor of the result.
//
// All threads of the block. Before the barrier that publishes `out` each warp leaves its sum of squares in
// `squares`; norm_scale() adds them up after it.
struct NormWeights {
  float4 low, high;  // of this lane's columns of the warp's first chunk

  __device__ __forceinline__ void load(const float* weight, int n_cols, int warp, int lane) {
    const int at = warp * 256 + (lane >> 2) * 32 + (lane & 3) * 4;
    low = high = {0.0f, 0.0f, 0.0f, 0.0f};
    if (at < n_cols) {
      low = __ldg(reinterpret_cast<const float4*>(weight + at));
      high = __ldg(reinterpret_cast<const float4*>(weight + at + 16));
    }
  }
};

// The lane's columns of a chunk of the row, for who wants them on their way before it has time for them.
struct NormRow {
  float4 low, high;

  __device__ __forceinline__ void load(const float* x, int n_cols, int chunk, int lane) {
    const int at = chunk * 256 + (lane >> 2) * 32 + (lane & 3) * 4;
    low = high = {0.0f, 0.0f, 0.0f, 0.0f};
    if (at < n_cols) {
      low = *reinterpret_cast<const float4*>(x + at);
      high = *reinterpret_cast<const float4*>(x + at + 16);
    }
  }
  // put(low, high) of their products with the weights; returns the lane's sum of squares. Every kernel makes
  // the same sum: it is written so that the compiler has no choice.
  template <class Put>
  __device__ __forceinline__ float make_acts(const NormWeights& w, const Put& put) const {
    const float4 a = low, b = high;
    put(float4{a.x * w.low.x, a.y * w.low.y, a.z * w.low.z, a.w * w.low.w},
        float4{b.x * w.high.x, b.y * w.high.y, b.z * w.high.z, b.w * w.high.w});
    float square = __fmul_rn(a.x, a.x);
    for (const float x : {a.y, a.z, a.w, b.x, b.y, b.z, b.w}) square = __fmaf_rn(x, x, square);
    return square;
  }
};

// put(chunk, low, high): of the warp's chunks.
template <class Put>
__device__ __forceinline__ void make_norm_acts(const float* x, const float* weight, const NormWeights& first,
                                               int n_cols, int warp, int n_warps, int lane, float* squares,
                                               const Put& put) {
  float square = 0.0f;
  for (int chunk = warp; chunk < dot_chunks(n_cols); chunk += n_warps) {
    NormRow row;
    NormWeights w = first;
    if (chunk != warp) w.load(weight, n_cols, chunk, lane);
    row.load(x, n_cols, chunk, lane);
    square += row.make_acts(w, [&](float4 low, float4 high) { put(chunk, low, high); });
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) square += __shfl_xor_sync(0xffffffffu, square, mask);
  if (lane == 0) squares[warp] = square;
}

__device__ __forceinline__ float norm_scale(const float* squares, int n_warps, int n_cols, float eps) {
  float square = 0.0f;
  for (int w = 0; w < n_warps; ++w) square += squares[w];
  return rsqrtf(square / static_cast<float>(n_cols) + eps);
}

// Four floats of a row that is being rounded, by the thread of column 4c; the four threads of 16 columns are
// neighbours and all take part. `out`: the row's chunks.
__device__ __forceinline__ void store_dot_acts(DotActs* out, int c, const float (&y)[4]) {
  const unsigned mask = 0xfu << (threadIdx.x & 28);
  float top = max_abs(y[0], y[1], y[2], y[3]);
  top = fmaxf(top, __shfl_xor_sync(mask, top, 1));
  top = fmaxf(top, __shfl_xor_sync(mask, top, 2));
  const uint32_t codes = round_codes(y[0], y[1], y[2], y[3], dot_inverse(top));
  int sum = __dp4a(static_cast<int>(codes), 0x01010101, 0);
  sum += __shfl_xor_sync(mask, sum, 1);
  sum += __shfl_xor_sync(mask, sum, 2);
  DotActs& chunk = out[c / 64];
  const int sub = c / 8 % 8, half = c / 4 % 2;
  chunk.codes[sub][c % 4][half] = codes;
  if (c % 4 == 0) {
    const float step = top * (1.0f / 127.0f);
    float* const meta = reinterpret_cast<float*>(&chunk.meta[sub]);
    meta[half] = step;
    meta[2 + half] = step * static_cast<float>(sum);
  }
}

}  // namespace thermo
