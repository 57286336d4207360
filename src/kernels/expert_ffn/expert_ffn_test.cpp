#include "kernels/expert_ffn/expert_ffn.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "kernels/dequantize/dequantize.h"
#include "kernels/expert_ffn/whole_experts.h"

namespace thermo {
namespace {

// A matrix with random weights: its rows as a file has them, its panels, and what it decodes to.
struct TestMatrix {
  std::vector<std::byte> rows;
  HostBuffer panels;
  std::vector<float> values;
  Matrix matrix;

  TestMatrix(DType dtype, int n_rows, int n_cols, std::mt19937& random, bool repack) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(n_cols)));
    values.resize(static_cast<size_t>(n_rows) * static_cast<size_t>(n_cols));
    for (float& value : values) value = normal(random);
    rows.resize(row_bytes(dtype, values.size()));
    quantize_row(dtype, values.data(), static_cast<int64_t>(values.size()), rows.data());
    dequantize_row(dtype, rows.data(), static_cast<int64_t>(values.size()), values.data());
    matrix = {.dtype = dtype, .n_rows = n_rows, .n_cols = n_cols, .panels = nullptr, .rows = rows.data()};
    if (!repack) return;
    panels = HostBuffer(packed_matrix_bytes(dtype, n_rows, n_cols));
    for (int p = 0; p < n_panels(n_rows); ++p)
      pack_panel(dtype, rows.data(), n_rows, n_cols, p,
                 panels.data() + static_cast<size_t>(p) * panel_bytes(dtype, n_cols));
    matrix.panels = panels.data();
  }

  std::vector<double> times(const std::vector<double>& x) const {
    std::vector<double> y(static_cast<size_t>(matrix.n_rows));
    for (size_t r = 0; r < y.size(); ++r)
      for (size_t c = 0; c < x.size(); ++c) y[r] += static_cast<double>(values[r * x.size() + c]) * x[c];
    return y;
  }
};

struct TestFfn {
  TestMatrix gate, up, down;
  Ffn ffn;
  TestFfn(DType dtype, int n_embd, int n_ff, std::mt19937& random, bool repack)
      : gate(dtype, n_ff, n_embd, random, repack),
        up(dtype, n_ff, n_embd, random, repack),
        down(dtype, n_embd, n_ff, random, repack),
        ffn{gate.matrix, up.matrix, down.matrix} {}

  std::vector<double> apply(const float* x, int n_embd) const {
    const std::vector<double> input(x, x + n_embd);
    std::vector<double> g = gate.times(input);
    const std::vector<double> u = up.times(input);
    for (size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1.0 + std::exp(-g[i])) * u[i];
    return down.times(g);
  }
};

struct Case {
  DType dtype;
  int n_embd, n_ff, n_ff_shared, n_rows, n_expert, n_threads;
  bool repack;
};

