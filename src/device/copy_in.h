// Small inputs of a step, read from page-locked memory by a kernel. A copy would queue in the card's one copy
// engine for that direction, after experts that are on their way, 40 us each.
#pragma once

#include <cstddef>

#include "device/stream.h"

namespace thermo {

// REQUIRES: both aligned to 4, n_bytes a multiple of 4. `from` is a PinnedBuffer's and stays unchanged until
// the stream has passed this point.
void copy_in_cuda(void* to, const void* from, size_t n_bytes, StreamView stream) noexcept;

}  // namespace thermo
