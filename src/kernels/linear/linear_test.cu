// Every weight type through the few-row and the many-row product, odd sizes, guard bands after the output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "device/buffer.h"
#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_tiles_cuda.h"
#include "kernels/quant_matmul/panel_exact.cuh"
#include "kernels/quant_matmul/panel_mma.cuh"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

constexpr float kGuard = -12345.0f;
constexpr size_t kGuardFloats = 64;

// Where the product gets its rows from.
enum class Source { Halves, Norm };

// `parts`: the product in as many parts as linear_parts() says.
void run_case(DType dtype, int n_rows, int n_cols, int n_acts, Source source = Source::Halves,
              bool parts = false) {
  std::mt19937 random(static_cast<unsigned>(n_rows * 31 + n_cols * 7 + n_acts));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> weights(static_cast<size_t>(n_rows) * n_cols), x(static_cast<size_t>(n_acts) * n_cols);
  for (float& w : weights) w = normal(random) * 0.05f;
  for (float& v : x) v = normal(random) * (random() % 64 == 0 ? 20.0f : 1.0f);
  const size_t bytes = row_bytes(dtype, static_cast<uint64_t>(n_cols));
  std::vector<std::byte> rows(bytes * static_cast<size_t>(n_rows));
  for (int r = 0; r < n_rows; ++r)
    quantize_row(dtype, weights.data() + static_cast<size_t>(r) * n_cols, n_cols,
                 rows.data() + bytes * static_cast<size_t>(r));
  // A norm: the weights and the raw row whose product the row is.
  std::vector<float> norm(static_cast<size_t>(n_cols)), raw(static_cast<size_t>(n_cols));
  if (source == Source::Norm) {
    double square = 0;
    for (int c = 0; c < n_cols; ++c) {
      norm[static_cast<size_t>(c)] = 1.0f + normal(random) * 0.2f;
      raw[static_cast<size_t>(c)] = x[static_cast<size_t>(c)];
      square += static_cast<double>(raw[static_cast<size_t>(c)]) * raw[static_cast<size_t>(c)];
    }
    const double scale = 1.0 / std::sqrt(square / n_cols + 1e-6);
    for (int c = 0; c < n_cols; ++c)
      x[static_cast<size_t>(c)] =
          static_cast<float>(raw[static_cast<size_t>(c)] * scale * norm[static_cast<size_t>(c)]);
  }
  std::vector<float> want(static_cast<size_t>(n_acts) * n_rows);
  quant_matmul_ref(dtype, rows.data(), n_rows, n_cols, x.data(), n_acts, want.data());

  const size_t panel = panel_bytes(dtype, n_cols);
  std::vector<std::byte> packed(packed_matrix_bytes(dtype, n_rows, n_cols) + 64);
  std::byte* const aligned = packed.data() + (64 - reinterpret_cast<size_t>(packed.data()) % 64) % 64;
  for (int p = 0; p < n_panels(n_rows); ++p)
    pack_panel(dtype, rows.data(), n_rows, n_cols, p, aligned + static_cast<size_t>(p) * panel);
  DeviceBuffer device_panels(packed_matrix_bytes(dtype, n_rows, n_cols));
  cudaMemcpy(device_panels.data(), aligned, device_panels.size(), cudaMemcpyHostToDevice);

  const size_t stride = static_cast<size_t>((n_cols + 31) / 32 * 32);
  std::vector<half> x16(stride * static_cast<size_t>(n_acts));
  for (int a = 0; a < n_acts; ++a)
    for (int c = 0; c < n_cols; ++c)
      x16[static_cast<size_t>(a) * stride + static_cast<size_t>(act_place(c))] =
          __float2half_rn(x[static_cast<size_t>(a) * n_cols + c]);
  DeviceBuffer device_x16(x16.size() * sizeof(half)), device_x(x.size() * sizeof(float));
  cudaMemcpy(device_x16.data(), x16.data(), device_x16.size(), cudaMemcpyHostToDevice);
  cudaMemcpy(device_x.data(), x.data(), device_x.size(), cudaMemcpyHostToDevice);
  DeviceLinearArgs args;
  args.jobs[0].w = with_chunks({nullptr, panel, dtype, n_rows, n_cols});
  const int n_parts = parts ? linear_parts(args.jobs[0].w, n_acts) : 1;
  std::vector<float> got(want.size() * static_cast<size_t>(n_parts) + kGuardFloats, kGuard);
  DeviceBuffer device_y(got.size() * sizeof(float));
  cudaMemcpy(device_y.data(), got.data(), device_y.size(), cudaMemcpyHostToDevice);

  args.jobs[0].w.panels = reinterpret_cast<const uint8_t*>(device_panels.data());
  args.jobs[0].y = device_y.as<float>();
  args.jobs[0].y_stride = n_rows;
  args.jobs[0].k_parts = n_parts;
  args.jobs[0].part_stride = static_cast<int64_t>(want.size());
  args.n_jobs = 1;
  args.x = {device_x16.data(), device_x.as<float>(), static_cast<int64_t>(stride), n_cols, 1.0f};
  args.n_acts = n_acts;
  DeviceBuffer device_norm(norm.size() * sizeof(float)), device_raw(raw.size() * sizeof(float));
  cudaMemcpy(device_norm.data(), norm.data(), device_norm.size(), cudaMemcpyHostToDevice);
  cudaMemcpy(device_raw.data(), raw.data(), device_raw.size(), cudaMemcpyHostToDevice);
  if (source == Source::Norm) args.norm = {device_raw.as<float>(), device_norm.as<float>(), 1e-6f};
  linear_cuda(args, {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  cudaMemcpy(got.data(), device_y.data(), device_y.size(), cudaMemcpyDeviceToHost);
  for (size_t i = got.size() - kGuardFloats; i < got.size(); ++i)
    ASSERT_EQ(got[i], kGuard) << "written past the end";
  for (size_t i = want.size(); i < got.size() - kGuardFloats; ++i) got[i % want.size()] += got[i];

  // f16 rounding of weights and activations: 2^-11 each, random signs, over the norm of the products.
  const double unit = is_float_type(dtype) ? 1e-6 : 2e-3;
  for (int a = 0; a < n_acts; ++a)
    for (int r = 0; r < n_rows; ++r) {
      double norm = 0, rounding = 0;
      for (int c = 0; c < n_cols; ++c) {
        const double p = static_cast<double>(weights[static_cast<size_t>(r) * n_cols + c]) *
                         x[static_cast<size_t>(a) * n_cols + c];
        norm += p * p;
        // Through a norm the row is rounded to int8.
        if (source == Source::Norm) {
          float top = 0.0f;
          const int group = act_group_cols(dtype);
          for (int k = c / group * group; k < c / group * group + group; ++k)
            top = std::max(top, std::fabs(x[static_cast<size_t>(a) * n_cols + k]));
          const double w = weights[static_cast<size_t>(r) * n_cols + c], step = top / 127.0;
          rounding += w * w * step * step / 12.0;
        }
      }
      const size_t i = static_cast<size_t>(a) * n_rows + r;
      ASSERT_NEAR(got[i], want[i], unit * 4 * std::sqrt(norm) + 5 * std::sqrt(rounding) + 1e-5)
          << dtype_name(dtype) << " rows " << n_rows << " cols " << n_cols << " acts " << n_acts << " at "
          << a << ", " << r << " source " << static_cast<int>(source);
    }
}

TEST(LinearCuda, MatchesTheReferenceForEveryTypeAndSize) {
  SKIP_WITHOUT_GPU();
  const DType types[] = {DType::F32,  DType::F16,    DType::BF16,   DType::Q4_0, DType::Q4_1, DType::Q5_0,
                         DType::Q5_1, DType::Q8_0,   DType::Q2_K,   DType::Q3_K, DType::Q4_K, DType::Q5_K,
                         DType::Q6_K, DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4};
  for (const DType dtype : types) {
    const int block = dtype_info(dtype).block_elements;
    for (const int n_acts :
         {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 64, 65, 130}) {
      run_case(dtype, 33, 512, n_acts);
      if (n_acts % 4 < 2) run_case(dtype, 77, 1280, n_acts);
      if (block <= 32) run_case(dtype, 16, 96, n_acts);
      if (block == 32) run_case(dtype, 50, 352, n_acts);
    }
    if (has_dot(dtype)) {
      for (const int n_cols : {256, 2048, 2304, 5120}) {
        run_case(dtype, 33, n_cols, 1, Source::Norm);
        run_case(dtype, 200, n_cols, 1, Source::Norm);
      }
      if (block <= 32) run_case(dtype, 20, 96, 1, Source::Norm);
    }
    run_case(dtype, 1, 256, 1);
    run_case(dtype, 129, 768, 2);
    run_case(dtype, 47, 2304, 5);
    run_case(dtype, 200, 2048, 70);
    for (const int n_acts : {2, 33, 64, 130}) {
      run_case(dtype, 77, 2304, n_acts, Source::Halves, true);
      run_case(dtype, 130, 512, n_acts, Source::Halves, true);  // fewer chunks than parts
    }
    if (is_float_type(dtype)) run_case(dtype, 250, 100, 1100);  // enough for tiles
  }
}

}  // namespace
}  // namespace thermo
