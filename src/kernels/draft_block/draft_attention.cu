// Attention of up to 16 rows in one launch. A block has a kv head, all rows, and every n-th tile of 64 slots
// of the cache; a warp has one query head, so that the 16 rows of an mma are the step's rows. Tiles that were
// there before the step are fetched before the kernel in front has ended.
//
// Where there is more than one tile, the blocks of a kv head leave sums, largest scores and sums of weights
// of their tiles, wait for each other, and each merges some of the queries. All blocks run at once: there is
// one for each multiprocessor at most, and no later kernel starts before they all have. Who waits gives up in
// the end, because a wrong draft does no harm. It has time: under a sanitizer the others are slow.
#include "base/check.h"
#include "device/launch.cuh"
#include "kernels/attention/attention_stage.cuh"
#include "kernels/draft_block/draft_block_cuda.h"

namespace thermo {
namespace {

constexpr int kSlots = 64, kStages = 3, kWarps = 8, kThreads = 32 * kWarps;
constexpr uint64_t kPatienceNs = 20'000'000'000;

template <int kDim>
constexpr int kStageBytes = 2 * kSlots* kDim * 2;  // keys, then values
template <int kDim>
constexpr int kQueryBytes = kWarps* kMaxDraftRows* kDim * 2;  // before the stages

// What a row sees: slots lo .. hi - 1 of its group.
struct Reach {
  int group, lo, hi;
};

// The tiles of all groups in turn, of which a block takes every n-th.
struct TileWalk {
  int group, tile;
};

// Registers are left for a block of the kernel that follows, so that its weights are on their way. kHalves:
// both caches are f16.
template <int kDim, bool kHalves>
__global__ void __maxnreg__(160) draft_attention_kernel(const __grid_constant__ DraftAttentionArgs plan) {
  constexpr int kSteps = kDim / 16;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ Reach reaches[kMaxDraftRows];
  __shared__ int first_tile[kMaxDraftRows], n_tiles[kMaxDraftRows], group_end[kMaxDraftRows];
  const DeviceAttentionArgs& a = plan.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_head = blockIdx.x, part = blockIdx.y, n_parts = gridDim.y, per_kv = a.n_head / a.n_head_kv;
  const bool has_head = warp < per_kv;
  const int head = kv_head * per_kv + (has_head ? warp : 0);
  std::byte* const stages = shared + kQueryBytes<kDim>;
  allow_next();

  // The step's rows, the page table and the stored slots were there before the kernels in front started.
  const int n_groups = *a.rows.n_groups;
  if (threadIdx.x < kMaxDraftRows) {
    const int row = threadIdx.x;
    Reach reach{-1, 0, 0};
    if (row < a.n_rows && a.rows.group[row] >= 0) {
      const RowView view = view_of(a, row, 1);
      reach = {a.rows.group[row], view.lo, view.hi};
    }
    reaches[row] = reach;
  }
  __syncthreads();
  if (threadIdx.x < n_groups) {
    int lo = INT_MAX, hi = 0;
#pragma unroll 1
    for (int row = 0; row < kMaxDraftRows; ++row)
      if (reaches[row].group == static_cast<int>(threadIdx.x))
        lo = min(lo, reaches[row].lo), hi = max(hi, reaches[row].hi);
    first_tile[threadIdx.x] = hi > 0 ? lo / kSlots : 0;
    n_tiles[threadIdx.x] = hi > 0 ? (hi + kSlots - 1) / kSlots - lo / kSlots : 0;
    group_end[threadIdx.x] = hi;
  }
  __syncthreads();
  int all_tiles = 0;
#pragma unroll 1
  for (int i = 0; i < n_groups; ++i) all_tiles += n_tiles[i];
  const int n_used = min(n_parts, all_tiles);
  if (n_used <= 1 && part > 0) {
    wait_for_inputs();
    return;
  }

  const auto settle = [&](TileWalk& w) {
#pragma unroll 1
    while (w.group < n_groups && w.tile >= n_tiles[w.group]) w.tile -= n_tiles[w.group++];
  };
  TileWalk asked{0, part};
  settle(asked);
  bool waited = false;
  // Each call is one group of copies, also when nothing is left.
  const auto ask = [&](int stage) {
    if (asked.group < n_groups) {
      const int slot = (first_tile[asked.group] + asked.tile) * kSlots, end = group_end[asked.group];
      if (!waited && min(slot + kSlots, end) > a.rows.group_past[asked.group]) {
        wait_for_inputs();
        waited = true;
      }
      const int sequence = a.rows.group_sequence[asked.group];
      std::byte* const keys = stages + stage * kStageBytes<kDim>;
      stage_slots<kDim, kSlots, kThreads>(kHalves ? KvType::F16 : a.kv.k_type, keys,
                                          paged_head(a.kv, false, sequence, a.n_head_kv, kv_head, kDim), slot,
                                          end, static_cast<int>(threadIdx.x));
      stage_slots<kDim, kSlots, kThreads>(kHalves ? KvType::F16 : a.kv.v_type, keys + kSlots * kDim * 2,
                                          paged_head(a.kv, true, sequence, a.n_head_kv, kv_head, kDim), slot,
                                          end, static_cast<int>(threadIdx.x));
      asked.tile += n_parts;
      settle(asked);
    }
    copy_commit();
  };
  TileWalk here = asked;
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) ask(stage);
  if (!waited) wait_for_inputs();

