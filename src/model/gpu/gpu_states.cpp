#include "model/gpu/gpu_states.h"

#include <cuda_runtime.h>

#include "kernels/row_ops/state_rows_cuda.h"

namespace thermo {

void gather_states(const StateRows& from, float* to, StreamView stream) noexcept {
  gather_rows_cuda({.from = from.data,
                    .tap_stride = from.tap_stride,
                    .row_stride = from.row_stride,
                    .n_taps = from.n_taps,
                    .n_embd = from.n_embd,
                    .n = from.n,
                    .rows = from.rows,
                    .to = to},
                   stream);
}

GpuStates::GpuStates(std::shared_ptr<Stream> stream, int n_rows, int n_taps, int n_embd)
    : StateBuffer(n_taps, n_embd),
      stream_(std::move(stream)),
      memory_(static_cast<size_t>(planned_bytes(n_rows, n_taps, n_embd))) {
  data_ = memory_.as<float>();
}

uint64_t GpuStates::planned_bytes(int n_rows, int n_taps, int n_embd) {
  return static_cast<uint64_t>(n_rows) * static_cast<uint64_t>(n_taps) * static_cast<uint64_t>(n_embd) *
         sizeof(float);
}

void GpuStates::put(int at, const StateRows& from) noexcept {
  gather_states(from, row(at), stream_->view());
}

void GpuStates::read(int i, std::span<float> to) const noexcept {
  cudaMemcpyAsync(to.data(), row(i), to.size_bytes(), cudaMemcpyDeviceToHost, stream_->view().handle);
  stream_->synchronize();
}

void GpuStates::write(int i, std::span<const float> from) noexcept {
  cudaMemcpyAsync(row(i), from.data(), from.size_bytes(), cudaMemcpyHostToDevice, stream_->view().handle);
  stream_->synchronize();
}

}  // namespace thermo
