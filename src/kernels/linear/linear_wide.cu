// y = W x for more than 64 rows on Hopper: wide_product.cuh over tiles of the rows that wide_tiles_kernel
// cuts first. That takes 10 us for 2048 rows of 5120 columns, 37 for 17408: the bandwidth of the memory.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/linear_wide_launch.cuh"

namespace thermo {
namespace {

// A block: 32 rows, 256 columns. Four lanes have 32 columns of a row and exchange words: see wide_place().
constexpr int kCutThreads = 256, kCutRows = 32;

__global__ void __launch_bounds__(kCutThreads)
    wide_tiles_kernel(const __grid_constant__ DeviceActs x, const int32_t* row_index, int n_acts, int n_cols,
                      std::byte* tiles) {
  const int tile = wide_tile_rows(n_acts);
  allow_next();
  wait_for_inputs();
  const int piece = threadIdx.x % 32, chunk = blockIdx.x, t = piece % 4;
  const bool inside = chunk * 256 + piece * 8 < (n_cols + 31) / 32 * 32;
#pragma unroll
  for (int i = 0; i < kCutRows; i += kCutThreads / 32) {
    const int act = blockIdx.y * kCutRows + i + threadIdx.x / 32;
    if (act >= n_acts) break;
    uint4 w = {0, 0, 0, 0};
    if (inside)
      w = __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.f16) +
                                                (row_index == nullptr ? act : row_index[act]) * x.f16_stride +
                                                chunk * 256) +
                 piece);
    // Word j of lane i becomes word i of lane j.
    const auto swap = [](uint32_t& keep, uint32_t& give, bool second, int mask) {
      const uint32_t got = __shfl_xor_sync(0xffffffffu, second ? keep : give, mask);
      (second ? keep : give) = got;
    };
    swap(w.x, w.z, t & 2, 2);
    swap(w.y, w.w, t & 2, 2);
    swap(w.x, w.y, t & 1, 1);
    swap(w.z, w.w, t & 1, 1);
    const size_t stage =
        static_cast<size_t>(act / tile) * (gridDim.x * kWideStages) + chunk * kWideStages + piece / 8;
    *reinterpret_cast<uint4*>(tiles + stage * wide_stage_bytes(tile) + wide_piece(act % tile, piece % 8)) = w;
  }
}

template <DType T, int kActs>
__global__ void __launch_bounds__(kWideBound, 1) linear_wide_kernel(const __grid_constant__ WidePlan plan) {
#if THERMO_HAS_WGMMA
  extern __shared__ std::byte shared[];
  const WideBlock block(shared);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane >> 2,
            t = lane & 3;
  if (group == kWideGroups) {
    block.template copy<kActs>(plan);
    block.finish();
  } else {
    take_registers<kWideRegisters>();
    const auto panel_at = [&](const WideItem& item) {
      return item.tile * (kWideRows / 16) + group * 4 + warp;
    };
    wide_multiply<T, kActs>(
        plan, block.barriers, block.stages, block.rank,
        [&](const WideItem& item) {
          const DeviceMatrix& w = plan.jobs[item.job].w;
          return w.panels + min(panel_at(item), (w.n_rows - 1) / 16) * w.panel_bytes;
        },
        [&](const WideItem& item, const float(&acc)[kActs / 2]) {
          const DeviceLinearJob& job = plan.jobs[item.job];
          const int row = panel_at(item) * 16 + 2 * g, n_acts = plan.n_acts - item.act_tile * kActs;
          if (row >= job.w.n_rows) return;
          const int64_t step = job.y_stride;
          float* y = job.y + item.part * job.part_stride + (item.act_tile * kActs + 2 * t) * step + row;
          const bool pair = row + 1 < job.w.n_rows;
          const bool vectors = pair && reinterpret_cast<size_t>(y) % 8 == 0 && step % 2 == 0;
#pragma unroll
          for (int n = 0; n < kActs / 8; ++n, y += 8 * step)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (8 * n + 2 * t + i >= n_acts) return;
              float* const to = y + i * step;
              const float first = acc[4 * n + i] * plan.scale, second = acc[4 * n + i + 2] * plan.scale;
              if (vectors)
                *reinterpret_cast<float2*>(to) = {first, second};
              else {
                to[0] = first;
                if (pair) to[1] = second;
              }
            }
        });
    block.finish();
  }
#endif
}