  // Queries of head h and row r become row 16 h + r of a matrix.
  if (part < n_used) {
    constexpr int kPieces = kDim / 8;
    const half* const q = static_cast<const half*>(plan.q) + kv_head * per_kv * kDim;
#pragma unroll 4
    for (int i = threadIdx.x; i < per_kv * kMaxDraftRows * kPieces; i += kThreads) {
      const int query = i / kPieces, piece = i % kPieces, row = min(query % kMaxDraftRows, a.n_rows - 1);
      *reinterpret_cast<uint4*>(shared + piece_offset<kDim>(query, piece)) = *reinterpret_cast<const uint4*>(
          q + (static_cast<int64_t>(row) * a.n_head + query / kMaxDraftRows) * kDim + piece * 8);
    }
  }
  const MatrixLane<kDim> query_lane(shared, kMaxDraftRows * warp, false, lane);
  const Reach reach[2] = {reaches[g], reaches[g + 8]};
  float sums[2 * kSteps][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  int stage = 0;
#pragma unroll 1
  for (; here.group < n_groups; here.tile += n_parts, settle(here)) {
    copy_wait<kStages - 2>();
    __syncthreads();  // the tile is there, and all warps are through with the one before
    ask((stage + kStages - 1) % kStages);
    const int slot = (first_tile[here.group] + here.tile) * kSlots;
    const std::byte* const keys = stages + stage * kStageBytes<kDim>;
    stage = (stage + 1) % kStages;
    if (!has_head) continue;
    const MatrixLane<kDim> key_lane(keys, 0, true, lane),
        value_lane(keys + kSlots * kDim * 2, 0, false, lane);
    float score[kSlots / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t q[4];
      load_matrices(q, query_lane.at(0, i));
#pragma unroll
      for (int n = 0; n < kSlots / 16; ++n) {
        uint32_t k[4];
        load_matrices(k, key_lane.at(n, i));
        mma_16816(score[2 * n], q, k[0], k[1]);
        mma_16816(score[2 * n + 1], q, k[2], k[3]);
      }
    }
    int lo[2], hi[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool member = reach[j].group == here.group;
      lo[j] = member ? reach[j].lo : 0, hi[j] = member ? reach[j].hi : 0;
    }
    if (!__all_sync(0xffffffffu, slot >= max(lo[0], lo[1]) && slot + kSlots <= min(hi[0], hi[1]))) {
#pragma unroll
      for (int n = 0; n < kSlots / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int at = slot + 8 * n + 2 * t + c % 2;
          if (at < lo[c / 2] || at >= hi[c / 2]) score[n][c] = -INFINITY;
        }
    }
    float shrink[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float now = top[j];
#pragma unroll
      for (int n = 0; n < kSlots / 8; ++n) now = fmaxf(now, fmaxf(score[n][2 * j], score[n][2 * j + 1]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      const float base = now == -INFINITY ? 0.0f : now;
      shrink[j] = exp2_fast(top[j] - base);
      top[j] = now;
      total[j] *= shrink[j];
#pragma unroll
      for (int n = 0; n < kSlots / 8; ++n)
#pragma unroll
        for (int c = 2 * j; c < 2 * j + 2; ++c) {
          score[n][c] = exp2_fast(score[n][c] - base);
          total[j] += score[n][c];
        }
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][c] *= shrink[c / 2];
    }
#pragma unroll
    for (int n = 0; n < kSlots / 16; ++n) {
      const uint32_t p[4] = {pack_halves(score[2 * n][0], score[2 * n][1]),
                             pack_halves(score[2 * n][2], score[2 * n][3]),
                             pack_halves(score[2 * n + 1][0], score[2 * n + 1][1]),
                             pack_halves(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t v[4];
        load_transposed(v, value_lane.at(n, i));
        mma_16816(sums[2 * i], p, v[0], v[1]);
        mma_16816(sums[2 * i + 1], p, v[2], v[3]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    total[j] += __shfl_xor_sync(0xffffffffu, total[j], 1);
    total[j] += __shfl_xor_sync(0xffffffffu, total[j], 2);
  }

  half* const out = static_cast<half*>(a.out.f16);
  if (has_head && part < n_used) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = g + 8 * j;
      if (row >= a.n_rows) continue;
      float* const to = part_sums(a, row, head, part);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i)
        __stcg(reinterpret_cast<float2*>(to + 8 * i + 2 * t), float2{sums[i][2 * j], sums[i][2 * j + 1]});
      if (t == 0) __stcg(part_stats(a, row, head, part), float2{top[j], total[j]});
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && n_used > 1) {
    // Every launch that comes here adds kMaxAttentionSplits, a power of two.
    using Count = unsigned long long;
    constexpr Count kAll = kMaxAttentionSplits;
    static_assert((kAll & (kAll - 1)) == 0);
    Count* const counter = reinterpret_cast<Count*>(plan.counters + kv_head);
    const Count mine = part == 0 ? kAll + 1 - static_cast<Count>(n_parts) : 1;
    const Count wanted = (atomicAdd(counter, mine) & ~(kAll - 1)) + kAll;
    const uint64_t begin = device_clock_ns();
    while (*reinterpret_cast<volatile Count*>(counter) < wanted && device_clock_ns() - begin < kPatienceNs) {
    }
    __threadfence();
  }
  __syncthreads();

  // Two warps for each query, of which the block has every n-th.
  constexpr int kPer = kDim / 64, kTogether = 16;
  const int n_queries = a.n_rows * per_kv, n_blocks = n_used > 1 ? n_parts : 1;
  const int first_dim = (warp % 2 * 32 + lane) * kPer;
#pragma unroll 1
  for (int query = part + n_blocks * (warp / 2); query < n_queries; query += n_blocks * (kWarps / 2)) {
    const int row = query / per_kv, of = kv_head * per_kv + query % per_kv;
    const float2* const stats = part_stats(a, row, of, 0);
    const float* const from = part_sums(a, row, of, 0) + first_dim;
    const float2 none{-INFINITY, 0.0f};
    float f0, f1;
    static_assert(kMaxAttentionSplits <= 64);
    const float all = weigh_parts(lane < n_used ? __ldcg(stats + lane) : none,
                                  lane + 32 < n_used ? __ldcg(stats + lane + 32) : none, f0, f1);
    float x[kPer] = {};
#pragma unroll 1
    for (int first = 0; first < n_used; first += kTogether) {
      float y[kTogether][kPer];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int d = 0; d < kPer; ++d)
          y[i][d] = first + i < n_used ? __ldcg(from + (first + i) * kDim + d) : 0.0f;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float f = __shfl_sync(0xffffffffu, first < 32 ? f0 : f1, (first + i) & 31);
#pragma unroll
        for (int d = 0; d < kPer; ++d) x[d] = fmaf(f, y[i][d], x[d]);
      }
    }
    const float scale = all > 0.0f ? __fdividef(1.0f, all * a.out.scale) : 0.0f;
#pragma unroll
    for (int d = 0; d < kPer; ++d)
      out[row * a.out.f16_stride + act_place(of * kDim + first_dim + d)] = __float2half_rn(x[d] * scale);
  }
}

template <int kDim, bool kHalves>
void start_one(const DraftAttentionArgs& args, StreamView stream) {
  constexpr size_t kBytes = kQueryBytes<kDim> + kStages * kStageBytes<kDim>;
  static const bool ready = [] {
    return allow_shared(draft_attention_kernel<kDim, kHalves>, kBytes), true;
  }();
  static_cast<void>(ready);
  launch(draft_attention_kernel<kDim, kHalves>,
         dim3(static_cast<unsigned>(args.args.n_head_kv), static_cast<unsigned>(args.args.n_splits)),
         kThreads, kBytes, stream, args);
}

template <int kDim>
void start(const DraftAttentionArgs& args, StreamView stream) {
  if (args.args.kv.k_type == KvType::F16 && args.args.kv.v_type == KvType::F16)
    start_one<kDim, true>(args, stream);
  else
    start_one<kDim, false>(args, stream);
}

}  // namespace

bool draft_attention_possible(int n_head, int n_head_kv, int head_dim, KvType k, KvType v) noexcept {
  return (head_dim == 64 || head_dim == 128) && n_head / n_head_kv <= kWarps &&
         n_head_kv <= device_in_use().n_multiprocessors && k != KvType::F32 && v != KvType::F32;
}

float draft_query_scale(float scale) noexcept {
  return scale * kLog2E;
}

void draft_attention_cuda(const DraftAttentionArgs& args, StreamView stream) noexcept {
  THERMO_CHECK(args.args.n_rows <= kMaxDraftRows &&
                   args.args.n_head_kv * args.args.n_splits <= device_in_use().n_multiprocessors,
               "rows or parts that do not fit the kernel");
  if (args.args.head_dim == 64) return start<64>(args, stream);
  start<128>(args, stream);
}

}  // namespace thermo
