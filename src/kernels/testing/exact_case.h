// For tests that compare a GPU kernel with the processor's kernels bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/host_buffer.h"
#include "kernels/quant_matmul/panel_exact.cuh"
#include "kernels/testing/device_case.h"

namespace thermo {

// The sums of a chunk as operands of a tensor core, by the definition.
inline void put_sum_bytes(BlockActs& chunk) {
  for (BlockActs::Meta& meta : chunk.meta) meta.sum_bytes = 0;
  for (int g = 0; g < 16; ++g) {
    const uint32_t parts = sum_parts(g % 2 == 0 ? chunk.meta[g / 2].sum0 : chunk.meta[g / 2].sum1);
    chunk.meta[g / 4].sum_bytes |= (parts & 255u) << (8 * (g % 4));
    chunk.meta[4 + g / 4].sum_bytes |= (parts >> 8) << (8 * (g % 4));
  }
}

inline constexpr DType kQuantised[] = {DType::Q4_K,   DType::Q5_K, DType::Q6_K, DType::Q8_0, DType::IQ4_XS,
                                       DType::MXFP4,  DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1,
                                       DType::IQ4_NL, DType::Q2_K, DType::Q3_K};

inline std::vector<Isa> vector_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Amx})
    if (isa_available(isa)) isas.push_back(isa);
  return isas;
}

// Values with a few that stand out, so that most codes of a group are small.
inline std::vector<float> spiky(size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) x[i] = normal(random) * (random() % 61 == 0 ? 9.0f : 1.0f);
  return x;
}

// Rows in the form that a type multiplies with.
struct ActRows {
  ActFormat format;
  int n_cols;
  size_t stride;
  HostBuffer memory;

  ActRows(DType weight, const float* x, int n_rows, int cols, float scale, const QuantMatmulKernels& kernels)
      : format(act_format(weight)),
        n_cols(cols),
        stride(act_row_bytes(format, cols)),
        memory(stride * static_cast<size_t>(n_rows)) {
    for (int r = 0; r < n_rows; ++r) {
      kernels.quantize_row(format, x + static_cast<size_t>(r) * cols, cols, row(r));
      scale_act_row(format, cols, scale, row(r));
    }
  }
  std::byte* row(int r) const { return memory.data() + static_cast<size_t>(r) * stride; }

  // As the GPU has them.
  void to_blocks(int r, BlockActs* out) const {
    const int pad = format == ActFormat::Q8x256 ? 256 : 64;
    const int8_t* const codes = reinterpret_cast<const int8_t*>(row(r));
    const std::byte* const meta = row(r) + (n_cols + pad - 1) / pad * pad;
    for (int s = 0; s < n_cols / 32; ++s) {
      BlockActs& chunk = out[s / 8];
      BlockActs::Meta& to = chunk.meta[s % 8];
      to = {format == ActFormat::Q8x256 ? reinterpret_cast<const ActMeta256*>(meta)[s / 8].d
                                        : reinterpret_cast<const ActMeta32*>(meta)[s].d,
            0, 0, 0};
      for (int c = 0; c < 32; ++c) {
        const int8_t code = codes[s * 32 + c];
        (c < 16 ? to.sum0 : to.sum1) += code;
        reinterpret_cast<int8_t*>(&chunk.codes[s % 8][c % 16 / 4][c / 16])[c % 4] = code;
      }
    }
    for (int i = 0; i < (n_cols + 255) / 256; ++i) put_sum_bytes(out[i]);
  }
};

inline std::vector<float> multiply(const HostMatrix& w, const ActRows& acts, int n_rows,
                                   const QuantMatmulKernels& kernels) {
  HostBuffer panels(w.panels.size());
  std::memcpy(panels.data(), w.panels.data(), w.panels.size());
  std::vector<float> y(static_cast<size_t>(n_rows) * static_cast<size_t>(w.n_rows));
  kernels.matmul({.dtype = w.dtype,
                  .n_cols = w.n_cols,
                  .panels = panels.data(),
                  .n_panels = n_panels(w.n_rows),
                  .n_rows = w.n_rows,
                  .acts = acts.memory.data(),
                  .act_stride = acts.stride,
                  .act_index = nullptr,
                  .n_act = n_rows,
                  .y = y.data(),
                  .y_stride = w.n_rows});
  return y;
}

inline void expect_bits(const float* got, const float* want, size_t n, const std::string& what) {
  size_t wrong = 0, first = 0;
  for (size_t i = 0; i < n; ++i)
    if (std::memcmp(got + i, want + i, sizeof(float)) != 0 && wrong++ == 0) first = i;
  EXPECT_EQ(wrong, 0u) << what << ": of " << n << ", the first at " << first << ": " << got[first] << " and "
                       << want[first];
}

}  // namespace thermo
