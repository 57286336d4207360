// THERMO_CHOOSE_BY_ISA(Table, name) defines `const Table& name(Isa)`, which chooses name_portable, name_avx2
// or name_avx512: for operations other than products of matrices, which alone have code for AVX-VNNI and AMX.
#pragma once

#include "kernels/isa.h"

#if defined(__x86_64__)
#define THERMO_CHOOSE_BY_ISA(Table, name)                                                         \
  extern const Table name##_portable, name##_avx2, name##_avx512;                                 \
  const Table& name(Isa isa) {                                                                    \
    return isa >= Isa::Avx512 ? name##_avx512 : isa >= Isa::Avx2 ? name##_avx2 : name##_portable; \
  }
#else
#define THERMO_CHOOSE_BY_ISA(Table, name) \
  extern const Table name##_portable;     \
  const Table& name(Isa) {                \
    return name##_portable;               \
  }
#endif
