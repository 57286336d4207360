// How a core reads fastest differs: some leave a third of the bandwidth unused with one stream (the hardware
// prefetcher stops at page borders) and want several with explicit prefetch, on others explicit prefetch
// costs a third. The best of a few ways is what the machine can do.
#include "cli/bench/bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "base/units.h"

namespace thermo {
namespace {

constexpr size_t kMaxStreams = 8;
constexpr size_t kLine = 64;
constexpr size_t kAhead = 16 * kLine;
constexpr size_t kParts = 16;  // of a thread's memory: who comes late leaves some to the others

// Reads [data, data + n_bytes) as kStreams parts side by side. n_bytes is a multiple of kStreams * kLine.
template <size_t kStreams, bool kPrefetch>
uint64_t read_streams(const std::byte* data, size_t n_bytes) noexcept {
  const size_t part = n_bytes / kStreams;
  uint64_t sums[kLine / sizeof(uint64_t)] = {};
  for (size_t offset = 0; offset < part; offset += kLine) {
    for (size_t stream = 0; stream < kStreams; ++stream) {
      const std::byte* line = data + stream * part + offset;
      // Past the end of a part it is the next one, past the last one a no-op.
      if constexpr (kPrefetch) __builtin_prefetch(line + kAhead);
      uint64_t words[kLine / sizeof(uint64_t)];
      std::memcpy(words, line, kLine);
      for (size_t i = 0; i < std::size(words); ++i) sums[i] ^= words[i];
    }
  }
  uint64_t sum = 0;
  for (uint64_t word : sums) sum ^= word;
  return sum;
}

using ReadFn = uint64_t (*)(const std::byte* data, size_t n_bytes) noexcept;
constexpr ReadFn kWays[] = {read_streams<1, false>, read_streams<2, false>, read_streams<8, true>};

// Memory that the caches cannot hold a useful part of; smaller by halves where the system refuses it.
HostBuffer memory_to_read(size_t n_threads, size_t& per_thread) {
  constexpr size_t kLeast = 16 * MiB;
  for (;; per_thread /= 2) {
    try {
      return HostBuffer(per_thread * n_threads);
    } catch (const MemoryError&) {
      if (per_thread < 2 * kLeast) return HostBuffer();
    }
  }
}

}  // namespace

double measure_read_bandwidth(ThreadPool& pool) {
  using Clock = std::chrono::steady_clock;
  const auto n_threads = static_cast<size_t>(pool.size());
  const uint64_t budget = std::min<uint64_t>(2 * GiB, available_memory_bytes() / 4);
  size_t per_thread = std::min<uint64_t>(256 * MiB, budget / n_threads);
  per_thread =
      std::max<size_t>(per_thread, MiB) / (kParts * kMaxStreams * kLine) * (kParts * kMaxStreams * kLine);
  const HostBuffer buffer = memory_to_read(n_threads, per_thread);
  if (buffer.size() == 0) return 0.0;
  const size_t part = per_thread / kParts;
  std::vector<uint64_t> sums(n_threads * kParts * 8);  // a line each

  // Every thread reads what it wrote first, so that the pages lie on its own memory node.
  const int n_tasks = static_cast<int>(n_threads * kParts);
  pool.run(n_tasks, [&](int task, int) {
    std::memset(buffer.data() + static_cast<size_t>(task) * part, task + 1, part);
  });
  double best_seconds = 1e30;
  for (const ReadFn read : kWays) {
    const Clock::time_point start = Clock::now();
    for (int pass = 0; pass < 8; ++pass) {
      const Clock::time_point before = Clock::now();
      pool.run(n_tasks, [&](int task, int) {
        const auto index = static_cast<size_t>(task);
        sums[index * 8] ^= read(buffer.data() + index * part, part);
      });
      const Clock::time_point after = Clock::now();
      best_seconds = std::min(best_seconds, std::chrono::duration<double>(after - before).count());
      if (pass >= 1 && after - start > std::chrono::milliseconds(150)) break;
    }
  }
  // The sums keep the reads from being optimised away.
  volatile uint64_t keep = 0;
  for (uint64_t sum : sums) keep = keep ^ sum;
  return static_cast<double>(per_thread * n_threads) / std::max(best_seconds, 1e-9);
}

}  // namespace thermo
