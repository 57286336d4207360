// When weights are asked for before they are used; for kernel_avx2.h and kernel_avx512.h, after their
// panel_*.h.
#pragma once

#include "base/cpu_info.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

// Asks for N bytes of weights that will be used soon, where they lie before `limit`.
//
// From three activation rows on their streams make the processor's own prefetcher lose the weights', and
// reading from memory falls to a third; what follows the panels is asked for too, it is mostly the
// thread's next task. With fewer rows Zen 4's does better alone (see above); Sapphire and Emerald Rapids' do
// not, but there another thread's panels must be left alone: 16 cores on cold experts, each with 36 KiB of a
// matrix, decoded 241 and 249 tokens/s with 12 KiB ahead and no limit, 252 and 285 with it, 276 and 296 with
// 4 KiB, 277 and 272 with 2 KiB.
template <int NC>
inline constexpr int kAhead = NC < 3 ? 4096 : 12288;
const bool prefetch_few_rows = cpu_info().amx_int8;
template <int N, int NC>
THERMO_INLINE void prefetch(const uint8_t* p, const uint8_t* limit) {
  if (p + kAhead<NC> < limit)
    unroll<N / 64>([&](auto i) THERMO_LAMBDA {
      _mm_prefetch(reinterpret_cast<const char*>(p + kAhead<NC> + 64 * i), _MM_HINT_T1);
    });
}

// Up to where the weights of a pass of NC rows are asked for; nullptr: nowhere.
template <int NC>
const uint8_t* prefetch_limit(const PanelMatmulArgs& a, size_t stride, bool cold) {
  if (!cold || (NC < 3 && !prefetch_few_rows)) return nullptr;
  const uint8_t* const panels = reinterpret_cast<const uint8_t*>(a.panels);
  return panels + static_cast<size_t>(a.n_panels) * stride + (NC < 3 ? 0 : kAhead<NC>);
}

}  // namespace
}  // namespace thermo
