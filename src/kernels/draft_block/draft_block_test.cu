// The kernels of a drafter's block: products against quant_matmul_ref, attention against attention_cuda(),
// which has tests of its own. What must not be read is NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/draft_block/draft_block_cuda.h"
#include "kernels/quant_matmul/panel_mma.cuh"
#include "kernels/testing/device_attention.h"
#include "kernels/testing/device_case.h"

namespace thermo {
namespace {

using namespace thermo::testing;
using namespace thermo::testing::device_attention;

constexpr float kScale = 16.0f;

bool possible() {
  return draft_block_possible();
}

// Rows in the f16 form, and what they are.
struct TestRows {
  int n_rows, n_cols;
  std::vector<float> x;
  std::vector<half> places;
  DeviceArray<half> device;

  TestRows(int rows, int cols, Inputs& in, float size)
      : n_rows(rows), n_cols(cols), x(in.spiky(as_size(rows) * as_size(cols), size)), device(lay_out()) {}
  const float* row(int r) const { return x.data() + as_size(r) * as_size(n_cols); }
  DraftRows rows() const { return {.f16 = device.data(), .stride = n_cols + 64, .scale = kScale}; }

 private:
  std::vector<half> lay_out() {
    places.assign(as_size(n_rows) * as_size(n_cols + 64), __ushort_as_half(0x7e00));
    for (int r = 0; r < n_rows; ++r)
      for (int c = 0; c < n_cols; ++c) {
        float& value = x[as_size(r) * as_size(n_cols) + as_size(c)];
        const half rounded = __float2half_rn(value / kScale);
        value = __half2float(rounded) * kScale;
        places[as_size(r) * as_size(n_cols + 64) + as_size(act_place(c))] = rounded;
      }
    return places;
  }
};

// Of a norm whose mean square is not that of the rows, so that it shows.
struct TestSquares {
  std::vector<float> parts, factor;
  DeviceArray<float> device;

