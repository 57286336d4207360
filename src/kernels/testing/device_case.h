// Weight matrices for tests of GPU kernels: random rows, quantised and packed on the host, and the product by
// definition.
#pragma once

#include <cuda_runtime.h>

#include <random>
#include <vector>

#include "device/buffer.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/linear/device_matrix.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {

struct HostMatrix {
  DType dtype = DType::F32;
  int n_rows = 0, n_cols = 0;
  std::vector<std::byte> rows;    // as in a file
  std::vector<std::byte> panels;  // as in GPU memory

  HostMatrix() = default;
  HostMatrix(DType type, int rows_, int cols, std::mt19937& random, float deviation)
      : dtype(type), n_rows(rows_), n_cols(cols) {
    std::normal_distribution<float> normal(0.0f, deviation);
    std::vector<float> row(static_cast<size_t>(n_cols));
    const size_t bytes = row_bytes(dtype, static_cast<uint64_t>(n_cols));
    rows.resize(bytes * static_cast<size_t>(n_rows));
    for (int r = 0; r < n_rows; ++r) {
      for (float& w : row) w = normal(random);
      quantize_row(dtype, row.data(), n_cols, rows.data() + bytes * static_cast<size_t>(r));
    }
    pack();
  }
  void pack() {
    const size_t panel = panel_bytes(dtype, n_cols);
    std::vector<std::byte> packed(packed_matrix_bytes(dtype, n_rows, n_cols) + 64);
    std::byte* const aligned = packed.data() + (64 - reinterpret_cast<size_t>(packed.data()) % 64) % 64;
    for (int p = 0; p < thermo::n_panels(n_rows); ++p)
      pack_panel(dtype, rows.data(), n_rows, n_cols, p, aligned + static_cast<size_t>(p) * panel);
    panels.assign(aligned, aligned + packed_matrix_bytes(dtype, n_rows, n_cols));
  }

  // Columns begin .. end, at the bounds of blocks.
  HostMatrix columns(int begin, int end) const {
    HostMatrix part;
    part.dtype = dtype;
    part.n_rows = n_rows;
    part.n_cols = end - begin;
    const size_t bytes = row_bytes(dtype, static_cast<uint64_t>(n_cols)),
                 at = row_bytes(dtype, static_cast<uint64_t>(begin)),
                 taken = row_bytes(dtype, static_cast<uint64_t>(end - begin));
    for (int r = 0; r < n_rows; ++r) {
      const auto from = rows.begin() + static_cast<std::ptrdiff_t>(bytes * static_cast<size_t>(r) + at);
      part.rows.insert(part.rows.end(), from, from + static_cast<std::ptrdiff_t>(taken));
    }
    part.pack();
    return part;
  }

  // With its panels at `address` (or at that offset).
  DeviceMatrix at(size_t address) const {
    return with_chunks(
        {reinterpret_cast<const uint8_t*>(address), panel_bytes(dtype, n_cols), dtype, n_rows, n_cols});
  }
  std::vector<float> times(const float* x) const {
    std::vector<float> y(static_cast<size_t>(n_rows));
    quant_matmul_ref(dtype, rows.data(), n_rows, n_cols, x, 1, y.data());
    return y;
  }
};

template <class T>
DeviceBuffer to_device(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T) + 1);
  cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  return buffer;
}
template <class T>
std::vector<T> to_host(const T* from, size_t n) {
  std::vector<T> values(n);
  cudaMemcpy(values.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost);
  return values;
}

}  // namespace thermo
