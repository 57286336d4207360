// Checks for bugs in our own code. Never reachable from a file, a flag or a socket: those get an error
// (base/error.h, base/result.h).
#pragma once

namespace thermo {

// Prints the file, the line and the sentence, then aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const char* sentence) noexcept;

}  // namespace thermo

#define THERMO_CHECK(condition, sentence)              \
  (static_cast<bool>(condition) ? static_cast<void>(0) \
                                : ::thermo::check_failed(__FILE__, __LINE__, #condition, sentence))

#ifdef NDEBUG
#define THERMO_DCHECK(condition, sentence) static_cast<void>(0)
#else
#define THERMO_DCHECK(condition, sentence) THERMO_CHECK(condition, sentence)
#endif