  TestSquares(int n, int n_cols, float eps, Inputs& in)
      : parts(in.uniform(as_size(n) * kMaxDraftRows, 0.5f, 3.0f)), device(parts) {
    for (int a = 0; a < kMaxDraftRows; ++a) {
      double sum = 0.0;
      for (int i = 0; i < n; ++i) sum += parts[as_size(i) * kMaxDraftRows + as_size(a)];
      factor.push_back(static_cast<float>(1.0 / std::sqrt(sum / n_cols + double{eps})));
    }
  }
};

double length(const float* x, size_t n) {
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  return std::sqrt(sum);
}

// Relative to the length of what is expected.
double error_of(const float* got, const float* want, size_t n) {
  std::vector<float> difference(n);
  for (size_t i = 0; i < n; ++i) difference[i] = got[i] - want[i];
  const double error = length(difference.data(), n) / std::max(1e-9, length(want, n));
  return std::isnan(error) ? INFINITY : error;
}

std::vector<float> read_places(const std::vector<half>& from, size_t row, size_t stride, int n_cols) {
  std::vector<float> x(as_size(n_cols));
  for (int c = 0; c < n_cols; ++c)
    x[as_size(c)] = __half2float(from[row * stride + as_size(act_place(c))]) * kScale;
  return x;
}

void expect_no_error() {
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  const cudaError_t error = cudaDeviceSynchronize();
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

constexpr double kRounding = 1e-3;  // of weights to f16, and of results

void run_out(int n_rows, int n_embd, int n_cols, bool add) {
  SCOPED_TRACE(::testing::Message() << n_rows << " rows, " << n_embd << " x " << n_cols);
  Inputs in(static_cast<uint64_t>(n_rows * 7 + n_embd + n_cols));
  std::mt19937 random(3);
  const HostMatrix w(DType::Q8_0, n_embd, n_cols, random, 0.05f);
  ASSERT_TRUE(draft_out_possible(w.at(0)));
  const DeviceBuffer panels = to_device(w.panels);
  const TestRows rows(n_rows, n_cols, in, 3.0f);
  const std::vector<float> before = in.normal(as_size(n_rows) * as_size(n_embd)),
                           norm = in.uniform(as_size(n_embd), 0.5f, 1.5f);
  const DeviceArray<float> x(before), weight(norm), squares(as_size(draft_squares(n_embd)) * kMaxDraftRows);
  const size_t stride = as_size(align_up(n_embd, 32));
  const DeviceArray<half> f16(as_size(n_rows) * stride);
  draft_out_cuda({.w = w.at(reinterpret_cast<size_t>(panels.data())),
                  .in = rows.rows(),
                  .n_rows = n_rows,
                  .add = add,
                  .stream = {.x = x.data(),
                             .n_embd = n_embd,
                             .norm = weight.data(),
                             .f16 = f16.data(),
                             .stride = static_cast<int64_t>(stride),
                             .scale = kScale,
                             .squares = squares.data()}},
                 {});
  expect_no_error();
  EXPECT_TRUE(x.intact() && f16.intact() && squares.intact());
  const std::vector<float> got = x.read(), sums = squares.read();
  const std::vector<half> normed = f16.read();
  for (int r = 0; r < n_rows; ++r) {
    std::vector<float> want = w.times(rows.row(r));
    for (size_t c = 0; add && c < want.size(); ++c) want[c] += before[as_size(r) * as_size(n_embd) + c];
    EXPECT_LE(error_of(&got[as_size(r) * as_size(n_embd)], want.data(), want.size()), kRounding) << r;
    double sum = 0.0;
    for (int i = 0; i < draft_squares(n_embd); ++i) sum += sums[as_size(i) * kMaxDraftRows + as_size(r)];
    const double square = length(want.data(), want.size());
    EXPECT_NEAR(sum / (square * square), 1.0, 4 * kRounding) << r;
    for (size_t c = 0; c < want.size(); ++c) want[c] *= norm[c];
    EXPECT_LE(error_of(read_places(normed, as_size(r), stride, n_embd).data(), want.data(), want.size()),
              2 * kRounding)
        << r;
  }
}

TEST(DraftBlockCuda, AddsProductsToTheStream) {
  SKIP_WITHOUT_GPU();
  if (!possible()) GTEST_SKIP() << "needs clusters of blocks";
  for (const int n_rows : {1, 7, 8, 9, 16}) run_out(n_rows, 256, 768, true);
  for (const int n_cols : {32, 64, 96, 352, 544, 2048, 2080, 4096, 6144, 10240, 17408})
    run_out(16, 80, n_cols, n_cols % 64 == 0);
  run_out(16, 2048, 4096, true);
  run_out(13, 2048, 6144, true);
}

void run_gate(int n_rows, int n_ff, int n_cols) {
  SCOPED_TRACE(::testing::Message() << n_rows << " rows, " << n_ff << " x " << n_cols);
  Inputs in(static_cast<uint64_t>(n_rows * 7 + n_ff + n_cols));
  std::mt19937 random(5);
  const HostMatrix gate(DType::Q8_0, n_ff, n_cols, random, 0.05f),
      up(DType::Q8_0, n_ff, n_cols, random, 0.05f);
  ASSERT_TRUE(draft_gate_possible(gate.at(0)));
  const DeviceBuffer gate_panels = to_device(gate.panels), up_panels = to_device(up.panels);
  const TestRows rows(n_rows, n_cols, in, 2.0f);
  const float eps = 1e-5f;
  const TestSquares squares(3, n_cols, eps, in);
  const size_t stride = as_size(align_up(n_ff, 32));
  const DeviceArray<half> f16(as_size(n_rows) * stride);
  DraftRows read = rows.rows();
  read.squares = squares.device.data();
  read.n_squares = 3;
  read.eps = eps;
  draft_gate_cuda({.gate = gate.at(reinterpret_cast<size_t>(gate_panels.data())),
                   .up = up.at(reinterpret_cast<size_t>(up_panels.data())),
                   .in = read,
                   .n_rows = n_rows,
                   .f16 = f16.data(),
                   .stride = static_cast<int64_t>(stride),
                   .scale = kScale},
                  {});
  expect_no_error();
  EXPECT_TRUE(f16.intact());
  const std::vector<half> got = f16.read();
  for (int r = 0; r < n_rows; ++r) {
    std::vector<float> want = gate.times(rows.row(r));
    const std::vector<float> ups = up.times(rows.row(r));
    for (size_t c = 0; c < want.size(); ++c) {
      const double g = want[c] * squares.factor[as_size(r)], u = ups[c] * squares.factor[as_size(r)];
      want[c] = static_cast<float>(g / (1.0 + std::exp(-g)) * u);
    }
    EXPECT_LE(error_of(read_places(got, as_size(r), stride, n_ff).data(), want.data(), want.size()),
              3 * kRounding)
        << r;
  }
}

TEST(DraftBlockCuda, GatesRows) {
  SKIP_WITHOUT_GPU();
  if (!possible()) GTEST_SKIP() << "needs clusters of blocks";
  for (const int n_rows : {1, 8, 11, 16}) run_gate(n_rows, 768, 256);
  for (const int n_cols : {32, 96, 352, 1056, 2048, 5120}) run_gate(16, 80, n_cols);
  run_gate(16, 6144, 2048);
}

TEST(DraftBlockCuda, TakesRowsOfAnEmbedding) {
  SKIP_WITHOUT_GPU();
  Inputs in(11);
  std::mt19937 random(7);
  constexpr int kRows = 5, kVocab = 40;
  for (const DType dtype : {DType::F16, DType::Q8_0, DType::Q4_K, DType::Q6_K}) {
    constexpr int kColumns = 768;
    const HostMatrix table(dtype, kVocab, kColumns, random, 0.05f);
    const DeviceBuffer panels = to_device(table.panels);
    const DeviceMatrix w = table.at(reinterpret_cast<size_t>(panels.data()));
    const DeviceArray<int32_t> tokens(std::vector<int32_t>{3, 39, 0, 16, 17});
    const std::vector<float> norm = in.uniform(kColumns, 0.5f, 1.5f);
    const DeviceArray<float> x(kRows * kColumns), expected(kRows * kColumns), weight(norm), squares(kRows);
    const DeviceArray<half> f16(kRows * kColumns);
    embed_cuda(w, tokens.data(), kRows, expected.data(), kColumns, {});
    draft_embed_cuda(w, tokens.data(), kRows,
                     {.x = x.data(),
                      .n_embd = kColumns,
                      .norm = weight.data(),
                      .f16 = f16.data(),
                      .stride = kColumns,
                      .scale = kScale,
                      .squares = squares.data()},
                     {});
    expect_no_error();
    EXPECT_TRUE(x.intact() && f16.intact() && squares.intact());
    std::vector<float> want = expected.read();
    EXPECT_EQ(x.read(), want);
    for (size_t r = 0; r < kRows; ++r) {
      const double size = length(&want[r * kColumns], kColumns);
      EXPECT_NEAR(squares.read()[r] / (size * size), 1.0, 1e-5);
      for (size_t c = 0; c < kColumns; ++c) want[r * kColumns + c] *= norm[c];
      EXPECT_LE(
          error_of(read_places(f16.read(), r, kColumns, kColumns).data(), &want[r * kColumns], kColumns),
          kRounding);
    }
  }
}

// Rows over caches, from what projections read to what the output projection reads.
void run_rows(const Case& c, int n_cols, uint64_t seed) {
  const int n_head = c.shape.n_head, n_head_kv = c.shape.n_head_kv, dim = c.shape.head_dim;
  const int q_dim = n_head * dim, kv_dim = n_head_kv * dim;
  Inputs in(seed);
  std::mt19937 random(static_cast<unsigned>(seed));
  const DeviceStep step(c.groups, c.n_padding, true, seed, true);
  const int n_rows = step.n_rows;
  SCOPED_TRACE(::testing::Message() << n_rows << " rows, " << n_head << "/" << n_head_kv << " heads of "
                                    << dim << ", past " << c.groups.front().past << ", " << n_cols
                                    << " columns");
  ASSERT_TRUE(draft_attention_possible(n_head, n_head_kv, dim, c.k_type, c.v_type));
  const float eps = 1e-5f;
  const HostMatrix w[3] = {{DType::Q8_0, q_dim, n_cols, random, 0.05f},
                           {DType::Q8_0, kv_dim, n_cols, random, 0.05f},
                           {DType::Q8_0, kv_dim, n_cols, random, 0.05f}};
  const TestRows rows(n_rows, n_cols, in, 1.0f);
  const TestSquares squares(35, n_cols, eps, in);
  Projected projected(c, as_size(n_rows), in);
  std::vector<float>* const outs[3] = {&projected.q_full, &projected.k, &projected.v};
  for (int j = 0; j < 3; ++j) {
    outs[j]->clear();
    for (int r = 0; r < n_rows; ++r)
      for (const float y : w[j].times(rows.row(r))) outs[j]->push_back(y * squares.factor[as_size(r)]);
  }
  // Two caches that are alike.
  int n_slots = 0;
  for (const StepGroup& group : c.groups) n_slots = std::max(n_slots, group.past + group.n_rows);
  TestKv kv(c.k_type, c.v_type, n_head_kv, dim, n_slots, static_cast<int>(c.groups.size()));
  for (size_t g = 0; g < c.groups.size(); ++g)
    for (int slot = 0; slot < c.groups[g].past; ++slot)
      for (const bool is_v : {false, true}) {
        const KvType type = is_v ? c.v_type : c.k_type;
        std::byte* const at =
            kv.bytes.data() + (is_v ? kv.v_at(step.sequence(g), slot) : kv.k_at(step.sequence(g), slot));
        const std::vector<float> x = in.normal(as_size(kv_dim));
        quantize_row(type == KvType::F16    ? DType::F16
                     : type == KvType::BF16 ? DType::BF16
                     : type == KvType::Q8_0 ? DType::Q8_0
                                            : DType::Q4_0,
                     x.data(), kv_dim, at);
      }
  const DeviceArray<std::byte> cache(kv.bytes), own_cache(kv.bytes);
  const DeviceArray<int32_t> table(kv.table);
  StepOnDevice expected(c, step, projected, kv.device(cache.data(), table.data()));
  expected.run(0);
  const std::vector<float> want = expected.out.read();

  std::vector<DeviceBuffer> panels;
  DraftHeadsArgs heads;
  for (int j = 0; j < 3; ++j) {
    panels.push_back(to_device(w[j].panels));
    heads.jobs[j] = {w[j].at(reinterpret_cast<size_t>(panels.back().data())),
                     j == 0   ? expected.q_norm.data()
                     : j == 1 ? expected.k_norm.data()
                              : nullptr,
                     static_cast<DraftHead>(j), 0};
    ASSERT_TRUE(draft_heads_possible(heads.jobs[j].w, dim));
  }
  const DeviceArray<half> q(as_size(n_rows) * as_size(q_dim)), out(as_size(n_rows) * as_size(q_dim));
  heads.n_jobs = 3;
  heads.in = rows.rows();
  heads.in.squares = squares.device.data();
  heads.in.n_squares = 35;
  heads.in.eps = eps;
  heads.n_rows = n_rows;
  heads.rows = step.rows();
  heads.kv = kv.device(own_cache.data(), table.data());
  heads.n_head = n_head;
  heads.n_head_kv = n_head_kv;
  heads.head_dim = dim;
  heads.eps = expected.args.eps;
  heads.inv_freq = expected.args.inv_freq;
  heads.n_rot = expected.args.n_rot;
  heads.rope_magnitude = expected.args.rope_magnitude;
  heads.q = q.data();
  heads.q_scale = draft_query_scale(expected.args.scale);
  DraftAttentionArgs attend{expected.args, q.data(), nullptr};
  const DeviceArray<uint64_t> counters(std::vector<uint64_t>(as_size(n_head_kv)));
  attend.counters = counters.data();
  attend.args.kv = heads.kv;
  attend.args.out = {.f16 = out.data(), .f16_stride = q_dim, .scale = kScale};
  std::vector<half> first;
  for (int again = 0; again < 3; ++again) {
    draft_heads_cuda(heads, {});
    draft_attention_cuda(attend, {});
    expect_no_error();
    EXPECT_TRUE(q.intact() && out.intact() && own_cache.intact() && expected.partial.intact());
    const std::vector<half> got = out.read();
    if (again > 0) {
      EXPECT_EQ(std::memcmp(got.data(), first.data(), got.size() * sizeof(half)), 0) << "another result";
    }
    first = got;
  }
  const bool rounded = c.k_type != KvType::F16 || c.v_type != KvType::F16;
  const bool coarse = c.k_type == KvType::Q4_0 || c.v_type == KvType::Q4_0;
  const double bound = coarse ? 0.02 * 127 / 8 : rounded ? 0.02 : 4e-3;  // grows with the steps of a block
  for (int r = 0; r < step.n_valid(); ++r) {
    const std::vector<float> got = read_places(first, as_size(r), as_size(q_dim), q_dim);
    EXPECT_LE(error_of(got.data(), &want[as_size(r) * as_size(q_dim)], as_size(q_dim)), bound) << "row " << r;
  }
  if (rounded) return;
  // What was written to the cache, and nothing else.
  const std::vector<std::byte> wrote = own_cache.read(), wanted = cache.read();
  for (size_t i = 0; i < wrote.size(); i += 2) {
    const uint16_t bits = *reinterpret_cast<const uint16_t*>(&wrote[i]),
                   other = *reinterpret_cast<const uint16_t*>(&wanted[i]);
    if (bits == other) continue;
    const float x = __half2float(__ushort_as_half(bits)), y = __half2float(__ushort_as_half(other));
    ASSERT_NEAR(x, y, 0.01f + 0.01f * std::fabs(y)) << "byte " << i;
  }
}

TEST(DraftBlockCuda, AttendsFromRowsToMixedRows) {
  SKIP_WITHOUT_GPU();
  if (!possible()) GTEST_SKIP() << "needs clusters of blocks";
  const Shape small{4, 2, 64}, large{32, 4, 128};
  uint64_t seed = 1;
  const auto run = [&](const Case& c, int n_cols) {
    Case with = c;
    with.gate = HeadGate::None;
    with.uncommitted = true;
    with.n_multiprocessors = device_in_use().n_multiprocessors;
    run_rows(with, n_cols, ++seed);
  };
  for (const bool both_ways : {true, false})
    for (const int past : {0, 1, 23, 24, 31, 32, 40, 300}) {
      run({.shape = small, .groups = {{past, 8}}, .both_ways = both_ways}, 256);
      run({.shape = large, .groups = {{past, 16}}, .both_ways = both_ways}, 352);
    }
  for (const int window : {16, 17, 64, 200})
    run({.shape = large, .groups = {{333, 16}}, .window = window, .both_ways = true}, 64);
  run({.shape = large, .groups = {{3000, 16}}, .both_ways = true}, 2048);
  run({.shape = {10, 2, 128}, .groups = {{100, 11}}, .n_padding = 5, .both_ways = true}, 96);
  run({.shape = {3, 1, 64}, .groups = {{70, 1}}, .both_ways = true}, 2080);
  run({.shape = small, .groups = {{90, 8}, {7, 5}, {200, 2}}, .n_padding = 1, .both_ways = true}, 256);
  for (const KvType type : {KvType::F16, KvType::Q8_0})
    run({.shape = large, .groups = {{150, 16}}, .k_type = type, .v_type = KvType::Q8_0, .both_ways = true},
        256);
  for (const KvType type : {KvType::BF16, KvType::Q4_0})
    run({.shape = large, .groups = {{150, 16}}, .k_type = type, .v_type = type, .both_ways = true}, 256);
}

}  // namespace
}  // namespace thermo
