#include "kernels/linear/prefetch_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/thread_pool.h"
#include "base/units.h"
#include "kernels/linear/linear.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

// What was chosen before holds again after a test.
class PrefetchChoice : public testing::Test {
 protected:
  ~PrefetchChoice() override { set_prefetch_ahead(before_); }

 private:
  int before_ = prefetch_ahead();
};

// 16 MiB in matrices of two widths; zeros are valid blocks.
class Weights {
 public:
  Weights() {
    for (const int n_cols : {2048, 512}) {
      const int n_rows =
          static_cast<int>(8 * MiB / row_bytes(DType::Q4_K, static_cast<uint64_t>(n_cols))) / 16 * 16;
      memory_.emplace_back(packed_matrix_bytes(DType::Q4_K, n_rows, n_cols));
      std::memset(memory_.back().data(), 0, memory_.back().size());
      matrices.push_back(
          {.dtype = DType::Q4_K, .n_rows = n_rows, .n_cols = n_cols, .panels = memory_.back().data()});
    }
  }
  std::vector<Matrix> matrices;

 private:
  std::vector<HostBuffer> memory_;
};

TEST_F(PrefetchChoice, KeepsTheDistanceUnlessAnotherIsClearlyFaster) {
  EXPECT_EQ(fastest_distance(std::array{1.0, 0.98, 0.99}, 0), 0);
  EXPECT_EQ(fastest_distance(std::array{1.0, 0.90, 0.80}, 0), 8192);
  EXPECT_EQ(fastest_distance(std::array{1.0, 0.99, 1.10}, 8192), 4096);
  EXPECT_EQ(fastest_distance(std::array{0.99, 1.0, 1.10}, 4096), 4096);
  EXPECT_EQ(fastest_distance(std::array{2.0, 1.5, 1.6}, 12345), 4096);  // a distance that is not compared
}

TEST_F(PrefetchChoice, MeasuresWithTheWeights) {
  const Weights weights;
  ThreadPool pool({.n_threads = 2, .pin = false});
  constexpr int kNotCompared = 64;
  set_prefetch_ahead(kNotCompared);
  choose_prefetch(weights.matrices, quant_matmul_kernels(best_isa()), pool, 16 * MiB - 64 * KiB);
  EXPECT_NE(std::ranges::find(kPrefetchDistances, prefetch_ahead()), kPrefetchDistances.end())
      << prefetch_ahead();
}

TEST_F(PrefetchChoice, LeavesModelsAloneThatMayStayInCaches) {
  const Weights weights;
  ThreadPool pool({.n_threads = 2, .pin = false});
  set_prefetch_ahead(64);
  choose_prefetch(weights.matrices, quant_matmul_kernels(best_isa()), pool);
  EXPECT_EQ(prefetch_ahead(), 64);
}

TEST_F(PrefetchChoice, LeavesUnpackedWeightsAlone) {
  Weights weights;
  for (Matrix& w : weights.matrices) w.panels = nullptr;
  ThreadPool pool({.n_threads = 2, .pin = false});
  set_prefetch_ahead(64);
  choose_prefetch(weights.matrices, quant_matmul_kernels(best_isa()), pool, 0);
  EXPECT_EQ(prefetch_ahead(), 64);
}

}  // namespace
}  // namespace thermo
