#include "kernels/delta_net/delta_net.h"

#include "kernels/choose_by_isa.h"

namespace thermo {

THERMO_CHOOSE_BY_ISA(DeltaNetKernels, delta_net_kernels)

size_t delta_net_scratch_floats(int dim) {
  // Blocks of the state: one for a chain, five for a tree of kDeltaChunk rows (TreePlan).
  constexpr size_t kBlocks = 5;
  return kBlocks * kDeltaBlockRows * static_cast<size_t>(dim);
}

}  // namespace thermo
