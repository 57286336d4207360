// Rows gathered from and joined in device memory, against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "device/testing/skip_without_gpu.h"
#include "kernels/quant_matmul/panel_mma.cuh"
#include "kernels/row_ops/state_rows_cuda.h"
#include "kernels/testing/device_step.h"

namespace thermo {
namespace {

using namespace thermo::testing;

TEST(StateRowsCuda, GathersRowsOfAllTaps) {
  SKIP_WITHOUT_GPU();
  Inputs in(1);
  for (const int n_taps : {1, 3, 5})
    for (const int n_embd : {64, 516, 2048})
      for (const int n : {1, 7, 64, 65, 200})
        for (const bool listed : {false, true}) {
          const int capacity = 210;
          const size_t width = static_cast<size_t>(n_embd), taps = static_cast<size_t>(n_taps);
          const std::vector<float> from = in.normal(taps * capacity * width);
          std::vector<int32_t> rows;
          for (int i = 0; i < n; ++i) rows.push_back(in.below(capacity));
          std::vector<float> want;
          for (int i = 0; i < n; ++i)
            for (size_t tap = 0; tap < taps; ++tap) {
              const size_t row = static_cast<size_t>(listed ? rows[static_cast<size_t>(i)] : i);
              const float* const x = &from[(tap * capacity + row) * width];
              want.insert(want.end(), x, x + width);
            }
          const DeviceArray<float> device_from(from), to(want.size());
          gather_rows_cuda({.from = device_from.data(),
                            .tap_stride = static_cast<int64_t>(capacity * width),
                            .row_stride = n_embd,
                            .n_taps = n_taps,
                            .n_embd = n_embd,
                            .n = n,
                            .rows = listed ? rows.data() : nullptr,
                            .to = to.data()},
                           {});
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          ASSERT_EQ(to.read(), want) << n_taps << " taps of " << n_embd << ", " << n << " rows " << listed;
          ASSERT_TRUE(to.intact());
        }
}

TEST(StateRowsCuda, JoinsPiecesAndNormsThem) {
  SKIP_WITHOUT_GPU();
  Inputs in(2);
  for (const int n_pieces : {1, 2})
    for (const int n_cols : {64, 96, 2048, 25600})
      for (const int n_rows : {1, 5, 33}) {
        const size_t width = static_cast<size_t>(n_cols), n = static_cast<size_t>(n_rows),
                     all = width * static_cast<size_t>(n_pieces);
        const float eps = 1e-6f, out_scale = 16.0f;
        std::vector<float> want(n * all);
        std::vector<DeviceArray<float>> memory;
        memory.reserve(4);
        JoinRowsArgs args{};
        for (int p = 0; p < n_pieces; ++p) {
          const std::vector<float> x = in.spiky(n * width), weight = in.uniform(width, 0.5f, 1.5f);
          const bool normed = n_pieces == 2;
          for (size_t r = 0; r < n; ++r) {
            double square = 0.0;
            for (size_t c = 0; c < width; ++c) square += double{x[r * width + c]} * x[r * width + c];
            const double scale = 1.0 / std::sqrt(square / n_cols + double{eps});
            for (size_t c = 0; c < width; ++c)
              want[r * all + static_cast<size_t>(p) * width + c] =
                  normed ? static_cast<float>(x[r * width + c] * scale * weight[c]) : x[r * width + c];
          }
          memory.emplace_back(x);
          args.pieces[p].x = memory.back().data();
          memory.emplace_back(weight);
          args.pieces[p].norm = normed ? memory.back().data() : nullptr;
        }
        const DeviceArray<float> f32(n * all);
        const DeviceArray<half> f16(n * all);
        args.n_pieces = n_pieces;
        args.n_cols = n_cols;
        args.n_rows = n_rows;
        args.eps = eps;
        args.out.f32 = f32.data();
        args.out.f16 = f16.data();
        args.out.f32_stride = args.out.f16_stride = static_cast<int64_t>(all);
        args.out.scale = out_scale;
        join_rows_cuda(args, {});
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<float> got = f32.read();
        const std::vector<half> got_half = f16.read();
        for (size_t i = 0; i < want.size(); ++i) {
          ASSERT_NEAR(got[i], want[i], 1e-5 * std::fabs(want[i])) << i;
          const size_t at = i / all * all + static_cast<size_t>(act_place(static_cast<int>(i % all)));
          ASSERT_EQ(__half2float(got_half[at]), __half2float(__float2half_rn(got[i] / out_scale))) << i;
        }
        ASSERT_TRUE(f32.intact() && f16.intact());
      }
}

}  // namespace
}  // namespace thermo
