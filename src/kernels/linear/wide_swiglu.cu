// Gate and up of more than 64 rows on Hopper, and silu(gate) * up: wide_product.cuh with 64 rows of gate in
// the first warpgroup and the same of up in the second. The two exchange half of their sums through shared
// memory. What 64 rows make of 256 activation rows is a tile of the product that reads it.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/linear_wide_launch.cuh"

namespace thermo {
namespace {

constexpr int kSwigluRows = 64;  // of gate, and as many of up, of a block

#if THERMO_HAS_WGMMA
// The threads that multiply.
__device__ __forceinline__ void sync_groups() {
  asm volatile("bar.sync 1, %0;" ::"n"(128 * kWideGroups) : "memory");
}
#endif

template <DType T, int kActs>
__global__ void __launch_bounds__(kWideBound, 1) wide_swiglu_kernel(const __grid_constant__ WidePlan plan) {
#if THERMO_HAS_WGMMA
  constexpr int kStageBytes = wide_stage_bytes(kActs),
                kHalf = kActs / 16;  // half of the sums: of 8 rows each
  extern __shared__ std::byte shared[];
  const WideBlock block(shared);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane >> 2,
            t = lane & 3;
  std::byte* const out = block.stages + kWideStages * kStageBytes;
  float4* const exchange = reinterpret_cast<float4*>(out + kStageBytes);  // [group][kHalf][thread]
  if (group == kWideGroups) {
    block.template copy<kActs>(plan);
    block.finish();
  } else {
    take_registers<kWideRegisters>();
    wide_multiply<T, kActs>(
        plan, block.barriers, block.stages, block.rank,
        [&](const WideItem& item) {
          const DeviceMatrix& w = plan.jobs[group].w;
          return w.panels + (item.tile * (kSwigluRows / 16) + warp) * w.panel_bytes;
        },
        [&](const WideItem& item, const float(&acc)[kActs / 2]) {
          const int thread = threadIdx.x % 128;
          // The first group makes the first half of the activation rows of the tile, the second the others.
          float4* const give = exchange + group * (kHalf * 128) + thread;
          const float4* const take = exchange + (1 - group) * (kHalf * 128) + thread;
          const auto sums = [&](int n) {
            return float4{acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]};
          };
#pragma unroll
          for (int n = 0; n < kHalf; ++n) give[n * 128] = group == 0 ? sums(n + kHalf) : sums(n);
          if (threadIdx.x == 0) bulk_copy_out_wait();
          sync_groups();
          const int piece = (warp >> 1) * 4 + (warp & 1) * 2 + (g & 1);
          const float to_hidden = 1.0f / plan.hidden_scale;
#pragma unroll
          for (int n = 0; n < kHalf; ++n) {
            const float4 mine = group == 0 ? sums(n) : sums(n + kHalf), other = take[n * 128];
            const auto value = [&](float here, float there) {
              const float gate = group == 0 ? here : there, up = group == 0 ? there : here;
              const float x = silu(gate * plan.scale) * (up * plan.scale) * to_hidden;
              return fminf(fmaxf(x, -65504.0f), 65504.0f);
            };
            // Of columns 2g and 2g + 1, for two activation rows. Lanes g and g ^ 1 have four columns.
            const half2 first = __floats2half2_rn(value(mine.x, other.x), value(mine.y, other.y)),
                        second = __floats2half2_rn(value(mine.z, other.z), value(mine.w, other.w));
            const bool odd = g & 1;
            const half2 got = as_half2(__shfl_xor_sync(0xffffffffu, as_bits(odd ? first : second), 4));
            const half2 low = odd ? got : first, high = odd ? second : got;
            const int act = group * (kActs / 2) + 8 * n + 2 * t;
            *reinterpret_cast<half2*>(out + wide_piece(act, piece) + (g >> 1) * 4) = __lows2half2(low, high);
            *reinterpret_cast<half2*>(out + wide_piece(act + 1, piece) + (g >> 1) * 4) =
                __highs2half2(low, high);
          }
          bulk_reuse();
          sync_groups();
          const size_t n_stages = plan.jobs[0].w.n_rows / kWideCols;
          if (threadIdx.x == 0)
            bulk_copy_out(plan.hidden + (item.act_tile * n_stages + item.tile) * kStageBytes, out,
                          kStageBytes);
        });
    if (threadIdx.x == 0) bulk_copy_out_wait();
    __syncwarp();
    block.finish();
  }
#endif
}

template <DType T, int kActs>
void launch_swiglu_tiles(const WidePlan& plan, StreamView stream) {
  constexpr int kBytes = wide_swiglu_bytes(kActs);
  static const bool ready = [] { return allow_shared(wide_swiglu_kernel<T, kActs>, kBytes), true; }();
  static_cast<void>(ready);
  launch_wide_blocks(wide_swiglu_kernel<T, kActs>, plan, kBytes, stream);
}
template <DType T>
void launch_swiglu(const WidePlan& plan, StreamView stream) {
  if (wide_tile_rows(plan.n_acts) == kLowWideTileRows)
    launch_swiglu_tiles<T, kLowWideTileRows>(plan, stream);
  else
    launch_swiglu_tiles<T, kWideTileRows>(plan, stream);
}

}  // namespace

bool wide_swiglu_preferred(const DeviceMatrix& gate, const DeviceMatrix& up, int n_acts) noexcept {
  return wide_preferred(gate, n_acts) && gate.dtype == up.dtype && gate.n_rows == up.n_rows &&
         gate.n_rows % 256 == 0;
}

void wide_swiglu_cuda(const WideSwigluArgs& args, StreamView stream) noexcept {
  WidePlan plan = wide_plan(args.tiles, args.scale, args.n_acts, args.gate.n_cols);
  plan.jobs[0].w = args.gate;
  plan.jobs[1].w = args.up;
  plan.n_jobs = 1;
  plan.first_item[1] = args.gate.n_rows / (kSwigluRows * kWideCluster) * plan.n_act_tiles;
  plan.hidden = static_cast<std::byte*>(args.hidden);
  plan.hidden_scale = args.hidden_scale;
#define CASE(t)                          \
  launch_swiglu<DType::t>(plan, stream); \
  break
  THERMO_FOR_QUANT_TYPE(args.gate.dtype, CASE)
#undef CASE
}

}  // namespace thermo
