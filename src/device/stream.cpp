#include "device/stream.h"

#include "base/log.h"
#include "device/cuda_check.h"

namespace thermo {
namespace {

// The driver's function; the runtime has none, and the driver is not linked, so that programs start without
// it.
using WriteValue = int (*)(CUstream_st* stream, unsigned long long address, uint64_t value, unsigned flags);

WriteValue write_value() noexcept {
  static const WriteValue function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &found, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();  // not an error of a step
      found = nullptr;
    }
    return reinterpret_cast<WriteValue>(found);
  }();
  return function;
}

}  // namespace

Stream::Stream() {
  cuda_check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "making a stream");
}
Stream::~Stream() {
  if (cudaStreamDestroy(handle_) != cudaSuccess) log_warning("device", "a stream could not be ended");
}

bool Stream::synchronize() const noexcept {
  return cudaStreamSynchronize(handle_) == cudaSuccess;
}

bool Stream::can_write() noexcept {
  return write_value() != nullptr;
}
void Stream::write(uint64_t* to, uint64_t value) noexcept {
  write_value()(handle_, reinterpret_cast<unsigned long long>(to), value, 0);
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
