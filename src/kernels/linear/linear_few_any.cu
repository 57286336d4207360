// Every quantised type.
#include "kernels/linear/linear_few.cuh"
#include "kernels/linear/linear_few_cuda.h"

namespace thermo {

void launch_few_any(FewPlan& plan, StreamView stream) noexcept {
  launch_few_rows<true>(plan, stream);
}

}  // namespace thermo
