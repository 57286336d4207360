// Page-locked memory that is there when it is asked for. Taking and locking the 64 MiB that the state of a
// sequence needs takes as long as ten steps, so a thread keeps pieces ready of the sizes that were asked for
// last: more of a size whenever none was left.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/host_buffer.h"
#include "device/buffer.h"
#include "device/stream.h"

namespace thermo {

// Host memory with large pages, locked. Where the system refuses to lock it, copies are slower.
class LockedBuffer {
 public:
  LockedBuffer() = default;
  explicit LockedBuffer(size_t n_bytes)  // throws MemoryError
      : memory_(n_bytes), lock_(memory_.data(), memory_.size()) {}

  std::byte* data() const noexcept { return memory_.data(); }
  size_t size() const noexcept { return memory_.size(); }

 private:
  HostBuffer memory_;
  PageLock lock_;
};

// Any thread.
class LockedPool {
 public:
  // `most_bytes`: what is kept ready at most.
  LockedPool(int device, uint64_t most_bytes) : device_(device), most_bytes_(most_bytes) {}
  ~LockedPool();
  LockedPool(const LockedPool&) = delete;
  LockedPool& operator=(const LockedPool&) = delete;

  // At least so many bytes, and little more; what is in them is not defined. Throws MemoryError.
  LockedBuffer take(size_t n_bytes);
  // For the next one who asks, whose copies come after `last_copy`, or for the system, after that copy: the
  // thread gives it back, since that takes half a step.
  void give_back(LockedBuffer buffer, std::shared_ptr<const Event> last_copy);

 private:
  struct Size {
    size_t n_bytes = 0;
    size_t n_wanted = 2;  // ready
  };
  static constexpr size_t kSizes = 4;
  struct Leaving {
    LockedBuffer buffer;
    std::shared_ptr<const Event> last_copy;
  };

  static bool fits(const LockedBuffer& buffer, size_t n_bytes) {
    return buffer.size() >= n_bytes && buffer.size() - n_bytes <= n_bytes / 8 + HostBuffer::kPageBytes;
  }
  size_t n_ready(size_t n_bytes) const;
  size_t to_prepare() const;  // bytes; 0: nothing
  void note(size_t n_bytes, bool was_ready);
  void prepare();

  const int device_;
  const uint64_t most_bytes_;
  std::mutex mutex_;  // for all below
  std::condition_variable asked_;
  std::vector<LockedBuffer> ready_;
  uint64_t ready_bytes_ = 0;
  std::vector<Leaving> leaving_;
  std::vector<Size> sizes_;  // asked for last: at the end
  bool failed_ = false;      // there was no memory; until somebody asks again
  bool stop_ = false;
  std::thread thread_;  // from the first take() on
};

}  // namespace thermo
