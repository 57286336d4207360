// Products of more than 64 rows on Hopper: every quantised type, odd sizes, guard bands, and that they are
// used at all.
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
#include "kernels/linear/linear_wide_cuda.h"
#include "kernels/linear/wide_product.cuh"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

constexpr DType kTypes[] = {DType::Q4_0,   DType::Q4_1,   DType::Q5_0, DType::Q5_1, DType::Q8_0,
                            DType::Q2_K,   DType::Q3_K,   DType::Q4_K, DType::Q5_K, DType::Q6_K,
                            DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4};
constexpr float kGuard = -12345.0f;
constexpr size_t kGuardFloats = 64;

bool has_wide() {
  return linear_room(256, 256) > 0;
}
#define SKIP_WITHOUT_WIDE() \
  SKIP_WITHOUT_GPU();       \
  if (!has_wide()) GTEST_SKIP() << "of compute capability 9.0"

std::vector<float> random_floats(size_t n, unsigned seed, float size, bool spikes) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random) * (spikes && random() % 64 == 0 ? 20.0f : 1.0f);
  return x;
}

template <class T>
DeviceBuffer on_device(const std::vector<T>& x) {
  DeviceBuffer buffer(x.size() * sizeof(T));
  cudaMemcpy(buffer.data(), x.data(), buffer.size(), cudaMemcpyHostToDevice);
  return buffer;
}

// A matrix on the device, and its rows as they were before and after quantisation.
struct TestMatrix {
  std::vector<float> floats;
  std::vector<std::byte> rows;
  DeviceBuffer panels;
  DeviceMatrix device;

  TestMatrix(DType dtype, int n_rows, int n_cols, unsigned seed)
      : floats(random_floats(static_cast<size_t>(n_rows) * static_cast<size_t>(n_cols), seed, 0.05f, false)),
        panels(packed_matrix_bytes(dtype, n_rows, n_cols)) {
    const size_t bytes = row_bytes(dtype, static_cast<uint64_t>(n_cols)), panel = panel_bytes(dtype, n_cols);
    rows.resize(bytes * static_cast<size_t>(n_rows));
    for (int r = 0; r < n_rows; ++r)
      quantize_row(dtype, floats.data() + static_cast<size_t>(r) * static_cast<size_t>(n_cols), n_cols,
                   rows.data() + bytes * static_cast<size_t>(r));
    std::vector<std::byte> packed(panels.size() + 64);
    std::byte* const aligned = packed.data() + (64 - reinterpret_cast<size_t>(packed.data()) % 64) % 64;
    for (int p = 0; p < n_panels(n_rows); ++p)
      pack_panel(dtype, rows.data(), n_rows, n_cols, p, aligned + static_cast<size_t>(p) * panel);
    cudaMemcpy(panels.data(), aligned, panels.size(), cudaMemcpyHostToDevice);
    device = with_chunks({reinterpret_cast<const uint8_t*>(panels.data()), panel, dtype, n_rows, n_cols});
  }
};

// Rows in the f16 form.
struct TestRows {
  std::vector<float> floats;
  int n, n_cols;
  size_t stride;
  std::vector<half> halves;
  DeviceBuffer device;

  TestRows(int n_rows, int columns, unsigned seed)
      : floats(random_floats(static_cast<size_t>(n_rows) * static_cast<size_t>(columns), seed, 1.0f, true)),
        n(n_rows),
        n_cols(columns),
        stride(static_cast<size_t>((columns + 31) / 32 * 32)),
        halves(stride * static_cast<size_t>(n_rows)),
        device(halves.size() * sizeof(half)) {
    for (int a = 0; a < n; ++a)
      for (int c = 0; c < n_cols; ++c)
        halves[static_cast<size_t>(a) * stride + static_cast<size_t>(act_place(c))] =
            __float2half_rn(row(a)[c]);
    cudaMemcpy(device.data(), halves.data(), device.size(), cudaMemcpyHostToDevice);
  }
  const float* row(int a) const {
    return floats.data() + static_cast<size_t>(a) * static_cast<size_t>(n_cols);
  }
  DeviceActs acts(float scale = 1.0f) const {
    DeviceActs x;
    x.f16 = device.data();
    x.f16_stride = static_cast<int64_t>(stride);
    x.scale = scale;
    return x;
  }
};

