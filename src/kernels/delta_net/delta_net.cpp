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
    case Isa::AvxVnni:
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
  // Blocks of the state: one for a chain, five for a tree of kDeltaChunk rows (TreePlan).
  constexpr size_t kBlocks = 5;
  return kBlocks * kDeltaBlockRows * static_cast<size_t>(dim);
}

}  // namespace thermo
