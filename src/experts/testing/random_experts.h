// Catalogs of random experts for tests, with what each expert computes in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "experts/catalog.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo::testing {

struct LayerShape {
  DType gate_type = DType::F32;
  DType down_type = DType::F32;
  int n_expert = 0;  // 0: a dense layer
  int n_ff = 32;
};

// Owns the file rows that its catalog views.
class RandomExperts {
 public:
  RandomExperts(const std::vector<LayerShape>& shapes, int n_embd, int n_active, unsigned seed = 1)
      : n_embd_(n_embd), random_(seed) {
    std::vector<std::vector<Ffn>> layers;
    for (const LayerShape& shape : shapes) {
      std::vector<Ffn> experts;
      for (int e = 0; e < shape.n_expert; ++e)
        experts.push_back({matrix(shape.gate_type, shape.n_ff, n_embd),
                           matrix(shape.gate_type, shape.n_ff, n_embd),
                           matrix(shape.down_type, n_embd, shape.n_ff)});
      layers.push_back(std::move(experts));
    }
    catalog = ExpertCatalog::of(std::move(layers), n_active, n_embd);
  }
  RandomExperts(const RandomExperts&) = delete;
  RandomExperts& operator=(const RandomExperts&) = delete;

  ExpertCatalog catalog;

  // down (silu(gate x) * (up x)), with the weights as the file decodes.
  std::vector<double> apply(int layer, int expert, const float* x) const {
    const Ffn& ffn = catalog.layers[static_cast<size_t>(layer)].experts[static_cast<size_t>(expert)];
    const std::vector<double> input(x, x + n_embd_);
    std::vector<double> g = times(ffn.gate, input);
    const std::vector<double> u = times(ffn.up, input);
    for (size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1.0 + std::exp(-g[i])) * u[i];
    return times(ffn.down, g);
  }

 private:
  Matrix matrix(DType dtype, int n_rows, int n_cols) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(n_cols)));
    std::vector<float> values(static_cast<size_t>(n_rows) * static_cast<size_t>(n_cols));
    for (float& value : values) value = normal(random_);
    std::vector<std::byte> rows(row_bytes(dtype, values.size()));
    quantize_row(dtype, values.data(), static_cast<int64_t>(values.size()), rows.data());
    storage_.push_back(std::move(rows));
    return {.dtype = dtype,
            .n_rows = n_rows,
            .n_cols = n_cols,
            .panels = nullptr,
            .rows = storage_.back().data()};
  }

  static std::vector<double> times(const Matrix& m, const std::vector<double>& x) {
    std::vector<float> row(static_cast<size_t>(m.n_cols));
    std::vector<double> y(static_cast<size_t>(m.n_rows));
    for (size_t r = 0; r < y.size(); ++r) {
      dequantize_row(m.dtype, m.rows + r * row_bytes(m.dtype, row.size()), m.n_cols, row.data());
      for (size_t c = 0; c < row.size(); ++c) y[r] += static_cast<double>(row[c]) * x[c];
    }
    return y;
  }

  int n_embd_;
  std::mt19937 random_;
  std::vector<std::vector<std::byte>> storage_;
};

}  // namespace thermo::testing
