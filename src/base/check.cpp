#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace thermo {

void check_failed(const char* file, int line, const char* condition, const char* sentence) noexcept {
  std::fprintf(stderr, "%s:%d: internal error: %s (%s)\n", file, line, sentence, condition);
  std::abort();
}

}  // namespace thermo
