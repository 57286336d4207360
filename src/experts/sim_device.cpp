#include "experts/sim_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/pause.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

// Sleeping is not exact to less than some 50 us, which is half of an expert's time on a fast link.
void wait_until(Clock::time_point end) {
  constexpr std::chrono::microseconds kInexact{200};
  if (end - Clock::now() > kInexact) std::this_thread::sleep_until(end - kInexact);
  while (Clock::now() < end) pause_cpu();
}

}  // namespace

SimDevice::SimDevice(const ExpertCatalog& catalog, TraceWriter* trace, uint64_t link_limit)
    : announced_(catalog.layers.size() * kMaxParcels), trace_(trace), link_limit_(link_limit) {
  int n = 0;
  for (const ExpertLayer& layer : catalog.layers) {
    first_.push_back(n);
    n += layer.n_expert();
  }
  table_.resize(static_cast<size_t>(n));
  places_.resize(Courier::place_sizes(catalog).size());
  thread_ = std::thread([this] { copy_loop(); });
}

SimDevice::~SimDevice() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  thread_.join();
}

uint64_t SimDevice::copy(std::byte* to, const std::byte* from, size_t n_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  copies_.push_back({++last_copy_, to, from, n_bytes, n_begun_});
  work_.notify_all();
  return last_copy_;
}

bool SimDevice::done(uint64_t ticket) noexcept {
  const std::lock_guard lock(mutex_);
  return ticket <= done_copy_;
}

void SimDevice::wait(uint64_t ticket) noexcept {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return ticket <= done_copy_; });
}

void SimDevice::publish(int layer, int expert, const std::byte* address) noexcept {
  table_[static_cast<size_t>(first_[static_cast<size_t>(layer)] + expert)] = address;
}

void SimDevice::begin_step() noexcept {
  const std::lock_guard lock(mutex_);
  ++n_begun_;
}

void SimDevice::end_step() noexcept {
  const std::lock_guard lock(mutex_);
  ++n_ended_;
  work_.notify_all();
}

uint64_t SimDevice::stream(std::byte* to, const std::byte* from, size_t n_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  streams_.push_back({++last_stream_, to, from, n_bytes});
  work_.notify_all();
  return last_stream_;
}

void SimDevice::send(std::byte* to, const std::byte* from, size_t n_bytes, int index,
                     uint64_t word) noexcept {
  const std::lock_guard lock(mutex_);
  streams_.push_back({++last_stream_, to, from, n_bytes, 0, index, word});
  work_.notify_all();
}

void SimDevice::publish_place(int index, const std::byte* address) noexcept {
  places_[static_cast<size_t>(index)] = address;
}

void SimDevice::wait_stream(uint64_t ticket) noexcept {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return ticket <= done_stream_; });
}

// The step's own copies first: the step waits for them.
void SimDevice::copy_loop() noexcept {
  std::unique_lock lock(mutex_);
  Clock::time_point link_free = Clock::now();
  for (;;) {
    const auto may_copy = [&] { return !copies_.empty() && copies_.front().after <= n_ended_; };
    work_.wait(lock, [&] { return stop_ || !streams_.empty() || may_copy(); });
    if (stop_) return;
    const bool streaming = !streams_.empty();
    std::deque<Copy>& queue = streaming ? streams_ : copies_;
    const Copy c = queue.front();
    queue.pop_front();
    lock.unlock();
    const int64_t begin_ns = trace_ ? now_ns() : 0;
    const Clock::time_point begin = Clock::now();
    std::memcpy(c.to, c.from, c.n_bytes);
    if (link_limit_ > 0) {
      const std::chrono::duration<double> duration(static_cast<double>(c.n_bytes) /
                                                   static_cast<double>(link_limit_));
      link_free = std::max(link_free, begin) + std::chrono::duration_cast<Clock::duration>(duration);
      wait_until(link_free);
    }
    if (c.index >= 0) announced_[static_cast<size_t>(c.index)].store(c.word, std::memory_order_release);
    if (trace_)
      trace_->add({.lane = streaming ? TraceLane::Fetch : TraceLane::Copy,
                   .name = c.index >= 0 ? "parcel"
                           : streaming  ? "stream"
                                        : "swap",
                   .category = "experts",
                   .begin_ns = begin_ns,
                   .duration_ns = now_ns() - begin_ns,
                   .args = {{{"bytes", static_cast<int64_t>(c.n_bytes)}}}});
    lock.lock();
    (streaming ? done_stream_ : done_copy_) = c.ticket;
    progress_.notify_all();
  }
}

}  // namespace thermo
