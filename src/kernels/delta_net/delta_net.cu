// The state of a head is a matrix of dim x dim floats, 64 KiB, held in registers while rows pass: thread (j,
// part) has 16 columns of row j, in float4 pieces part, part + L, part + 2L, part + 3L with L = dim / 16, so
// that a warp reads whole lines.
//
// Up to 64 rows: one block per (head, sequence), or a cluster of four where the card has clusters, does
// everything from the raw projection to the gated norm (delta_net_fused.cuh): 2.1 MB of state in and out per
// layer of the 35B-A3B. Uncommitted rows (a draft tree) too. The bits of a row are those of plain decoding.
// The decoded rows of many sequences have a kernel of their own where there are clusters
// (delta_net_many.cuh). More rows: convolution and norms for all rows at once, then the rule alone in chunks
// on tensor cores (delta_net_chunk.cuh), then the gated norm. If the card lacks the memory or the
// instructions for chunks, the rule runs row by row, a quarter of a head per block and no barrier in the row
// loop: 0.5 us a row and layer instead of 0.15.
#include "kernels/delta_net/delta_net_cuda.h"

#include "base/check.h"
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/delta_net/delta_net_chunk.cuh"
#include "kernels/delta_net/delta_net_fused.cuh"
#include "kernels/delta_net/delta_net_many.cuh"
#include "kernels/delta_net/delta_net_parts.cuh"

