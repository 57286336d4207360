// Fewer cases under a sanitizer. What it reports follows from a shape, a format and a kernel, and not from
// which of them come together or from the numbers: loops over all combinations take every n-th there.
#pragma once

#include "base/sanitized.h"

namespace thermo::testing {

// Asked once for each case. n is prime to the lengths of the loops: then every value of each is taken, if the
// loops within it have n cases or those around it repeat it often enough.
class Thinned {
 public:
  explicit Thinned(int n) : n_(n) {}
  bool takes() { return !kSanitized || i_++ % n_ == 0; }

 private:
  int n_, i_ = 0;
};

}  // namespace thermo::testing
