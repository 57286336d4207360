// Rows of a cache, in all layers at once: appended from projections, and moved by a commit. Entries of page
// tables.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/attention/attention_heads.cuh"
#include "kernels/attention/attention_parts.cuh"

namespace thermo {
namespace {

// One warp per head: keys, then values.
__global__ void __launch_bounds__(128) kv_append_kernel(const __grid_constant__ DeviceKvAppendArgs a) {
  __shared__ float shared[4][256];
  allow_next();
  wait_for_inputs();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.head_dim;
  const int row = blockIdx.y, layer = blockIdx.z, head = blockIdx.x * 4 + warp;
  const int group = a.rows.group[row];
  if (head >= 2 * a.n_head_kv || group < 0) return;
  const bool is_v = head >= a.n_head_kv;
  const int kv_head = is_v ? head - a.n_head_kv : head;
  const float* const from =
      (is_v ? a.v : a.k) + layer * a.layer_stride + (static_cast<int64_t>(row) * a.n_head_kv + kv_head) * dim;
  float* const x = shared[warp];
  if (is_v)
    load_head(x, from, dim, lane);
  else
    turn_head(x, from, a.k_norm[layer], dim, a.eps,
              {a.inv_freq, a.n_rot, a.rope_magnitude, a.rows.position[row]}, lane);
  __syncwarp();
  const int slot = a.rows.group_past[group] + row - a.rows.group_begin[group];
  const PagedHead to = paged_head(a.kv, is_v, a.rows.group_sequence[group], a.n_head_kv, kv_head, dim);
  store_head(is_v ? a.kv.v_type : a.kv.k_type, to.at(slot) + layer * a.layer_bytes, x, dim, lane);
}

// rows[d] >= d and rising, so a thread that moves its own bytes of some rows in turn, reading all of these
// before it writes, overwrites nothing that is still needed.
__global__ void __launch_bounds__(256) kv_move_kernel(const __grid_constant__ DeviceKvMoveArgs a) {
  allow_next();
  wait_for_inputs();
  const int64_t k_bytes = a.n_head_kv * head_bytes(a.kv.k_type, a.head_dim),
                v_bytes = a.n_head_kv * head_bytes(a.kv.v_type, a.head_dim);
  const int64_t i = 2 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i >= k_bytes + v_bytes) return;
  const DevicePath& path = a.paths.paths[blockIdx.z];
  const bool is_v = i >= k_bytes;
  PagedHead bytes = paged_head(a.kv, is_v, path.sequence, a.n_head_kv, 0, a.head_dim);
  bytes.base += (is_v ? i - k_bytes : i) + blockIdx.y * a.layer_bytes;
  constexpr int kAhead = 8;
  for (int first = 0; first < path.n; first += kAhead) {
    uint16_t x[kAhead];
#pragma unroll
    for (int d = 0; d < kAhead; ++d)
      if (first + d < path.n)
        x[d] = *reinterpret_cast<const uint16_t*>(bytes.at(path.past + path.rows[first + d]));
#pragma unroll
    for (int d = 0; d < kAhead; ++d)
      if (first + d < path.n) *reinterpret_cast<uint16_t*>(bytes.at(path.past + first + d)) = x[d];
  }
}

__global__ void __launch_bounds__(kMaxPageEntries)
    put_pages_kernel(const __grid_constant__ DevicePageEntries entries) {
  wait_for_inputs();
  if (threadIdx.x < entries.n) entries.to[threadIdx.x] = entries.pages[threadIdx.x];
  __threadfence();  // later kernels read tables before they wait
}

}  // namespace

void put_pages_cuda(const DevicePageEntries& entries, StreamView stream) noexcept {
  launch(put_pages_kernel, 1, kMaxPageEntries, 0, stream, entries);
}

void kv_append_cuda(const DeviceKvAppendArgs& a, StreamView stream) noexcept {
  launch(kv_append_kernel,
         dim3(static_cast<unsigned>(ceil_div(2 * a.n_head_kv, 4)), static_cast<unsigned>(a.n_rows),
              static_cast<unsigned>(a.n_layers)),
         128, 0, stream, a);
}

void kv_move_cuda(const DeviceKvMoveArgs& a, StreamView stream) noexcept {
  const int64_t bytes =
      a.n_head_kv * (head_bytes(a.kv.k_type, a.head_dim) + head_bytes(a.kv.v_type, a.head_dim));
  launch(kv_move_kernel,
         dim3(static_cast<unsigned>(ceil_div<int64_t>(bytes, 512)), static_cast<unsigned>(a.n_layers),
              static_cast<unsigned>(a.paths.n)),
         256, 0, stream, a);
}

}  // namespace thermo
