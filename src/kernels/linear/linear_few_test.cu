// Products of few rows against the processor's kernels, bit for bit: so a row does not feel its neighbours.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "device/testing/skip_without_gpu.h"
#include "kernels/linear/dot_product.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_few_cuda.h"
#include "kernels/row_ops/row_ops.h"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/testing/exact_case.h"

namespace thermo {
namespace {

constexpr int kRows = 64;

// Rows as the GPU has them, in one of the two forms.
struct DeviceRowsOf {
  size_t chunks;
  DeviceBuffer memory;

  DeviceRowsOf(const ActRows& acts, int n_cols) : chunks(static_cast<size_t>(dot_chunks(n_cols))) {
    std::vector<BlockActs> blocks(chunks * kRows);
    for (int r = 0; r < kRows; ++r) acts.to_blocks(r, blocks.data() + static_cast<size_t>(r) * chunks);
    memory = to_device(blocks);
  }
};

// The processor's products of the cuts, added up in order.
std::vector<float> multiply_cuts(const HostMatrix& w, const std::vector<float>& x, int n_cuts,
                                 const QuantMatmulKernels& kernels) {
  const int n_chunks = dot_chunks(w.n_cols);
  std::vector<float> y;
  for (int c = 0; c < n_cuts; ++c) {
    const int begin = n_chunks * c / n_cuts * 256,
              end = std::min(w.n_cols, n_chunks * (c + 1) / n_cuts * 256);
    std::vector<float> columns;
    for (int r = 0; r < kRows; ++r) {
      const auto row = x.begin() + static_cast<std::ptrdiff_t>(r) * w.n_cols;
      columns.insert(columns.end(), row + begin, row + end);
    }
    const std::vector<float> part =
        multiply(w.columns(begin, end), ActRows(w.dtype, columns.data(), kRows, end - begin, 1.0f, kernels),
                 kRows, kernels);
    if (y.empty())
      y = part;
    else
      for (size_t i = 0; i < y.size(); ++i) y[i] += part[i];
  }
  return y;
}

// Two matrices of the given types and rows in one call, the rows of x in reverse.
void run_case(DType first, DType second, int n_rows, int n_cols) {
  std::mt19937 random(static_cast<unsigned>(n_rows * 31 + n_cols * 7));
  const QuantMatmulKernels& kernels = quant_matmul_kernels(vector_isas().front());
  const std::vector<float> x = spiky(static_cast<size_t>(kRows) * n_cols, random);
  const HostMatrix w[2] = {{first, n_rows, n_cols, random, 0.05f}, {second, 50, n_cols, random, 0.05f}};
  DeviceLinearArgs args;
  args.x.blocks_stride = dot_chunks(n_cols);
  std::vector<DeviceBuffer> memory;
  std::vector<float> want[2];
  for (int j = 0; j < 2; ++j) {
    const ActRows acts(w[j].dtype, x.data(), kRows, n_cols, 1.0f, kernels);
    memory.push_back(std::move(DeviceRowsOf(acts, n_cols).memory));
    (act_format(w[j].dtype) == ActFormat::Q8x256 ? args.x.blocks256 : args.x.blocks32) = memory.back().data();
    memory.push_back(to_device(w[j].panels));
    args.jobs[j].w = w[j].at(reinterpret_cast<size_t>(memory.back().data()));
    args.jobs[j].y_stride = w[j].n_rows + 3;
  }
  std::vector<int32_t> index(kRows);
  for (int r = 0; r < kRows; ++r) index[static_cast<size_t>(r)] = kRows - 1 - r;
  DeviceBuffer device_index = to_device(index);
  args.n_jobs = 2;
  const int n_cuts = 1 << linear_sum_cuts(args).cuts_log2;
  for (int j = 0; j < 2; ++j) want[j] = multiply_cuts(w[j], x, n_cuts, kernels);
  for (const int n_acts : {1, 2, 3, 7, 8, 9, 16, 17, 24, 32, 33, 48, 63, 64}) {
    args.n_acts = n_acts;
    args.row_index = n_acts % 2 == 0 ? nullptr : device_index.as<int32_t>();
    std::vector<DeviceBuffer> y;
    for (int j = 0; j < 2; ++j) {
      y.push_back(to_device(std::vector<float>(
          static_cast<size_t>(n_acts) * static_cast<size_t>(args.jobs[j].y_stride), -7.0f)));
      args.jobs[j].y = y.back().as<float>();
    }
    linear_cuda(args, {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int j = 0; j < 2; ++j) {
      const size_t stride = static_cast<size_t>(args.jobs[j].y_stride),
                   rows = static_cast<size_t>(w[j].n_rows);
      const std::vector<float> got =
          to_host(y[static_cast<size_t>(j)].as<float>(), stride * static_cast<size_t>(n_acts));
      for (int a = 0; a < n_acts; ++a) {
        const size_t row = static_cast<size_t>(args.row_index == nullptr ? a : kRows - 1 - a);
        const float* const at = got.data() + stride * static_cast<size_t>(a);
        expect_bits(at, want[j].data() + row * rows, rows,
                    std::string(dtype_name(w[j].dtype)) + " " + std::to_string(rows) + " x " +
                        std::to_string(n_cols) + ", row " + std::to_string(a) + " of " +
                        std::to_string(n_acts));
        for (size_t i = rows; i < stride; ++i) ASSERT_EQ(at[i], -7.0f) << "written past the end";
      }
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(LinearFewCuda, HasTheProcessorsBitsForEveryTypeAndNumberOfRows) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  for (const DType dtype : kQuantised) {
    run_case(dtype, dtype, 77, 1280);
    if (act_format(dtype) != ActFormat::Q8x256) run_case(dtype, dtype, 33, 352);
  }
  run_case(DType::Q4_K, DType::Q6_K, 200, 2048);
  run_case(DType::Q6_K, DType::Q4_K, 33, 4352);    // 17 chunks, four cuts
  run_case(DType::Q4_K, DType::Q6_K, 8000, 1280);  // two
  run_case(DType::Q4_K, DType::Q5_K, 9000, 512);   // one
  run_case(DType::Q6_K, DType::Q4_K, 30000, 1024);
  run_case(DType::Q8_0, DType::Q4_K, 300, 768);
  run_case(DType::Q4_K, DType::IQ4_XS, 130, 512);
}

// Matrices with panels for every multiprocessor: a block of many warps keeps the rows.
TEST(LinearFewCuda, StreamedMatricesHaveTheProcessorsBits) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  run_case(DType::Q4_K, DType::Q6_K, 20000, 5120);  // beyond 16 rows these come in pieces
  run_case(DType::Q6_K, DType::Q5_K, 16400, 5120);  // two cuts, a warp for each
  run_case(DType::Q5_K, DType::Q4_K, 23000, 4352);  // 17 chunks: the last piece is one
  run_case(DType::Q4_K, DType::Q4_K, 14000, 9216);
  run_case(DType::Q8_0, DType::Q8_0, 25000, 4128);
}

// A matrix with many panels, the same ones again and again: a kernel that stays on the card multiplies it.
TEST(LinearFewCuda, AHeadHasTheProcessorsBits) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  const QuantMatmulKernels& kernels = quant_matmul_kernels(vector_isas().front());
  constexpr size_t kOwn = 2000, kTimes = 70, kOutputs = kOwn * kTimes - 5;
  std::vector<int32_t> index(kRows);
  for (int r = 0; r < kRows; ++r) index[static_cast<size_t>(r)] = (r * 7 + 3) % kRows;
  DeviceBuffer device_index = to_device(index);
  for (const auto& [dtype, n_cols] :
       {std::pair(DType::Q6_K, 2048), {DType::Q4_K, 1280}, {DType::Q8_0, 352}}) {
    std::mt19937 random(static_cast<unsigned>(n_cols));
    const std::vector<float> x = spiky(static_cast<size_t>(kRows) * static_cast<size_t>(n_cols), random);
    HostMatrix w(dtype, kOwn, n_cols, random, 0.05f);
    const ActRows acts(dtype, x.data(), kRows, n_cols, 1.0f, kernels);
    const std::vector<float> want = multiply(w, acts, kRows, kernels);
    std::vector<std::byte> panels;
    for (size_t i = 0; i < kTimes; ++i) panels.insert(panels.end(), w.panels.begin(), w.panels.end());
    const DeviceBuffer device_panels = to_device(panels);
    const DeviceRowsOf rows(acts, n_cols);
    DeviceLinearArgs args;
    args.jobs[0].w = w.at(reinterpret_cast<size_t>(device_panels.data()));
    args.jobs[0].w.n_rows = kOutputs;
    args.jobs[0].y_stride = kOutputs;
    args.n_jobs = 1;
    (act_format(dtype) == ActFormat::Q8x256 ? args.x.blocks256 : args.x.blocks32) = rows.memory.data();
    args.x.blocks_stride = dot_chunks(n_cols);
    args.row_index = device_index.as<int32_t>();
    for (const size_t n_acts : {2, 9, 15, 17, 33, 64}) {
      DeviceBuffer y = to_device(std::vector<float>(n_acts * kOutputs + 16, -7.0f));
      args.jobs[0].y = y.as<float>();
      args.n_acts = static_cast<int>(n_acts);
      linear_cuda(args, {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<float> got = to_host(y.as<float>(), n_acts * kOutputs + 16);
      for (size_t a = 0; a < n_acts; ++a)
        for (size_t begin = 0; begin < kOutputs; begin += kOwn)
          expect_bits(got.data() + a * kOutputs + begin, want.data() + static_cast<size_t>(index[a]) * kOwn,
                      std::min(kOwn, kOutputs - begin),
                      std::string(dtype_name(dtype)) + ", row " + std::to_string(a) + " of " +
                          std::to_string(n_acts) + ", from " + std::to_string(begin));
      for (size_t i = n_acts * kOutputs; i < got.size(); ++i)
        ASSERT_EQ(got[i], -7.0f) << "written past the end";
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Parts of a sum add up to it, and are the same for every number of rows.
TEST(LinearFewCuda, PartsDoNotDependOnTheNumberOfRows) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  std::mt19937 random(5);
  const QuantMatmulKernels& kernels = quant_matmul_kernels(vector_isas().front());
  struct Case {
    DType dtype;
    int n_rows, n_cols;
  };
  for (const auto& [dtype, n_rows, n_cols] : {Case{DType::Q4_K, 100, 4352},
                                              {DType::Q6_K, 100, 4352},
                                              {DType::Q8_0, 100, 4352},
                                              {DType::Q4_K, 5120, 4352},
                                              {DType::Q8_0, 5120, 4352},
                                              {DType::Q6_K, 5120, 17408}}) {
    const std::vector<float> x = spiky(static_cast<size_t>(kRows) * static_cast<size_t>(n_cols), random);
    const HostMatrix w(dtype, n_rows, n_cols, random, 0.05f);
    const ActRows acts(dtype, x.data(), kRows, n_cols, 1.0f, kernels);
    const std::vector<float> want = multiply(w, acts, kRows, kernels);
    const DeviceBuffer panels = to_device(w.panels);
    const DeviceRowsOf rows(acts, n_cols);
    std::vector<float> first;
    for (const int n_acts : {1, 5, 16, 32, 64}) {
      DeviceLinearArgs args;
      args.jobs[0].w = w.at(reinterpret_cast<size_t>(panels.data()));
      const int n_parts = linear_few_parts(args.jobs[0].w);
      ASSERT_EQ(n_parts, 4);
      const size_t part = static_cast<size_t>(n_acts) * static_cast<size_t>(n_rows);
      DeviceBuffer y(part * static_cast<size_t>(n_parts) * sizeof(float));
      args.jobs[0].y = y.as<float>();
      args.jobs[0].y_stride = n_rows;
      args.jobs[0].k_parts = n_parts;
      args.jobs[0].part_stride = static_cast<int64_t>(part);
      args.n_jobs = 1;
      (act_format(dtype) == ActFormat::Q8x256 ? args.x.blocks256 : args.x.blocks32) = rows.memory.data();
      args.x.blocks_stride = dot_chunks(n_cols);
      args.n_acts = n_acts;
      linear_cuda(args, {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<float> got = to_host(y.as<float>(), part * static_cast<size_t>(n_parts));
      std::vector<float> of_row;  // parts of the first row
      for (int p = 0; p < n_parts; ++p)
        of_row.insert(of_row.end(), got.begin() + static_cast<std::ptrdiff_t>(part) * p,
                      got.begin() + static_cast<std::ptrdiff_t>(part) * p + n_rows);
      if (first.empty()) first = of_row;
      expect_bits(of_row.data(), first.data(), first.size(), "rows " + std::to_string(n_acts));
      for (size_t i = 0; i < part; ++i) {
        float sum = 0.0f;
        for (int p = 0; p < n_parts; ++p) sum += got[i + part * static_cast<size_t>(p)];
        ASSERT_NEAR(sum, want[i], 1e-4f * (1.0f + std::fabs(want[i])));
      }
    }
  }
}

// A row that goes through its norm alone, and the same row after a norm of several.
void run_norm(DType first, DType second, int n_rows, int n_cols) {
  constexpr int kActs = 3;
  std::mt19937 random(static_cast<unsigned>(n_rows + n_cols));
  const HostMatrix w[2] = {{first, n_rows, n_cols, random, 0.05f}, {second, 50, n_cols, random, 0.05f}};
  const DeviceBuffer panels[2] = {to_device(w[0].panels), to_device(w[1].panels)};
  const size_t chunks = static_cast<size_t>(dot_chunks(n_cols));
  DeviceBuffer x = to_device(spiky(static_cast<size_t>(kActs) * n_cols, random)),
               norm = to_device(spiky(static_cast<size_t>(n_cols), random)),
               gate = to_device(spiky(static_cast<size_t>(n_cols), random)), factor(kActs * sizeof(float)),
               shared(kActs * sizeof(float)), blocks256(chunks * kActs * sizeof(BlockActs)),
               blocks32(chunks * kActs * sizeof(BlockActs));
  ResidualNormArgs rows{};
  rows.x = x.as<float>();
  rows.norm = norm.as<float>();
  rows.eps = 1e-6f;
  rows.h.blocks256 = blocks256.data();
  rows.h.blocks32 = blocks32.data();
  rows.h.blocks_stride = static_cast<int64_t>(chunks);
  rows.factor_last = true;
  rows.factor = factor.as<float>();
  rows.shared_gate = gate.as<float>();
  rows.shared_logit = shared.as<float>();
  rows.n_rows = kActs;
  rows.n_embd = n_cols;
  residual_norm_cuda(rows, {});
  DeviceLinearArgs args;
  std::vector<DeviceBuffer> y;
  for (int j = 0; j < 2; ++j) {
    args.jobs[j].w = w[j].at(reinterpret_cast<size_t>(panels[j].data()));
    args.jobs[j].y_stride = w[j].n_rows;
    y.emplace_back(sizeof(float) * kActs * static_cast<size_t>(w[j].n_rows));
    args.jobs[j].y = y.back().as<float>();
  }
  args.n_jobs = 2;
  args.n_acts = kActs;
  args.x = rows.h.read();
  linear_cuda(args, {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<float> want[2];
  for (size_t j = 0; j < 2; ++j)
    want[j] = to_host(y[j].as<float>(), static_cast<size_t>(kActs) * static_cast<size_t>(w[j].n_rows));
  for (const size_t n_acts : {1, 2}) {
    args.n_acts = static_cast<int>(n_acts);
    for (size_t r = 0; r + n_acts <= kActs; ++r) {
      args.norm = {x.as<float>() + r * static_cast<size_t>(n_cols), norm.as<float>(), 1e-6f};
      linear_cuda(args, {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (size_t j = 0; j < 2; ++j) {
        const size_t n = static_cast<size_t>(w[j].n_rows);
        expect_bits(to_host(y[j].as<float>(), n_acts * n).data(), want[j].data() + r * n, n_acts * n,
                    std::string(dtype_name(w[j].dtype)) + " " + std::to_string(n) + " x " +
                        std::to_string(n_cols) + ", " + std::to_string(n_acts) + " from row " +
                        std::to_string(r));
      }
    }
  }
}

TEST(LinearFewCuda, OneRowAndTwoThroughANormHaveTheBitsOfSeveral) {
  SKIP_WITHOUT_GPU();
  run_norm(DType::Q4_K, DType::Q6_K, 77, 256);
  run_norm(DType::Q4_K, DType::Q8_0, 1000, 2048);
  run_norm(DType::Q6_K, DType::Q5_K, 9000, 2048);   // two cuts
  run_norm(DType::Q5_K, DType::Q4_K, 30000, 1024);  // one
  run_norm(DType::Q8_0, DType::Q8_0, 60, 352);
  run_norm(DType::Q8_0, DType::Q4_K, 200, 5120);
  run_norm(DType::Q4_K, DType::Q6_K, 333, 2304);
}

// A row that is added to the stream by its product, and the same row among several whose parts are added.
void run_added(DType dtype, int n_rows, int n_cols) {
  constexpr int kActs = 3;
  std::mt19937 random(static_cast<unsigned>(n_rows + n_cols));
  const HostMatrix w(dtype, n_rows, n_cols, random, 0.05f);
  const DeviceBuffer panels = to_device(w.panels);
  const size_t rows = static_cast<size_t>(n_rows), chunks = static_cast<size_t>(dot_chunks(n_cols));
  std::vector<half> f16;
  for (const float v : spiky(static_cast<size_t>(kActs) * n_cols, random)) f16.push_back(__float2half_rn(v));
  const DeviceBuffer device_f16 = to_device(f16);
  const std::vector<float> stream = spiky(kActs * rows, random);
  DeviceLinearArgs args;
  const int n_parts = linear_few_parts(with_chunks({nullptr, 0, dtype, n_rows, n_cols}));
  DeviceBuffer blocks(chunks * kActs * sizeof(BlockActs)),
      y(sizeof(float) * kActs * rows * static_cast<size_t>(n_parts));
  DeviceActsOut out;
  out.f16 = const_cast<std::byte*>(device_f16.data());
  out.f16_stride = n_cols;
  (act_format(dtype) == ActFormat::Q8x256 ? out.blocks256 : out.blocks32) = blocks.data();
  out.blocks_stride = static_cast<int64_t>(chunks);
  round_rows_cuda({out.f16, nullptr, n_cols, 0}, kActs, n_cols, out, {});
  args.jobs[0] = {.w = w.at(reinterpret_cast<size_t>(panels.data())),
                  .y = y.as<float>(),
                  .y_stride = n_rows,
                  .k_parts = n_parts,
                  .part_stride = static_cast<int64_t>(kActs) * n_rows};
  args.n_jobs = 1;
  args.n_acts = kActs;
  args.x = out.read();
  linear_cuda(args, {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<float> want = stream;
  const std::vector<float> parts = to_host(y.as<float>(), kActs * rows * static_cast<size_t>(n_parts));
  for (size_t i = 0; i < parts.size(); ++i) want[i % want.size()] += parts[i];
  for (const size_t n_acts : {1, 2}) {
    args.n_acts = static_cast<int>(n_acts);
    for (size_t r = 0; r + n_acts <= kActs; ++r) {
      const auto row = stream.begin() + static_cast<std::ptrdiff_t>(r * rows);
      DeviceBuffer x = to_device(std::vector<float>(row, row + static_cast<std::ptrdiff_t>(n_acts * rows)));
      args.jobs[0] = {.w = args.jobs[0].w, .y = x.as<float>(), .y_stride = n_rows, .add = true};
      args.x = {};
      args.x.f16 = reinterpret_cast<const half*>(device_f16.data()) + r * static_cast<size_t>(n_cols);
      args.x.f16_stride = n_cols;
      linear_cuda(args, {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      expect_bits(to_host(x.as<float>(), n_acts * rows).data(), want.data() + r * rows, n_acts * rows,
                  std::string(dtype_name(dtype)) + " " + std::to_string(n_rows) + " x " +
                      std::to_string(n_cols) + ", " + std::to_string(n_acts) + " from row " +
                      std::to_string(r));
    }
  }
}

TEST(LinearFewCuda, OneRowAndTwoAddedHaveTheBitsOfSeveral) {
  SKIP_WITHOUT_GPU();
  for (const DType dtype : {DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q8_0}) {
    run_added(dtype, 2048, 4096);
    run_added(dtype, 5120, 6144);
    run_added(dtype, 300, 1024);
    run_added(dtype, 100, 256);
  }
  run_added(DType::Q8_0, 100, 352);
}

// One row that is rounded by a launch of its own, and by the product.
void run_rounding(DType dtype, int n_rows, int n_cols) {
  std::mt19937 random(static_cast<unsigned>(n_rows + n_cols));
  const HostMatrix w(dtype, n_rows, n_cols, random, 0.05f);
  const DeviceBuffer panels = to_device(w.panels);
  const DeviceMatrix matrix = w.at(reinterpret_cast<size_t>(panels.data()));
  if (!linear_rounds_row(matrix)) GTEST_SKIP() << "needs more shared memory";
  const size_t cols = static_cast<size_t>(n_cols), chunks = static_cast<size_t>(dot_chunks(n_cols));
  std::vector<half> f16;
  for (const float v : spiky(cols, random)) f16.push_back(__float2half_rn(v));
  const DeviceBuffer device_f16 = to_device(f16), gate = to_device(spiky(cols, random)),
                     up = to_device(spiky(cols, random));
  DeviceActs x;
  x.f16 = device_f16.data();
  x.f16_stride = n_cols;
  x.scale = 2.0f;
  const int n_parts = linear_few_parts(matrix);
  DeviceBuffer blocks(chunks * sizeof(BlockActs)),
      y(sizeof(float) * static_cast<size_t>(n_rows) * static_cast<size_t>(n_parts));
  DeviceActsOut out;
  (act_format(dtype) == ActFormat::Q8x256 ? out.blocks256 : out.blocks32) = blocks.data();
  out.blocks_stride = static_cast<int64_t>(chunks);
  DeviceLinearArgs args;
  args.jobs[0] = {
      .w = matrix, .y = y.as<float>(), .y_stride = n_rows, .k_parts = n_parts, .part_stride = n_rows};
  args.n_jobs = args.n_acts = 1;
  const auto multiply = [&] {
    linear_cuda(args, {});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return to_host(y.as<float>(), static_cast<size_t>(n_rows) * static_cast<size_t>(n_parts));
  };
  for (const bool swiglu : {false, true}) {
    const float* const left = reinterpret_cast<const float*>(gate.data());
    const float* const right = reinterpret_cast<const float*>(up.data());
    if (swiglu)
      swiglu_rows_cuda(left, right, 1, n_cols, out, {});
    else
      round_rows_cuda(x, 1, n_cols, out, {});
    args.x = out.read();
    args.rounds = false;
    const std::vector<float> want = multiply();
    args.rounds = true;
    args.x = swiglu ? DeviceActs{} : x;
    args.gate = swiglu ? left : nullptr;
    args.up = swiglu ? right : nullptr;
    expect_bits(multiply().data(), want.data(), want.size(),
                std::string(dtype_name(dtype)) + (swiglu ? " of swiglu" : " of halves"));
  }
}

TEST(LinearFewCuda, AProductRoundsItsRowAsALaunchDoes) {
  SKIP_WITHOUT_GPU();
  run_rounding(DType::Q4_K, 5120, 6144);
  run_rounding(DType::Q5_K, 9000, 4352);
  run_rounding(DType::Q6_K, 5120, 17408);
  run_rounding(DType::Q8_0, 6000, 4128);
}

TEST(LinearFewCuda, RowsAreRoundedAsOnTheProcessor) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  const QuantMatmulKernels& kernels = quant_matmul_kernels(vector_isas().front());
  for (const int n_cols : {256, 768, 352}) {
    std::mt19937 random(static_cast<unsigned>(n_cols));
    const size_t n = static_cast<size_t>(kRows) * static_cast<size_t>(n_cols);
    std::vector<float> gate = spiky(n, random), up = spiky(n, random), halves(n);
    std::vector<half> f16(n);
    for (size_t i = 0; i < n; ++i) {
      const size_t row = i / static_cast<size_t>(n_cols) * static_cast<size_t>(n_cols);
      const half rounded = __float2half_rn(gate[i]);
      f16[row + static_cast<size_t>(act_place(static_cast<int>(i - row)))] = rounded;
      halves[i] = __half2float(rounded);
    }
    std::vector<float> hidden = gate;
    row_op_kernels(vector_isas().front()).swiglu(hidden.data(), up.data(), static_cast<int>(n));
    const DeviceBuffer device_gate = to_device(gate), device_up = to_device(up), device_f16 = to_device(f16);
    const size_t chunks = static_cast<size_t>(dot_chunks(n_cols));
    for (const DType dtype : {DType::Q4_K, DType::Q8_0}) {
      const bool big = act_format(dtype) == ActFormat::Q8x256;
      if (big && n_cols % 256 != 0) continue;
      for (const bool swiglu : {false, true}) {
        DeviceBuffer blocks(chunks * kRows * sizeof(BlockActs));
        DeviceActsOut out;
        (big ? out.blocks256 : out.blocks32) = blocks.data();
        out.blocks_stride = static_cast<int64_t>(chunks);
        DeviceActs from;
        from.f16 = device_f16.data();
        from.f16_stride = n_cols;
        if (swiglu)
          swiglu_rows_cuda(reinterpret_cast<const float*>(device_gate.data()),
                           reinterpret_cast<const float*>(device_up.data()), kRows, n_cols, out, {});
        else
          round_rows_cuda(from, kRows, n_cols, out, {});
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<BlockActs> got = to_host(blocks.as<BlockActs>(), chunks * kRows);
        const ActRows acts(dtype, swiglu ? hidden.data() : halves.data(), kRows, n_cols, 1.0f, kernels);
        std::vector<BlockActs> want(chunks);
        for (int r = 0; r < kRows; ++r) {
          std::memset(static_cast<void*>(want.data()), 0, chunks * sizeof(BlockActs));
          acts.to_blocks(r, want.data());
          for (int s = 0; s < n_cols / 32; ++s) {
            const BlockActs& block = got[static_cast<size_t>(r) * chunks + static_cast<size_t>(s / 8)];
            const BlockActs& wanted = want[static_cast<size_t>(s / 8)];
            ASSERT_EQ(std::memcmp(block.codes[s % 8], wanted.codes[s % 8], 32), 0);
            ASSERT_EQ(std::memcmp(&block.meta[s % 8], &wanted.meta[s % 8], 16), 0) << n_cols << " " << s;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace thermo
