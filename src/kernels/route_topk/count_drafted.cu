// The uses of drafted rows that became text: a block for each layer, a thread for each (row, choice). A few
// hundred additions, queued when the rows are committed.
#include "device/launch.cuh"
#include "kernels/route_topk/route_topk_cuda.h"

namespace thermo {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) count_drafted_kernel(const __grid_constant__ CountDraftedArgs a) {
  allow_next();
  wait_for_inputs();
  const int layer = static_cast<int>(blockIdx.x);
  const int16_t* const chosen = a.drafted + layer * a.layer_stride;
  uint32_t* const counts = a.counts + static_cast<int64_t>(layer) * a.n_expert;
  for (int i = threadIdx.x; i < a.n_rows * a.n_used; i += kThreads) {
    const int row = a.rows[i / a.n_used];
    const int id = chosen[static_cast<int64_t>(row) * a.n_used + i % a.n_used];
    if (id >= 0) atomicAdd(counts + id, 1u);
  }
}

}  // namespace

void count_drafted_cuda(const CountDraftedArgs& args, StreamView stream) noexcept {
  if (args.n_rows == 0) return;
  launch(count_drafted_kernel, static_cast<unsigned>(args.n_layer), kThreads, 0, stream, args);
}

}  // namespace thermo