template <DType T, int kActs>
void launch_wide_tiles(const WidePlan& plan, StreamView stream) {
  constexpr int kBytes = wide_shared_bytes(kActs);
  static const bool ready = [] { return allow_shared(linear_wide_kernel<T, kActs>, kBytes), true; }();
  static_cast<void>(ready);
  launch_wide_blocks(linear_wide_kernel<T, kActs>, plan, kBytes, stream);
}
template <DType T>
void launch_wide(const WidePlan& plan, StreamView stream) {
  if (wide_tile_rows(plan.n_acts) == kLowWideTileRows)
    launch_wide_tiles<T, kLowWideTileRows>(plan, stream);
  else
    launch_wide_tiles<T, kWideTileRows>(plan, stream);
}

// Whether this build has the kernels: another architecture has them with room for fewer threads.
bool wide_built() {
  static const bool built = [] {
    cudaFuncAttributes own{};
    return cudaFuncGetAttributes(&own, linear_wide_kernel<DType::Q4_K, kWideTileRows>) == cudaSuccess &&
           own.maxThreadsPerBlock >= kWideThreads;
  }();
  return built;
}

bool wide_cards() {
  const DeviceInfo& device = device_in_use();
  return device.compute_capability == 90 &&
         device.max_shared_bytes >= static_cast<size_t>(wide_swiglu_bytes(kWideTileRows)) && wide_built();
}

// Fewer activation rows have integer products with bits of their own. A matrix of few rows leaves most of the
// card idle.
constexpr int kMinWideActs = kMaxFewActs + 1, kMinWideRows = 1024;

}  // namespace

size_t wide_bytes(int n_acts, int n_cols) noexcept {
  const int tile = wide_tile_rows(n_acts);
  return static_cast<size_t>(ceil_div(n_acts, tile)) * static_cast<size_t>(ceil_div(n_cols, 256)) *
         static_cast<size_t>(kWideStages * wide_stage_bytes(tile));
}

bool wide_possible(const DeviceMatrix& w, int n_acts) noexcept {
  return n_acts >= kMinWideActs && !is_float_type(w.dtype) && wide_cards();
}

bool wide_preferred(const DeviceMatrix& w, int n_acts) noexcept {
  return w.n_rows >= kMinWideRows && wide_possible(w, n_acts);
}

size_t linear_room(int n_acts, int n_cols) noexcept {
  return wide_cards() ? wide_bytes(n_acts, n_cols) : 0;
}

int wide_parts(const DeviceMatrix& w, int n_acts) noexcept {
  const int most = n_acts <= kMaxCutActs ? kMaxLinearParts : 2;
  const int items = ceil_div(n_acts, wide_tile_rows(n_acts)) * ceil_div(w.n_rows, kWideRows * kWideCluster),
            clusters = device_in_use().n_multiprocessors / kWideCluster, n_chunks = ceil_div(w.n_cols, 256);
  int best = 1;
  double least = 0.0;
  for (int parts = 1; parts <= most && 4 * parts <= n_chunks; ++parts) {
    // Rounds of the whole card; a part more is as much to write and read as 1/32 of the product of 5120
    // columns.
    const double time = static_cast<double>(ceil_div(items * parts, clusters)) / parts + 0.03 * parts;
    if (parts == 1 || time < least) {
      best = parts;
      least = time;
    }
  }
  return best;
}

void wide_tiles_cuda(const DeviceActs& x, const int32_t* row_index, int n_acts, int n_cols, void* tiles,
                     StreamView stream) noexcept {
  launch(
      wide_tiles_kernel,
      dim3(static_cast<unsigned>(ceil_div(n_cols, 256)), static_cast<unsigned>(ceil_div(n_acts, kCutRows))),
      kCutThreads, 0, stream, x, row_index, n_acts, n_cols, static_cast<std::byte*>(tiles));
}

void linear_wide_cuda(const DeviceLinearArgs& args, const void* tiles, StreamView stream) noexcept {
  bool done[kMaxLinearJobs] = {};
  for (int j = 0; j < args.n_jobs; ++j) {
    if (done[j]) continue;
    WidePlan plan = wide_plan(tiles, args.x.scale, args.n_acts, args.jobs[j].w.n_cols);
    const DType dtype = args.jobs[j].w.dtype;
    for (int i = j; i < args.n_jobs; ++i)
      if (!done[i] && args.jobs[i].w.dtype == dtype) {
        const DeviceLinearJob& job = plan.jobs[plan.n_jobs] = args.jobs[i];
        plan.first_item[plan.n_jobs + 1] =
            plan.first_item[plan.n_jobs] +
            ceil_div(job.w.n_rows, kWideRows * kWideCluster) * job.k_parts * plan.n_act_tiles;
        ++plan.n_jobs;
        done[i] = true;
      }
#define CASE(t)                        \
  launch_wide<DType::t>(plan, stream); \
  break
    THERMO_FOR_QUANT_TYPE(dtype, CASE)
#undef CASE
  }
}

}  // namespace thermo