namespace thermo {
namespace {

constexpr int kHeadBlocks = 4;  // that share a head when rows are few

// ---- many rows ----

template <int kDim>
__global__ void __launch_bounds__(128)
    delta_net_prepare_kernel(const __grid_constant__ DeviceDeltaNetArgs a) {
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.y, head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = a.rows.group[row];
  if (group < 0) return;
  const int begin = a.rows.group_begin[group];
  if (head < 2 * a.n_head_k + a.n_head_v)
    convolve_head<kDim>(a, begin, a.conv_state + a.rows.group_sequence[group] * a.sequence_stride,
                        row - begin, head * kDim, head < 2 * a.n_head_k,
                        head < a.n_head_k ? rsqrtf(static_cast<float>(kDim)) : 1.0f,
                        a.mixed + static_cast<int64_t>(row) * a.n_channels() + head * kDim, lane);
  if (blockIdx.x == 0)
    for (int n = threadIdx.x; n < a.n_head_v; n += 128) {
      const int64_t at = static_cast<int64_t>(row) * a.n_head_v + n;
      a.gates[2 * at] = a.a[n] * softplus_device(a.alpha[at] + a.dt_bias[n]);
      a.gates[2 * at + 1] = sigmoid_device(a.beta[at]);
    }
}

template <int kDim>
constexpr int kScanThreads = kRuleThreads<kDim> < 128 ? kRuleThreads<kDim> : 128;

template <int kDim>
__global__ void __launch_bounds__(kScanThreads<kDim>)
    delta_net_scan_kernel(const __grid_constant__ DeviceDeltaNetArgs a) {
  using Tile = StateTile<kDim>;
  allow_next();
  wait_for_inputs();
  const int head = blockIdx.y, group = blockIdx.z, key_head = head % a.n_head_k;
  if (group >= *a.rows.n_groups || a.rows.is_uncommitted(group)) return;
  const int begin = a.rows.group_begin[group], n = a.rows.group_rows[group];
  if (n <= a.short_rows) return;
  const int thread = blockIdx.x * kScanThreads<kDim> + threadIdx.x;
  const int j = thread / Tile::kLanes, part = thread % Tile::kLanes;
  float* const state = a.state + a.rows.group_sequence[group] * a.sequence_stride +
                       static_cast<int64_t>(head) * kDim * kDim + j * kDim;
  const int64_t step = a.n_channels();
  const float* const first = a.mixed + begin * step;
  const float* const q_rows = first + key_head * kDim;
  const float* const k_rows = first + (a.n_head_k + key_head) * kDim;
  const float* const v_rows = first + (2 * a.n_head_k + head) * kDim + j;
  const float* const gate_rows = a.gates + 2 * (static_cast<int64_t>(begin) * a.n_head_v + head);
  float* const out = a.rule_out + (static_cast<int64_t>(begin) * a.n_head_v + head) * kDim + j;
  Tile tile;
  tile.load(state, part);

  // Each row's inputs are loaded while the row before is computed. Tried: batches of 16 rows through shared
  // memory; 35 % slower.
  float4 k[4], q[4];
  float v, decay, beta;
  const auto load = [&](int r) {
    Tile::load_vector(k_rows + r * step, part, k);
    Tile::load_vector(q_rows + r * step, part, q);
    v = v_rows[r * step];
    const float2 g = *reinterpret_cast<const float2*>(gate_rows + static_cast<int64_t>(r) * 2 * a.n_head_v);
    decay = expf(g.x);
    beta = g.y;
  };
  load(0);
  for (int r = 0; r < n; ++r) {
    float4 k_now[4], q_now[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) k_now[i] = k[i], q_now[i] = q[i];
    const float v_now = v, decay_now = decay, beta_now = beta;
    if (r + 1 < n) load(r + 1);
    float known = tile.share(k_now), o = 0.0f;
    Tile::add_shares(known, o);
    tile.update(decay_now, beta_now * fmaf(-decay_now, known, v_now), k_now);
    float none = 0.0f;
    o = tile.share(q_now);
    Tile::add_shares(o, none);
    if (part == 0) out[static_cast<int64_t>(r) * a.n_head_v * kDim] = o;
  }
  tile.store(state, part);
}

template <int kDim>
__global__ void __launch_bounds__(128)
    delta_net_norm_kernel(const __grid_constant__ DeviceDeltaNetArgs a, const float* o, int64_t o_step) {
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.y, head = blockIdx.x * 4 + threadIdx.x / 32;
  if (head >= a.n_head_v) return;
  if (a.rows.any_uncommitted || a.short_rows > 0) {  // those have their result
    const int group = a.rows.group[row];
    if (group >= 0 && (a.rows.is_uncommitted(group) || a.rows.group_rows[group] <= a.short_rows)) return;
  }
  const int lane = threadIdx.x % 32;
  HeadSlice<kDim> slice;
  slice.load_gate(a.norm, a.z_of(row, head), 0, lane);
  const float square = slice.load(o + row * o_step + head * kDim, lane);
  slice.put(a, row, head, 0, square, lane);
}

// ---- commit ----

template <int kDim>
__global__ void __launch_bounds__(kFusedThreads<kDim>)
    delta_net_commit_kernel(const __grid_constant__ DeviceDeltaCommitArgs a) {
  using Tile = StateTile<kDim>;
  allow_next();
  wait_for_inputs();
  const DevicePath& path = a.paths.paths[blockIdx.z];
  const int n = path.n, head = blockIdx.x;
  const int64_t tape_at = path.sequence * a.tape.sequence_stride + blockIdx.y * a.tape_layer_stride,
                state_at = path.sequence * a.sequence_stride + blockIdx.y * a.layer_stride;
  if (head < a.n_head_v) {
    if (threadIdx.x >= kRuleThreads<kDim>) return;
    const int j = threadIdx.x / Tile::kLanes, part = threadIdx.x % Tile::kLanes;
    const float* const keys = a.tape.k + tape_at + head % a.n_head_k * kDim;
    const float* const decays = a.tape.decay + tape_at + head;
    const float* const deltas = a.tape.delta + tape_at + head * kDim + j;
    float* const state = a.state + state_at + static_cast<int64_t>(head) * kDim * kDim + j * kDim;
    Tile tile;
    tile.load(state, part);
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const int64_t r = path.rows[i];
      float4 x[4];
      Tile::load_vector(keys + r * a.n_head_k * kDim, part, x);
      tile.update(decays[r * a.n_head_v], deltas[r * a.n_head_v * kDim], x);
    }
    tile.store(state, part);
    return;
  }
  // The blocks after those of the heads shift the convolution columns.
  const int stride = (gridDim.x - a.n_head_v) * blockDim.x;
  const float* const inputs = a.tape.conv_input + tape_at;
  float* const columns = a.conv_state + state_at;
  for (int channel = (head - a.n_head_v) * blockDim.x + threadIdx.x; channel < a.n_channels;
       channel += stride)
    for (int k = 0; k < a.taps - 1; ++k) {
      const int from = n - (a.taps - 1) + k;
      columns[k * a.n_channels + channel] =
          from >= 0 ? inputs[static_cast<int64_t>(path.rows[from]) * a.n_channels + channel]
                    : columns[(k + n) * a.n_channels + channel];
    }
}

template <int kDim, int kStages>
void launch_chunks(const DeviceDeltaNetArgs& a, StreamView stream) {
  using Shape = ChunkShape<kDim>;
  static const bool ready = [] {
    allow_shared(delta_net_solve_kernel<kDim>, Shape::kSolveBytes);
    allow_shared(delta_net_chunks_kernel<kDim, kStages>, Shape::scan_bytes(kStages));
    return true;
  }();
  static_cast<void>(ready);
  const unsigned heads = static_cast<unsigned>(a.n_head_v), groups = static_cast<unsigned>(a.max_groups);
  launch(delta_net_solve_kernel<kDim>, dim3(static_cast<unsigned>(a.n_rows / kC) + groups, heads),
         Shape::kSolveThreads, Shape::kSolveBytes, stream, a);
  launch(delta_net_chunks_kernel<kDim, kStages>, dim3(static_cast<unsigned>(kDim / Shape::kJ), heads, groups),
         Shape::kScanThreads, Shape::scan_bytes(kStages), stream, a);
}

template <int kDim>
void launch_prepare(const DeviceDeltaNetArgs& a, StreamView stream) {
  launch(
      delta_net_prepare_kernel<kDim>,
      dim3(static_cast<unsigned>(ceil_div(2 * a.n_head_k + a.n_head_v, 4)), static_cast<unsigned>(a.n_rows)),
      128, 0, stream, a);
}

template <int kDim>
constexpr bool kSplits = kDim == 128;

// Heads are split over a cluster where there are any.
template <int kDim, bool kUncommitted, bool kPrepared>
size_t fused_bytes(int max_rows) {
  if constexpr (kSplits<kDim>)
    if (has_clusters()) return FusedShape<kDim, kUncommitted, kHeadBlocks, kPrepared>::bytes(max_rows);
  return FusedShape<kDim, kUncommitted, 1, kPrepared>::bytes(max_rows);
}

template <int kDim>
int most_uncommitted_rows() {
  constexpr size_t kDeclared = 2048;  // that the kernel declares itself, at most
  int n = kMaxDeltaRows;
  while (n > 0 && fused_bytes<kDim, true, true>(n) + kDeclared > device_in_use().max_shared_bytes) --n;
  return n;
}

template <int kDim, bool kUncommitted, bool kPrepared>
void launch_fused(const DeviceDeltaNetArgs& a, int max_rows, StreamView stream) {
  constexpr int kMaxRows = !kPrepared ? kMaxOwnConvRows : kUncommitted ? kMaxDeltaRows : kMaxFusedDeltaRows;
  static const bool ready = [] {
    allow_shared(delta_net_fused_kernel<kDim, kUncommitted, 1, kPrepared>,
                 FusedShape<kDim, kUncommitted, 1, kPrepared>::bytes(kMaxRows));
    if constexpr (kSplits<kDim>)
      allow_shared(delta_net_fused_kernel<kDim, kUncommitted, kHeadBlocks, kPrepared>,
                   FusedShape<kDim, kUncommitted, kHeadBlocks, kPrepared>::bytes(kMaxRows));
    return true;
  }();
  static_cast<void>(ready);
  const unsigned heads = static_cast<unsigned>(a.n_head_v), groups = static_cast<unsigned>(a.max_groups);
  const size_t bytes = fused_bytes<kDim, kUncommitted, kPrepared>(max_rows);
  if constexpr (kSplits<kDim>) {
    if (has_clusters())
      return launch_clusters(delta_net_fused_kernel<kDim, kUncommitted, kHeadBlocks, kPrepared>, kHeadBlocks,
                             dim3(kHeadBlocks * heads, groups), kFusedThreads<kDim, kHeadBlocks>, bytes,
                             stream, a, max_rows);
  }
  launch(delta_net_fused_kernel<kDim, kUncommitted, 1, kPrepared>, dim3(heads, groups), kFusedThreads<kDim>,
         bytes, stream, a, max_rows);
}

// Groups of a row or a few, the decoded rows of many sequences. False: there is no such kernel for this card.
template <int kDim>
bool launch_many(const DeviceDeltaNetArgs& a, StreamView stream) {
  if constexpr (kSplits<kDim>) {
    if (!has_clusters()) return false;
    static const bool ready = [] {
      return allow_shared(delta_net_many_kernel<kDim>, sizeof(ManyShared<kDim>)), true;
    }();
    static_cast<void>(ready);
    const int blocks = kManyBlocks * device_in_use().n_multiprocessors, items = a.n_head_v * a.max_groups;
    launch(delta_net_many_kernel<kDim>, static_cast<unsigned>(blocks < items ? blocks : items), kManyThreads,
           sizeof(ManyShared<kDim>), stream, a, kManyRows);
    return true;
  }
  return false;
}

// Short groups run as in small steps: a chunk for each would be mostly empty.
template <int kDim>
void launch_large(DeviceDeltaNetArgs a, StreamView stream) {
  if (a.max_groups > 1) {
    if (!launch_many<kDim>(a, stream)) launch_fused<kDim, false, true>(a, kManyRows, stream);
    a.short_rows = kManyRows;
  }
  const unsigned rows = static_cast<unsigned>(a.n_rows), heads = static_cast<unsigned>(a.n_head_v);
  // Chunks leave their result where v was.
  const float* o = a.mixed + 2 * a.n_head_k * kDim;
  int64_t o_step = a.n_channels();
  const auto fits = [&](int n_stages) {
    return device_in_use().compute_capability >= 80 && n_stages <= a.max_stages &&
           ChunkShape<kDim>::scan_bytes(n_stages) <= device_in_use().max_shared_bytes;
  };
  // Two blocks with a stage each on a multiprocessor, rather than a second round of blocks with two.
  const int blocks = kDim / ChunkShape<kDim>::kJ * a.n_head_v * a.max_groups;
  const bool crowded = blocks > device_in_use().n_multiprocessors &&
                       2 * ChunkShape<kDim>::scan_bytes(1) <= device_in_use().max_shared_bytes - 1024;
  if (fits(2) && !(crowded && fits(1))) {
    launch_chunks<kDim, 2>(a, stream);
  } else if (fits(1)) {
    launch_chunks<kDim, 1>(a, stream);
  } else {
    launch(delta_net_scan_kernel<kDim>,
           dim3(static_cast<unsigned>(kRuleThreads<kDim> / kScanThreads<kDim>), heads,
                static_cast<unsigned>(a.max_groups)),
           kScanThreads<kDim>, 0, stream, a);
    o = a.rule_out;
    o_step = static_cast<int64_t>(a.n_head_v) * kDim;
  }
  launch(delta_net_norm_kernel<kDim>, dim3(static_cast<unsigned>(ceil_div(a.n_head_v, 4)), rows), 128, 0,
         stream, a, o, o_step);
}

template <int kDim, bool kPrepared>
void launch_groups(const DeviceDeltaNetArgs& a, StreamView stream) {
  if (a.rows.any_uncommitted) launch_fused<kDim, true, kPrepared>(a, a.max_uncommitted_rows, stream);
  if (a.max_group_rows == 0 || a.n_rows > kMaxFusedDeltaRows) return;
  if (kPrepared && a.max_group_rows <= kManyRows && launch_many<kDim>(a, stream)) return;
  launch_fused<kDim, false, kPrepared>(a, a.max_group_rows, stream);
}

template <int kDim>
void launch_delta_net(const DeviceDeltaNetArgs& a, StreamView stream) {
  if (a.n_rows <= kMaxOwnConvRows) return launch_groups<kDim, false>(a, stream);
  launch_prepare<kDim>(a, stream);
  launch_groups<kDim, true>(a, stream);
  if (a.max_group_rows > 0 && a.n_rows > kMaxFusedDeltaRows) launch_large<kDim>(a, stream);
}

}  // namespace

