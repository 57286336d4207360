// The output file of `synth`, written by all threads at once. GgufWriter writes in order from one thread, and
// on a memory file system that is bound by the page faults of that thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/synth/synth_shape.h"
#include "gguf/gguf_writer.h"

namespace thermo {

class SynthFile {
 public:
  // Creates PATH.partial of its full size and writes the head. `metadata` has no tensors. Throws LoadError:
  // not writable, not enough space.
  SynthFile(const std::string& path, const GgufWriter& metadata, std::span<const SynthTensor> tensors);
  ~SynthFile();  // removes the file unless finish() gave it its name
  SynthFile(const SynthFile&) = delete;
  SynthFile& operator=(const SynthFile&) = delete;

  // Any thread. After a failure everything else is ignored; finish() reports it.
  void write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) noexcept;
  bool failed() const noexcept { return error_.load(std::memory_order_relaxed) != 0; }
  // Throws LoadError when a write failed.
  void finish();

 private:
  [[noreturn]] void fail(int error) const;
  void check_space(uint64_t n_bytes) const;
  void put(uint64_t at, std::span<const std::byte> bytes) noexcept;

  std::string path_, partial_path_;
  std::vector<uint64_t> offsets_;  // of each tensor, from the start of the file
  std::atomic<int> error_{0};      // the first errno
  int fd_ = -1;
};

}  // namespace thermo
