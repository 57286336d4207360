// Loads whose values are not used: they bring memory into the core's cache while the thread has nothing else
// to do.
//
// Not prefetches: the processor drops those when memory is busy, which is exactly the case here (Zen 4: a
// prefetched expert was computed in 47 instead of 60 us, a loaded one in 20, as from the cache).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace thermo {

inline void load_line(const std::byte* p) noexcept {
  static_cast<void>(*reinterpret_cast<const volatile uint64_t*>(p));
}

// What is left to load of a range that consists of whole lines.
struct LoadRange {
  static constexpr size_t kLine = 64;
  static constexpr size_t kPieceBytes = 16 * kLine;  // 0.1 us

  const std::byte *at = nullptr, *end = nullptr;

  bool empty() const { return at == end; }
  // The next piece; how many bytes it had.
  size_t load_piece() noexcept {
    const std::byte* const begin = at;
    const std::byte* const stop = at + std::min<ptrdiff_t>(kPieceBytes, end - at);
    for (; at < stop; at += kLine) load_line(at);
    return static_cast<size_t>(at - begin);
  }
};

}  // namespace thermo
