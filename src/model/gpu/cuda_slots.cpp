#include "model/gpu/cuda_slots.h"

#include <cuda_runtime.h>

#include "experts/trace.h"

namespace thermo {

uint64_t CudaSlots::copy(std::byte* to, const std::byte* from, size_t n_bytes) noexcept {
  const uint64_t ticket = ++issued_;
  if (ticket > kEvents) wait(ticket - kEvents);  // its event is used again
  begin_copies(n_bytes);
  cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, stream_.view().handle);
  end_copies();
  events_[ticket % kEvents].record(stream_.view());
  if (trace_ != nullptr) started_[ticket % kEvents] = {now_ns(), n_bytes};
  return ticket;
}

bool CudaSlots::done(uint64_t ticket) noexcept {
  if (ticket > finished_ && events_[ticket % kEvents].reached()) finish(ticket);
  return ticket <= finished_;
}

void CudaSlots::wait(uint64_t ticket) noexcept {
  if (ticket <= finished_) return;
  events_[ticket % kEvents].synchronize();
  finish(ticket);
}

void CudaSlots::publish(int layer, int expert, const std::byte* address) noexcept {
  const uint8_t*& entry = table_[layer * n_expert_ + expert];
  n_cold_[layer] += (address == nullptr) - (entry == nullptr);
  entry = reinterpret_cast<const uint8_t*>(address);
  dirty = true;
}

// Copies arrive in order. A trace shows each from when it was queued until somebody looked.
void CudaSlots::finish(uint64_t ticket) noexcept {
  while (finished_ < ticket) {
    const Started& copy = started_[++finished_ % kEvents];
    if (trace_ != nullptr)
      trace_->add({.lane = TraceLane::Copy,
                   .name = "swap",
                   .category = "experts",
                   .begin_ns = copy.begin_ns,
                   .duration_ns = now_ns() - copy.begin_ns,
                   .args = {{{"bytes", static_cast<int64_t>(copy.n_bytes)}}}});
  }
}

void CudaParcels::publish_place(int index, const std::byte* address) noexcept {
  places_[index] = reinterpret_cast<const uint8_t*>(address);
  dirty_ = true;
}

// A trace shows how long queuing it took; when it arrives, only the device knows.
void CudaParcels::send(std::byte* to, const std::byte* from, size_t n_bytes, int index,
                       uint64_t word) noexcept {
  const int64_t begin_ns = trace_ != nullptr ? now_ns() : 0;
  limit_.begin(kLane, n_bytes, stream_.view());
  cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, stream_.view().handle);
  limit_.end(kLane, stream_.view());
  stream_.write(announced_ + index, word);
  if (trace_ != nullptr)
    trace_->add({.lane = TraceLane::Fetch,
                 .name = "parcel sent",
                 .category = "decode",
                 .begin_ns = begin_ns,
                 .duration_ns = now_ns() - begin_ns,
                 .args = {{{"layer", index / kMaxParcels}, {"expert", parcel_expert(word)}}}});
}

}  // namespace thermo
