#include "device/locked_pool.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace thermo {

LockedPool::~LockedPool() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  asked_.notify_one();
  if (thread_.joinable()) thread_.join();
}

LockedBuffer LockedPool::take(size_t n_bytes) {
  LockedBuffer buffer;
  if (n_bytes == 0) return buffer;
  {
    const std::scoped_lock lock(mutex_);
    const auto found =
        std::find_if(ready_.begin(), ready_.end(), [&](const LockedBuffer& b) { return fits(b, n_bytes); });
    if (found != ready_.end()) {
      buffer = std::move(*found);
      ready_bytes_ -= buffer.size();
      ready_.erase(found);
    }
    note(n_bytes, buffer.size() > 0);
    if (!thread_.joinable()) thread_ = std::thread([this] { prepare(); });
  }
  asked_.notify_one();
  return buffer.size() > 0 ? std::move(buffer) : LockedBuffer(n_bytes);
}

void LockedPool::give_back(LockedBuffer buffer, std::shared_ptr<const Event> last_copy) {
  {
    const std::scoped_lock lock(mutex_);
    if (ready_bytes_ + buffer.size() <= most_bytes_) {
      ready_bytes_ += buffer.size();
      ready_.push_back(std::move(buffer));
      return;
    }
    leaving_.push_back({std::move(buffer), std::move(last_copy)});
  }
  asked_.notify_one();
}

void LockedPool::note(size_t n_bytes, bool was_ready) {
  Size size{.n_bytes = n_bytes};
  const auto known =
      std::find_if(sizes_.begin(), sizes_.end(), [&](const Size& s) { return s.n_bytes == n_bytes; });
  if (known != sizes_.end()) {
    size = *known;
    sizes_.erase(known);
    if (!was_ready) size.n_wanted *= 2;
  }
  size.n_wanted = std::clamp<size_t>(most_bytes_ / 2 / n_bytes, 1, size.n_wanted);
  sizes_.push_back(size);
  if (sizes_.size() > kSizes) sizes_.erase(sizes_.begin());
  failed_ = false;
}

size_t LockedPool::n_ready(size_t n_bytes) const {
  return static_cast<size_t>(
      std::count_if(ready_.begin(), ready_.end(), [&](const LockedBuffer& b) { return fits(b, n_bytes); }));
}

size_t LockedPool::to_prepare() const {
  if (failed_) return 0;
  for (size_t i = sizes_.size(); i-- > 0;)
    if (n_ready(sizes_[i].n_bytes) < sizes_[i].n_wanted && ready_bytes_ + sizes_[i].n_bytes <= most_bytes_)
      return sizes_[i].n_bytes;
  return 0;
}

void LockedPool::prepare() {
  cudaSetDevice(device_);
  std::unique_lock lock(mutex_);
  for (;;) {
    asked_.wait(lock, [&] { return stop_ || !leaving_.empty() || to_prepare() > 0; });
    if (!leaving_.empty()) {
      std::vector<Leaving> leaving = std::exchange(leaving_, {});
      lock.unlock();
      for (const Leaving& piece : leaving) piece.last_copy->synchronize();
      leaving.clear();
      lock.lock();
      continue;
    }
    if (stop_) return;
    const size_t n_bytes = to_prepare();
    lock.unlock();
    LockedBuffer buffer;
    try {
      buffer = LockedBuffer(n_bytes);
    } catch (const MemoryError&) {  // who asks next hears of it
    }
    lock.lock();
    failed_ = buffer.size() == 0;
    if (failed_) continue;
    ready_bytes_ += buffer.size();
    ready_.push_back(std::move(buffer));
  }
}

}  // namespace thermo