// Some of the rows: the ends of all tiles, and a few others.
std::vector<int> some_rows(int n) {
  std::vector<int> some;
  for (int a = 0; a < n; ++a)
    if (a % 256 < 3 || a % 256 > 253 || a + 2 >= n || a % 37 == 0) some.push_back(a);
  return some;
}

// The products of these rows, and what rounding of weights and rows to f16 may change: 2^-11 each, random
// signs, over the norm of the products.
struct Expected {
  std::vector<float> y;
  std::vector<double> bound;

  Expected(const TestMatrix& w, const TestRows& x, const std::vector<int>& some) {
    const int n_rows = w.device.n_rows, n_cols = w.device.n_cols, n = static_cast<int>(some.size());
    std::vector<float> rows;
    for (const int a : some) rows.insert(rows.end(), x.row(a), x.row(a) + n_cols);
    y.resize(some.size() * static_cast<size_t>(n_rows));
    quant_matmul_ref(w.device.dtype, w.rows.data(), n_rows, n_cols, rows.data(), n, y.data());
    for (int i = 0; i < n; ++i)
      for (int r = 0; r < n_rows; ++r) {
        float norm = 0;
        for (int c = 0; c < n_cols; ++c) {
          const float p =
              w.floats[static_cast<size_t>(r) * static_cast<size_t>(n_cols) + static_cast<size_t>(c)] *
              rows[static_cast<size_t>(i) * static_cast<size_t>(n_cols) + static_cast<size_t>(c)];
          norm += p * p;
        }
        bound.push_back(2e-3 * 4 * std::sqrt(static_cast<double>(norm)) + 1e-5);
      }
  }
};

struct Job {
  DType dtype;
  int n_rows;
};

