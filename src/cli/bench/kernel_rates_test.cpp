#include "cli/bench/kernel_rates.h"

#include <gtest/gtest.h>

#include "base/thread_pool.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

// It was that of the measured weights, also for a model in the same program.
TEST(KernelRates, LeavesThePrefetchDistanceAsItWas) {
  constexpr int kOfAModel = 1234;  // none that is tried
  const int before = prefetch_ahead();
  set_prefetch_ahead(kOfAModel);
  ThreadPool pool({.n_threads = 2, .pin = false});
  measure_small_product(DType::Q4_K, best_isa(), pool);
  EXPECT_EQ(prefetch_ahead(), kOfAModel);
  set_prefetch_ahead(before);
}

}  // namespace
}  // namespace thermo