// Returns the outputs.
std::vector<float> run_case(const Case& c, Isa isa) {
  SCOPED_TRACE(testing::Message() << dtype_name(c.dtype) << " embd " << c.n_embd << " ff " << c.n_ff
                                  << " rows " << c.n_rows << " threads " << c.n_threads << " repack "
                                  << c.repack << " " << isa_name(isa));
  std::mt19937 random(3);
  std::vector<TestFfn> experts;
  for (int e = 0; e < c.n_expert; ++e) experts.emplace_back(c.dtype, c.n_embd, c.n_ff, random, c.repack);
  const TestFfn shared(c.dtype, c.n_embd, c.n_ff_shared, random, c.repack);

  ThreadPool pool({.n_threads = c.n_threads});
  const QuantMatmulKernels& matmul = quant_matmul_kernels(isa);
  const LinearScratch linear_scratch(
      c.n_threads, c.repack ? 0
                            : std::max(panel_bytes(c.dtype, c.n_embd),
                                       panel_bytes(c.dtype, std::max(c.n_ff, c.n_ff_shared))));
  ActBuffer x(c.n_rows, c.n_embd);
  ActFormats formats;
  formats.add(shared.ffn.gate);
  std::normal_distribution<float> normal;
  for (int r = 0; r < c.n_rows; ++r) {
    for (int i = 0; i < c.n_embd; ++i) x.row(r)[i] = normal(random);
    x.quantize(r, c.n_embd, formats, matmul);
  }

  // Very uneven: most rows use expert 0, expert 1 is never used, some use the last.
  std::vector<int32_t> pair_rows;
  std::vector<float> pair_weights;
  std::vector<FfnGroup> groups;
  for (int e = 0; e < c.n_expert; ++e) {
    const int begin = static_cast<int>(pair_rows.size());
    for (int r = 0; r < c.n_rows; ++r) {
      if (e == 1 || (e > 1 && (r * 7 + e) % c.n_expert != 0)) continue;
      pair_rows.push_back(r);
      pair_weights.push_back(0.25f + 0.5f * static_cast<float>(e + r % 3));
    }
    const int n = static_cast<int>(pair_rows.size()) - begin;
    if (n > 0) groups.push_back({&experts[static_cast<size_t>(e)].ffn, begin, n});
  }
  const int shared_begin = static_cast<int>(pair_rows.size());
  for (int r = 0; r < c.n_rows; ++r) {
    pair_rows.push_back(r);
    pair_weights.push_back(0.5f);
  }
  groups.push_back({&shared.ffn, shared_begin, c.n_rows});

  std::vector<float> y(static_cast<size_t>(c.n_rows * c.n_embd), 1.0f);  // adds to what is there
  ExpertFfnScratch scratch(static_cast<int>(pair_rows.size()), std::max(c.n_ff, c.n_ff_shared),
                           c.n_expert + 1, c.n_threads);
  ExpertSums sums(c.n_rows, c.n_embd);
  const ExpertFfnArgs args{.groups = groups,
                           .pair_rows = pair_rows.data(),
                           .pair_weights = pair_weights.data(),
                           .x = &x,
                           .sums = &sums,
                           .n_rows = c.n_rows,
                           .y = y.data(),
                           .y_stride = c.n_embd,
                           .n_embd = c.n_embd};
  const LinearContext context{matmul, pool, linear_scratch};
  expert_ffn_cpu(args, scratch, row_op_kernels(isa), context);

  // Rows that come into their forms late: nobody has looked at them before.
  ActBuffer late_x(c.n_rows, c.n_embd);
  std::vector<float> late_y(y.size(), 1.0f);
  ExpertFfnArgs late = args;
  late.x = &late_x;
  late.y = late_y.data();
  const std::function<void()> prepare = [&] {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    for (int r = 0; r < c.n_rows; ++r) {
      std::copy_n(x.row(r), c.n_embd, late_x.row(r));
      late_x.quantize(r, c.n_embd, formats, matmul);
    }
  };
  late.prepare_x = &prepare;
  expert_ffn_cpu(late, scratch, row_op_kernels(isa), context);
  EXPECT_EQ(late_y, y);

  // Whole experts for each thread: the same bits.
  WholeExperts whole(std::max(c.n_ff, c.n_ff_shared), c.n_embd, c.n_expert + 1, c.n_threads);
  EXPECT_EQ(whole.suits(args, c.n_threads),
            c.n_rows <= WholeExperts::kMaxRows && static_cast<int>(groups.size()) >= 4 * c.n_threads);
  if (c.n_rows <= WholeExperts::kMaxRows) {
    std::vector<float> whole_y(y.size(), 1.0f);
    ExpertFfnArgs other = args;
    other.y = whole_y.data();
    whole.run(other, row_op_kernels(isa), context);
    EXPECT_EQ(whole_y, y);
  }

  // In two parts, the later groups first: the same bits.
  std::vector<float> cut_y(y.size(), 1.0f);
  ExpertFfnArgs part = args;
  part.y = nullptr;
  part.groups = std::span(groups).subspan(1);
  expert_ffn_cpu(part, scratch, row_op_kernels(isa), context);
  part.y = cut_y.data();
  part.fresh = false;
  part.groups = std::span(groups).first(1);
  expert_ffn_cpu(part, scratch, row_op_kernels(isa), context);
  EXPECT_EQ(cut_y, y);

  std::vector<double> want(y.size(), 1.0);
  for (const FfnGroup& group : groups)
    for (int p = group.pair_begin; p < group.pair_begin + group.n_pairs; ++p) {
      const TestFfn& owner = group.ffn == &shared.ffn
                                 ? shared
                                 : experts[static_cast<size_t>(
                                       std::find_if(experts.begin(), experts.end(),
                                                    [&](const TestFfn& f) { return &f.ffn == group.ffn; }) -
                                       experts.begin())];
      const std::vector<double> out = owner.apply(x.row(pair_rows[static_cast<size_t>(p)]), c.n_embd);
      for (size_t i = 0; i < out.size(); ++i)
        want[static_cast<size_t>(pair_rows[static_cast<size_t>(p)]) * out.size() + i] +=
            static_cast<double>(pair_weights[static_cast<size_t>(p)]) * out[i];
    }
  double square = 0, error = 0, worst = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    square += (want[i] - 1.0) * (want[i] - 1.0);
    error += (y[i] - want[i]) * (y[i] - want[i]);
    worst = std::max(worst, std::fabs(y[i] - want[i]));
  }
  // Float weights: float rounding. Quantised: both inputs are rounded to 8 bits, 1/127/sqrt(12) of a block's
  // largest value (3 to 4 sigma) each, gate and up and down: under 2 % of the output's spread, and no
  // outliers.
  const double sigma = std::sqrt(square / static_cast<double>(y.size()));
  const double bound = c.dtype == DType::F32 ? 1e-5 : 0.02;
  EXPECT_LT(std::sqrt(error / static_cast<double>(y.size())) / sigma, bound);
  EXPECT_LT(worst / sigma, 8 * bound);
  return y;
}

