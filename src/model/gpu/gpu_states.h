// Hidden states in GPU memory: put there by a kernel on the stream of the model that made them.
#pragma once

#include <memory>

#include "device/buffer.h"
#include "device/stream.h"
#include "model/hidden_states.h"

namespace thermo {

// Queues copying rows of states to `to`, [rows][taps * n_embd].
void gather_states(const StateRows& from, float* to, StreamView stream) noexcept;

class GpuStates final : public StateBuffer {
 public:
  // Throws MemoryError, CudaError.
  GpuStates(std::shared_ptr<Stream> stream, int n_rows, int n_taps, int n_embd);
  static uint64_t planned_bytes(int n_rows, int n_taps, int n_embd);

  void put(int at, const StateRows& from) noexcept override;
  void read(int row, std::span<float> to) const noexcept override;
  void write(int row, std::span<const float> from) noexcept override;

 private:
  std::shared_ptr<Stream> stream_;
  DeviceBuffer memory_;
};

}  // namespace thermo
