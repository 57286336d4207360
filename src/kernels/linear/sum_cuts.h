// How a sum over the columns of a matrix is cut: by shapes alone, whoever computes it and however many rows
// there are, so that a row's bits do not depend on its neighbours.
#pragma once

#include "kernels/linear/device_matrix.h"

namespace thermo {

// 2^parts_log2 parts, which the reader adds up, of 2^cuts_log2 cuts each, in chunks of 256 columns.
struct SumCuts {
  int parts_log2 = 0, cuts_log2 = 0;

#ifdef __CUDACC__
  __host__ __device__
#endif
      constexpr bool
      any() const {
    return parts_log2 + cuts_log2 > 0;
  }
  // The first chunk of a cut of a part; the last cut ends where the next part begins.
#ifdef __CUDACC__
  __host__ __device__
#endif
      constexpr int
      begin(int n_chunks, int part, int cut) const {
    return n_chunks * ((part << cuts_log2) + cut) >> (parts_log2 + cuts_log2);
  }
};

}  // namespace thermo
