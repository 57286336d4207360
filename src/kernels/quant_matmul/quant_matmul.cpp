#include "kernels/quant_matmul/quant_matmul.h"

#include "base/check.h"
#include "base/cpu_info.h"
#include "kernels/quant_matmul/panel_layout.h"
#include "kernels/quant_matmul/quant_matmul_impl.h"

namespace thermo {

// Until it is measured: what Sapphire Rapids needs, and what Zen 4 does best with.
std::atomic<int> few_rows_ahead{cpu_info().amx_int8 ? 4096 : 0};

void set_prefetch_ahead(int bytes) noexcept {
  few_rows_ahead.store(bytes, std::memory_order_relaxed);
}
int prefetch_ahead() noexcept {
  return few_rows_ahead.load(std::memory_order_relaxed);
}

namespace {

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

template <DType T>
size_t quant_panel_bytes(int n_cols) {
  constexpr PanelFormat f = kPanelFormat<T>;
  THERMO_CHECK(n_cols % f.block_cols == 0, "a panel's columns must be whole blocks");
  const size_t n_blocks = static_cast<size_t>(n_cols / f.block_cols);
  return (n_blocks + f.unit_blocks - 1) / f.unit_blocks * 64 + n_blocks * kPanelFormat<T>.body_bytes();
}

}  // namespace

ActFormat act_format(DType weight) {
  switch (weight) {
    case DType::Q4_0:
    case DType::Q4_1:
    case DType::Q5_0:
    case DType::Q5_1:
    case DType::Q8_0:
    case DType::IQ4_NL:
    case DType::MXFP4:
      return ActFormat::Q8x32;
    case DType::Q2_K:
    case DType::Q3_K:
    case DType::Q4_K:
    case DType::Q5_K:
    case DType::Q6_K:
    case DType::IQ4_XS:
      return ActFormat::Q8x256;
    default:
      return ActFormat::F32;
  }
}

size_t act_row_bytes(ActFormat format, int n_cols) {
  const size_t n = static_cast<size_t>(n_cols);
  // An odd number of cache lines, so that the same column of many rows does not fall into a few sets of the
  // cache.
  const auto odd_lines = [](size_t bytes) { return (round_up(bytes, 64) / 64 | 1) * 64; };
  switch (format) {
    case ActFormat::F32:
      return round_up(n * sizeof(float), 64);
    case ActFormat::Q8x32:
      return odd_lines(round_up(n, 64) + round_up(n, 64) / 32 * sizeof(ActMeta32));
    case ActFormat::Q8x256:
      return odd_lines(round_up(n, 256) + round_up(n, 256) / 256 * sizeof(ActMeta256));
  }
  return 0;
}

void scale_act_row(ActFormat format, int n_cols, float scale, std::byte* row) noexcept {
  const size_t n = static_cast<size_t>(n_cols);
  if (format == ActFormat::F32) {
    float* const x = reinterpret_cast<float*>(row);
    for (size_t i = 0; i < n; ++i) x[i] *= scale;
  } else if (format == ActFormat::Q8x32) {
    ActMeta32* const meta = reinterpret_cast<ActMeta32*>(row + round_up(n, 64));
    for (size_t b = 0; b < (n + 31) / 32; ++b) meta[b].d *= scale;
  } else {
    ActMeta256* const meta = reinterpret_cast<ActMeta256*>(row + round_up(n, 256));
    for (size_t b = 0; b < (n + 255) / 256; ++b) meta[b].d *= scale;
  }
}

size_t panel_bytes(DType dtype, int n_cols) {
  switch (dtype) {
    case DType::F32:
      return round_up(static_cast<size_t>(n_cols) * kPanelRows * 4, 64);
    case DType::F16:
    case DType::BF16:
      return round_up(static_cast<size_t>(n_cols) * kPanelRows * 2, 64);
    default:
      break;
  }
#define CASE(t) return quant_panel_bytes<DType::t>(n_cols)
  THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
  THERMO_CHECK(false, "panel_bytes needs a weight type");
}

const QuantMatmulKernels& quant_matmul_kernels(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::Portable:
      return kQuantMatmulPortable;
    case Isa::Avx2:
      return kQuantMatmulAvx2;
    case Isa::AvxVnni:
      return kQuantMatmulAvxVnni;
    case Isa::Avx512:
      return kQuantMatmulAvx512;
    case Isa::Amx:
      return kQuantMatmulAmx;
  }
#endif
  static_cast<void>(isa);
  return kQuantMatmulPortable;
}

}  // namespace thermo
