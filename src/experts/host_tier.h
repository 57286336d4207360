// Experts in main memory, packed for the kernels, as a cache over the file.
//
// If there is room for all, every expert is packed at load and stays. With less, main memory is a cache of
// slots over the file: readers (threads of their own) read, pack and publish. Compute threads only wait for
// them, so that no compute thread takes a page fault on the file.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "experts/catalog.h"

namespace thermo {

class MappedFile;
class ThreadPool;
class TraceWriter;

struct HostTierOptions {
  // Memory for packed experts, aligned to 4096; the caller provides it because a GPU wants it page-locked.
  std::span<std::byte> arena;
  // As many as an expert has matrices, so that the first one wanted arrives soonest. Two to twelve are
  // equally fast on two cores with a disk of 4 to 6 GB/s.
  int n_readers = 3;
  // The files that the catalog's views point into; readers use read calls on them. Views outside all of them
  // are read as memory.
  std::vector<const MappedFile*> files = {};
  TraceWriter* trace = nullptr;  // every read of a matrix after load(); must outlive it
};

struct HostTierStats {
  uint64_t hits = 0, misses = 0;  // demands that found the expert here, or started a read
  uint64_t bytes_read = 0;        // from the file, after load
  uint64_t wait_ns = 0;           // compute threads waited for readers
};

class HostTier {
 public:
  // `catalog` must outlive it, and the mapping its views point into.
  HostTier(const ExpertCatalog& catalog, const HostTierOptions& options);
  ~HostTier();
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  // Bytes of an arena that holds every expert.
  static uint64_t bytes_for_all(const ExpertCatalog& catalog);
  // Experts that may be held in addition to those that one layer's step asks for (on their way to a device).
  static constexpr int kSpareSlots = 16;
  // The smallest arena that works: what one step of a layer can ask for at once (n_expert of it) and a few,
  // for every size of expert. A smaller one makes the constructor throw MemoryError.
  static uint64_t min_bytes(const ExpertCatalog& catalog);

  // Fills the arena: everything when it fits, else as many experts as there is room for, `order` first (pairs
  // of layer and expert; may be empty). On all threads of the pool. Throws LoadError when the file cannot be
  // read.
  void load(ThreadPool& pool, std::span<const std::pair<int, int>> order,
            const std::function<void(uint64_t done, uint64_t total)>& progress);

  bool complete() const noexcept;  // every expert is here, forever
  // Address of the packed expert, or nullptr while it is only in the file. Valid for ever when complete(),
  // else only while it is held.
  const std::byte* address(int layer, int expert) const noexcept;

  // Starts reading those that are not here. Returns at once.
  void want(int layer, std::span<const int32_t> experts) noexcept;
  // The packed expert, held in place until release(); waits for a reader when it is not here.
  Ffn acquire(int layer, int expert) noexcept;
  // The same without waiting: nullopt when it is not here.
  std::optional<Ffn> try_acquire(int layer, int expert) noexcept;
  void release(int layer, int expert) noexcept;

  // A prompt uses nearly every expert of a layer once per chunk and would push out everything that decoding
  // needs. While this is set, what is read is the first to leave.
  void set_passing(bool passing) noexcept;

  int n_slots() const noexcept;  // experts that fit
  // Of the experts of one size, how many fit, for the size where the fewest do. All when complete().
  int n_slots_of_a_size() const noexcept;
  // Why an expert could not be read; empty while all could. Its weights are zero from then on, so results
  // computed with them must not be used.
  std::string_view fault() const noexcept;

  HostTierStats stats() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