// All jobs in one call, with k_parts parts; y_more: floats between the rows of y.
void run_case(const std::vector<Job>& jobs, int n_cols, int n_acts, int k_parts = 1, int y_more = 0,
              float scale = 1.0f) {
  const TestRows x(n_acts, n_cols, static_cast<unsigned>(n_cols * 7 + n_acts));
  const std::vector<int> some = some_rows(n_acts);
  DeviceBuffer tiles(wide_bytes(n_acts, n_cols));
  cudaMemset(tiles.data(), 0xff, tiles.size());  // NaN where nothing is written
  std::vector<TestMatrix> matrices;
  std::vector<DeviceBuffer> outputs;
  matrices.reserve(jobs.size());
  DeviceLinearArgs args;
  for (const Job& job : jobs) {
    matrices.emplace_back(job.dtype, job.n_rows, n_cols, static_cast<unsigned>(job.n_rows * 31 + n_cols));
    const size_t stride = static_cast<size_t>(job.n_rows + y_more),
                 part = stride * static_cast<size_t>(n_acts);
    const std::vector<float> guard(part * static_cast<size_t>(k_parts) + kGuardFloats, kGuard);
    outputs.push_back(on_device(guard));
    args.jobs[args.n_jobs++] = {.w = matrices.back().device,
                                .y = outputs.back().as<float>(),
                                .y_stride = static_cast<int64_t>(stride),
                                .k_parts = k_parts,
                                .part_stride = static_cast<int64_t>(part)};
  }
  args.n_acts = n_acts;
  args.x = x.acts(scale);
  wide_tiles_cuda(args.x, nullptr, n_acts, n_cols, tiles.data(), {});
  linear_wide_cuda(args, tiles.data(), {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (size_t j = 0; j < jobs.size(); ++j) {
    const size_t n_rows = static_cast<size_t>(jobs[j].n_rows), stride = n_rows + static_cast<size_t>(y_more),
                 part = stride * static_cast<size_t>(n_acts);
    std::vector<float> got(outputs[j].size() / sizeof(float));
    cudaMemcpy(got.data(), outputs[j].data(), outputs[j].size(), cudaMemcpyDeviceToHost);
    for (size_t i = got.size() - kGuardFloats; i < got.size(); ++i)
      ASSERT_EQ(got[i], kGuard) << "written past the end";
    const Expected want(matrices[j], x, some);
    for (size_t i = 0; i < some.size(); ++i) {
      for (size_t r = n_rows; r < stride; ++r)
        ASSERT_EQ(got[static_cast<size_t>(some[i]) * stride + r], kGuard) << "written between rows";
      for (size_t r = 0; r < n_rows; ++r) {
        float sum = 0.0f;
        for (int k = 0; k < k_parts; ++k)
          sum += got[static_cast<size_t>(k) * part + static_cast<size_t>(some[i]) * stride + r];
        ASSERT_NEAR(sum, want.y[i * n_rows + r] * scale,
                    want.bound[i * n_rows + r] * static_cast<double>(scale))
            << dtype_name(jobs[j].dtype) << " rows " << n_rows << " cols " << n_cols << " acts " << n_acts
            << " parts " << k_parts << " at " << some[i] << ", " << r;
      }
    }
  }
}

TEST(LinearWideCuda, IsThereOnHopper) {
  SKIP_WITHOUT_GPU();
  if (device_in_use().compute_capability != 90) GTEST_SKIP() << "of compute capability 9.0";
  EXPECT_TRUE(has_wide());
}

TEST(LinearWideCuda, MatchesTheReferenceForEveryTypeAndSize) {
  SKIP_WITHOUT_WIDE();
  for (const DType dtype : kTypes) {
    run_case({{dtype, 140}}, 512, 300);
    run_case({{dtype, 33}}, 1280, 200, 2);
    run_case({{dtype, 200}}, 512, 100);
    run_case({{dtype, 257}}, 256, 257, 1, 3);
    if (dtype_info(dtype).block_elements == 32) run_case({{dtype, 50}}, 352, 256);
    if (dtype_info(dtype).block_elements == 32) run_case({{dtype, 130}}, 96, 70);
  }
  run_case({{DType::Q4_K, 1}}, 256, 1);
  run_case({{DType::Q5_K, 2000}}, 768, 128, 2);
  run_case({{DType::Q4_K, 5000}}, 768, 1030, 3);  // several items of a block
  run_case({{DType::Q6_K, 2000}}, 2304, 520, 2);
  run_case({{DType::Q4_K, 300}, {DType::Q6_K, 129}, {DType::Q4_K, 48}, {DType::Q8_0, 64}}, 512, 513);
  run_case({{DType::Q4_K, 140}}, 512, 300, 1, 0, 16.0f);
}

// Where column c of row a lies in tiles, in halves.
size_t place_in_tiles(int a, int n_acts, int c, int n_cols) {
  const int n_steps = (n_cols + 255) / 256 * 4, place = wide_place(c % 64), tile = wide_tile_rows(n_acts);
  return (static_cast<size_t>(a / tile) * static_cast<size_t>(n_steps) + static_cast<size_t>(c / 64)) *
             static_cast<size_t>(wide_stage_bytes(tile) / 2) +
         static_cast<size_t>(wide_piece(a % tile, place / 8) / 2 + place % 8);
}

// Symptom of another path: the room stays as it was.
TEST(LinearWideCuda, IsWhatManyRowsUse) {
  SKIP_WITHOUT_WIDE();
  for (const auto& [n_cols, n_acts] : {std::pair(352, 300), {512, 300}, {512, 65}}) {
    const int n_rows = 1024;
    const TestRows x(n_acts, n_cols, 3);
    const TestMatrix w(DType::Q8_0, n_rows, n_cols, 4);
    ASSERT_TRUE(wide_preferred(w.device, n_acts));
    std::vector<int32_t> index(static_cast<size_t>(n_acts));
    for (int a = 0; a < n_acts; ++a) index[static_cast<size_t>(a)] = (a * 7) % n_acts;
    const DeviceBuffer device_index = on_device(index);
    DeviceBuffer room(linear_room(n_acts, n_cols)), y(static_cast<size_t>(n_acts * n_rows) * sizeof(float));
    cudaMemset(room.data(), 0xff, room.size());
    DeviceLinearArgs args;
    args.jobs[0] = {.w = w.device, .y = y.as<float>(), .y_stride = n_rows};
    args.n_jobs = 1;
    args.n_acts = n_acts;
    args.x = x.acts();
    args.row_index = reinterpret_cast<const int32_t*>(device_index.data());
    args.room = room.data();
    args.room_bytes = room.size();
    linear_cuda(args, {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<half> got(room.size() / sizeof(half));
    cudaMemcpy(got.data(), room.data(), room.size(), cudaMemcpyDeviceToHost);
    for (int a = 0; a < n_acts; ++a)
      for (int c = 0; c < (n_cols + 255) / 256 * 256; ++c)
        ASSERT_EQ(__half2float(got[place_in_tiles(a, n_acts, c, n_cols)]),
                  c < n_cols ? __half2float(__float2half_rn(x.row(index[static_cast<size_t>(a)])[c])) : 0.0f)
            << a << ", " << c;
  }
}

TEST(LinearWideCuda, MakesTheTilesOfSwiglu) {
  SKIP_WITHOUT_WIDE();
  for (const auto& [dtype, n_rows, n_cols, n_acts] : {std::tuple(DType::Q4_K, 256, 512, 300),
                                                      {DType::Q6_K, 512, 256, 256},
                                                      {DType::Q8_0, 256, 352, 70},
                                                      {DType::MXFP4, 256, 256, 1},
                                                      {DType::Q5_K, 512, 256, 128},
                                                      {DType::Q4_K, 9216, 256, 520}}) {
    constexpr float kScale = 0.5f, kOutScale = 16.0f;
    const TestRows x(n_acts, n_cols, 5);
    const TestMatrix gate(dtype, n_rows, n_cols, 6), up(dtype, n_rows, n_cols, 7);
    DeviceBuffer tiles(wide_bytes(n_acts, n_cols)), hidden(wide_bytes(n_acts, n_rows));
    cudaMemset(tiles.data(), 0xff, tiles.size());
    wide_tiles_cuda(x.acts(), nullptr, n_acts, n_cols, tiles.data(), {});
    wide_swiglu_cuda({.gate = gate.device,
                      .up = up.device,
                      .tiles = tiles.data(),
                      .scale = kScale,
                      .n_acts = n_acts,
                      .hidden = hidden.data(),
                      .hidden_scale = kOutScale},
                     {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<half> got(hidden.size() / sizeof(half));
    cudaMemcpy(got.data(), hidden.data(), hidden.size(), cudaMemcpyDeviceToHost);
    const std::vector<int> some = some_rows(n_acts);
    const Expected g(gate, x, some), u(up, x, some);
    for (size_t i = 0; i < some.size(); ++i)
      for (int c = 0; c < n_rows; ++c) {
        const size_t at = i * static_cast<size_t>(n_rows) + static_cast<size_t>(c);
        const double a = static_cast<double>(g.y[at] * kScale), b = static_cast<double>(u.y[at] * kScale),
                     want = a / (1.0 + std::exp(-a)) * b;
        // The slope of silu is at most 1.1.
        const double bound = 1.1 * g.bound[at] * kScale * (std::fabs(b) + u.bound[at]) +
                             (std::fabs(a) + 1e-3) * u.bound[at] * kScale + std::fabs(want) * 1e-3 + 1e-5;
        ASSERT_NEAR(__half2float(got[place_in_tiles(some[i], n_acts, c, n_rows)]) * kOutScale, want, bound)
            << dtype_name(dtype) << " at " << some[i] << ", " << c;
      }
  }
}

}  // namespace
}  // namespace thermo
