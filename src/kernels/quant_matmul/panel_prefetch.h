// When weights are asked for before they are used; for kernel_avx2.h and kernel_avx512.h, after their
// panel_*.h.
#pragma once

#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {
namespace {

// From three activation rows on their streams make the processor's own prefetcher lose the weights', and
// reading from memory falls to a third; what follows the panels is asked for too, it is mostly the
// thread's next task. With fewer rows processors differ, so the distance is measured (set_prefetch_ahead).
// There another thread's panels must be left alone: 16 cores on cold experts, each with 36 KiB of a matrix,
// decoded 241 and 249 tokens/s with 12 KiB ahead and no limit, 252 and 285 with it, 276 and 296 with 4 KiB,
// 277 and 272 with 2 KiB.
inline constexpr int kManyAhead = 12288;
template <int NC>
THERMO_INLINE int ahead_of() {
  return NC < 3 ? few_rows_ahead.load(std::memory_order_relaxed) : kManyAhead;
}

// Asks for N bytes of weights that will be used soon, where they lie before `limit`.
template <int N, int NC>
THERMO_INLINE void prefetch(const uint8_t* p, const uint8_t* limit) {
  const int ahead = ahead_of<NC>();
  if (p + ahead < limit)
    unroll<N / 64>([&](auto i) THERMO_LAMBDA {
      _mm_prefetch(reinterpret_cast<const char*>(p + ahead + 64 * i), _MM_HINT_T1);
    });
}

// Up to where the weights of a pass of NC rows are asked for; nullptr: nowhere.
template <int NC>
const uint8_t* prefetch_limit(const PanelMatmulArgs& a, size_t stride, bool cold) {
  if (!cold || ahead_of<NC>() == 0) return nullptr;
  const uint8_t* const panels = reinterpret_cast<const uint8_t*>(a.panels);
  return panels + static_cast<size_t>(a.n_panels) * stride + (NC < 3 ? 0 : kManyAhead);
}

}  // namespace
}  // namespace thermo
