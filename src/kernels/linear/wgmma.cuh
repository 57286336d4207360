// Warpgroup products (compute capability 9.0, architecture 90a): four warps multiply 64 weight rows, in
// registers, with 256 or 128 activation rows, in shared memory, 16 columns at a time, and go on while the
// tensor cores work. Compiled for anything else there is no body: the host asks wgmma_possible().
//
// A warp has 16 of the 64 rows. Its A operand and its sums lie as those of mma.m16n8k16 (panel_mma.cuh).
#pragma once

#include <cstdint>

#include "device/device_info.h"
#include "kernels/linear/bulk_copy.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define THERMO_HAS_WGMMA 1
#else
#define THERMO_HAS_WGMMA 0
#endif

// Sums as operands of inline assembly: d[i] .. d[i + 7], d[i .. i + 63]; and their numbers in its text.
#define THERMO_SUMS_8(d, i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define THERMO_SUMS_64(d, i)                                                                        \
  THERMO_SUMS_8(d, i), THERMO_SUMS_8(d, i + 8), THERMO_SUMS_8(d, i + 16), THERMO_SUMS_8(d, i + 24), \
      THERMO_SUMS_8(d, i + 32), THERMO_SUMS_8(d, i + 40), THERMO_SUMS_8(d, i + 48), THERMO_SUMS_8(d, i + 56)
#define THERMO_NUMBERS_TO_63                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define THERMO_NUMBERS_64_TO_127                                                                 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

namespace thermo {

// B: rows of 128 bytes, groups of eight rows 1024 bytes apart, 16-byte piece p of row r at p ^ (r & 7).
// `rows` lies at a multiple of 1024 bytes, or 32 bytes further for every 16 columns.
__device__ __forceinline__ uint64_t wgmma_rows(uint32_t rows) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kGroupStep = static_cast<uint64_t>(1024 >> 4) << 32;
  return kSwizzle128 | kGroupStep | 1ull << 16 | (rows & 0x3ffff) >> 4;
}

// Registers written so far may be read by the products that follow.
__device__ __forceinline__ void wgmma_begin() {
#if THERMO_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if THERMO_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// All but the last group are done. `a`: operands of the one before, which keep their registers until now.
__device__ __forceinline__ void wgmma_wait_last(uint32_t (&a)[8]) {
#if THERMO_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned 1;"
               : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(a[4]), "+r"(a[5]), "+r"(a[6]),
                 "+r"(a[7])
               :
               : "memory");
#endif
}
__device__ __forceinline__ void wgmma_wait_all(float (&d)[128]) {
#if THERMO_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned 0;" : THERMO_SUMS_64(d, 0), THERMO_SUMS_64(d, 64) : : "memory");
#endif
}
__device__ __forceinline__ void wgmma_wait_all(float (&d)[64]) {
#if THERMO_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned 0;" : THERMO_SUMS_64(d, 0) : : "memory");
#endif
}

// d = a * b, or d + a * b where `adds`. a[0..3]: the operand. 256 or 128 activation rows.
__device__ __forceinline__ void wgmma_16(float (&d)[128], const uint32_t* a, uint64_t b, int adds) {
#if THERMO_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{" THERMO_NUMBERS_TO_63 ", " THERMO_NUMBERS_64_TO_127
      "}, "
      "{%128, %129, %130, %131}, %132, p, 1, 1, 0;\n"
      "}\n"
      : THERMO_SUMS_64(d, 0), THERMO_SUMS_64(d, 64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)
      : "memory");
#endif
}
__device__ __forceinline__ void wgmma_16(float (&d)[64], const uint32_t* a, uint64_t b, int adds) {
#if THERMO_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{" THERMO_NUMBERS_TO_63
      "}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
      "}\n"
      : THERMO_SUMS_64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)
      : "memory");
#endif
}

// More registers for the warpgroups that multiply, at the cost of those that copy.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if THERMO_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#if THERMO_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace thermo

#undef THERMO_SUMS_8
#undef THERMO_SUMS_64
#undef THERMO_NUMBERS_TO_63
#undef THERMO_NUMBERS_64_TO_127
