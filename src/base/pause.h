// A short pause between two looks at a value that another thread will change soon.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <thread>
#endif

namespace thermo {

inline void pause_cpu() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace thermo
