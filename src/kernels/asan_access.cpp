// Files of kernels call a function of the address sanitizer for each access of a vector (cmake/thermo.cmake
// says why). Its own functions look at the whole region with general code, which took two thirds of the time
// of a model. These take their place in the program: the same region, by one or two loads of the shadow.
#include "kernels/asan_access.h"

#if defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)

#include <cstdint>

#define THERMO_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

extern "C" {
void* __asan_region_is_poisoned(void* begin, size_t n);
// As GCC knows them.
void __asan_report_load_n(void* at, long n);
void __asan_report_store_n(void* at, long n);
void __asan_loadN(void* at, long n);
void __asan_storeN(void* at, long n);
// The linker takes this file for its sake (cmake/thermo.cmake): of the functions it knows others already.
extern const char thermo_asan_access;
const char thermo_asan_access = 1;
}

namespace thermo {
namespace {

// A byte of the shadow says 0 where its eight bytes are accessible. GCC writes this offset into the checks
// that it puts into code, too. Loads from the first byte on are no wider than the region's part of the
// shadow.
THERMO_UNCHECKED __attribute__((always_inline)) inline bool is_clear(uintptr_t at, size_t n) {
  constexpr uintptr_t kShadow = 0x7fff8000;
  const auto* const first = reinterpret_cast<const uint8_t*>((at >> 3) + kShadow);
  const auto* const last = reinterpret_cast<const uint8_t*>(((at + n - 1) >> 3) + kShadow);
  uint64_t shadow = 0;
  if (n > 56 && n <= 64)
    __builtin_memcpy(&shadow, first, 8);
  else if (n > 24 && n <= 32)
    __builtin_memcpy(&shadow, first, 4);
  else if (n > 8 && n <= 16)
    __builtin_memcpy(&shadow, first, 2);
  else if (n > 0 && n <= 8)
    shadow = *first;
  else
    return false;
  return (shadow | *last) == 0;
}

}  // namespace

THERMO_UNCHECKED bool surely_accessible(const void* at, size_t n) {
  return is_clear(reinterpret_cast<uintptr_t>(at), n);
}

}  // namespace thermo

THERMO_UNCHECKED void __asan_loadN(void* at, long n) {
  if (thermo::is_clear(reinterpret_cast<uintptr_t>(at), static_cast<size_t>(n))) return;
  if (__asan_region_is_poisoned(at, static_cast<size_t>(n))) __asan_report_load_n(at, n);
}
THERMO_UNCHECKED void __asan_storeN(void* at, long n) {
  if (thermo::is_clear(reinterpret_cast<uintptr_t>(at), static_cast<size_t>(n))) return;
  if (__asan_region_is_poisoned(at, static_cast<size_t>(n))) __asan_report_store_n(at, n);
}

#endif
