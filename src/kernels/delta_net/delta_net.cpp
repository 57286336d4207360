#include "kernels/delta_net/delta_net.h"

namespace thermo {

extern const DeltaNetKernels delta_net_kernels_portable;
#if defined(__x86_64__)
extern const DeltaNetKernels delta_net_kernels_avx2;
extern const DeltaNetKernels delta_net_kernels_avx512;
#endif

const DeltaNetKernels& delta_net_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::Avx2:
      return delta_net_kernels_avx2;
    case Isa::Avx512:
    case Isa::Amx:
      return delta_net_kernels_avx512;
#endif
    default:
      return delta_net_kernels_portable;
  }
}

size_t delta_net_scratch_floats(int dim) {
  // DeltaScratch of delta_net_impl.h: the state, keys and deltas of a chunk, two Gram matrices, row scales.
  const size_t d = static_cast<size_t>(dim);
  const size_t chunk = kDeltaChunk;
  const size_t floats = d * d + 2 * d * chunk + 2 * chunk * chunk + d + chunk;
  return (floats + 15) / 16 * 16;
}

}  // namespace thermo
