#include <vector>

#include "kernels/dequantize/dequantize.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {

void quant_matmul_ref(DType dtype, const std::byte* rows, int n_rows, int n_cols, const float* x, int n_act,
                      float* y) {
  const size_t stride = row_bytes(dtype, static_cast<uint64_t>(n_cols));
  std::vector<float> w(static_cast<size_t>(n_cols));
  for (int r = 0; r < n_rows; ++r) {
    dequantize_row(dtype, rows + static_cast<size_t>(r) * stride, n_cols, w.data());
    for (int t = 0; t < n_act; ++t) {
      const float* xt = x + static_cast<size_t>(t) * static_cast<size_t>(n_cols);
      double sum = 0;
      for (int c = 0; c < n_cols; ++c) sum += static_cast<double>(w[c]) * static_cast<double>(xt[c]);
      y[static_cast<size_t>(t) * static_cast<size_t>(n_rows) + static_cast<size_t>(r)] =
          static_cast<float>(sum);
    }
  }
}

}  // namespace thermo
