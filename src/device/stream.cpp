#include "device/stream.h"

#include "base/log.h"
#include "device/cuda_check.h"

namespace thermo {

Stream::Stream() {
  cuda_check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "making a stream");
}
Stream::~Stream() {
  if (cudaStreamDestroy(handle_) != cudaSuccess) log_warning("device", "a stream could not be ended");
}

bool Stream::synchronize() const noexcept {
  return cudaStreamSynchronize(handle_) == cudaSuccess;
}

Event::Event() {
  cuda_check(cudaEventCreate(&handle_), "making an event");
}
Event::~Event() {
  cudaEventDestroy(handle_);
}

void Event::record(StreamView stream) noexcept {
  cudaEventRecord(handle_, stream.handle);
}
bool Event::synchronize() const noexcept {
  return cudaEventSynchronize(handle_) == cudaSuccess;
}

bool Event::reached() const noexcept {
  return cudaEventQuery(handle_) == cudaSuccess;
}
void Event::hold_back(StreamView stream) const noexcept {
  cudaStreamWaitEvent(stream.handle, handle_);
}

float Event::elapsed_ms(const Event& begin, const Event& end) noexcept {
  float ms = 0.0f;
  cudaEventElapsedTime(&ms, begin.handle_, end.handle_);
  return ms;
}

}  // namespace thermo