// Few rows and as many as AMX takes: an expert's output does not show who computed it.
TEST(ExpertFfn, GivesTheSameBitsOnEveryVectorPath) {
  for (const DType dtype :
       {DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q8_0, DType::IQ4_XS, DType::MXFP4, DType::Q4_0,
        DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::IQ4_NL, DType::Q3_K, DType::F32}) {
    std::vector<float> want;
    for (const Isa isa : available_isas()) {
      if (isa == Isa::Portable) continue;
      const std::vector<float> got = run_case({dtype, 512, 256, 256, 21, 3, 2, true}, isa);
      if (want.empty()) want = got;
      EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
          << dtype_name(dtype) << " " << isa_name(isa);
    }
  }
}

TEST(ExpertFfn, AddsTheWeightedSumOfItsExpertsForEveryRow) {
  for (const Isa isa : available_isas()) {
    run_case({DType::F32, 64, 32, 48, 5, 4, 2, true}, isa);
    run_case({DType::F32, 64, 32, 16, 70, 6, 3, true}, isa);
    run_case({DType::Q8_0, 96, 32, 64, 3, 4, 2, true}, isa);
    run_case({DType::Q4_K, 256, 256, 512, 1, 4, 2, true}, isa);
    run_case({DType::Q4_K, 512, 256, 256, 67, 5, 2, true}, isa);
    run_case({DType::Q6_K, 256, 512, 256, 17, 8, 4, true}, isa);
    run_case({DType::Q4_K, 512, 256, 512, 32, 16, 2, true}, isa);
  }
}

TEST(ExpertFfn, PacksPanelsOnTheFlyWhenTheWeightsAreNotRepacked) {
  run_case({DType::F32, 64, 32, 48, 5, 4, 2, false}, best_isa());
  run_case({DType::Q4_K, 512, 256, 256, 9, 5, 2, false}, best_isa());
}

}  // namespace
}  // namespace thermo
