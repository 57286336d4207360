// How the output of attention is gated, head by head.
#pragma once

#include <cstdint>

namespace thermo {

enum class HeadGate : uint8_t {
  None,
  SigmoidElement,   // the second half of each query head, sigmoid
  SoftplusHead,     // one softplus value per head
  SoftplusElement,  // one softplus value per element
};

}  // namespace thermo