int max_uncommitted_delta_rows(int dim) noexcept {
  switch (dim) {
    case 16:
      return most_uncommitted_rows<16>();
    case 32:
      return most_uncommitted_rows<32>();
    case 64:
      return most_uncommitted_rows<64>();
    case 128:
      return most_uncommitted_rows<128>();
    default:
      return 0;  // refused at load
  }
}

void delta_net_cuda(const DeviceDeltaNetArgs& a, StreamView stream) noexcept {
  switch (a.dim) {
    case 16:
      return launch_delta_net<16>(a, stream);
    case 32:
      return launch_delta_net<32>(a, stream);
    case 64:
      return launch_delta_net<64>(a, stream);
    case 128:
      return launch_delta_net<128>(a, stream);
    default:
      THERMO_CHECK(false, "the state size was checked at load");
  }
}

void delta_net_commit_cuda(const DeviceDeltaCommitArgs& a, StreamView stream) noexcept {
  const dim3 grid(static_cast<unsigned>(a.n_head_v + ceil_div(a.n_channels, 1024)),
                  static_cast<unsigned>(a.n_layers), static_cast<unsigned>(a.paths.n));
  switch (a.dim) {
    case 16:
      return launch(delta_net_commit_kernel<16>, grid, kFusedThreads<16>, 0, stream, a);
    case 32:
      return launch(delta_net_commit_kernel<32>, grid, kFusedThreads<32>, 0, stream, a);
    case 64:
      return launch(delta_net_commit_kernel<64>, grid, kFusedThreads<64>, 0, stream, a);
    case 128:
      return launch(delta_net_commit_kernel<128>, grid, kFusedThreads<128>, 0, stream, a);
    default:
      THERMO_CHECK(false, "the state size was checked at load");
  }
}

}  // namespace thermo
