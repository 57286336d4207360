// How kernels under the address sanitizer of GCC check their accesses; nothing in other builds.
#pragma once

#include <cstddef>

namespace thermo {

#if defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)
// Whether n bytes from here are surely accessible. Where it says no, the sanitizer has to be asked.
bool surely_accessible(const void* at, size_t n);
#endif

}  // namespace thermo
