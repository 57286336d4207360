// The memory of sequences of a model on the GPU: checkpoints, pages that change hands, blocks of keys and
// values in main memory.
#include <cuda_runtime.h>

#include "base/check.h"
#include "base/error.h"
#include "device/cuda_check.h"
#include "model/gpu/gpu_model.h"
#include "model/gpu/gpu_model_impl.h"

namespace thermo {
namespace {

// Memory that copies were queued to and from. Copies that follow come after them; only who gives the memory
// back to the system, or writes to it, waits.
class CopyMemory {
 public:
  CopyMemory(std::shared_ptr<LockedPool> pool, std::shared_ptr<Event> copied, size_t n_bytes)
      : pool_(std::move(pool)), copied_(std::move(copied)), buffer_(pool_->take(n_bytes)) {}
  CopyMemory(CopyMemory&&) = default;
  CopyMemory& operator=(CopyMemory&&) = delete;
  ~CopyMemory() {
    if (buffer_.size() > 0) pool_->give_back(std::move(buffer_), copied_);
  }
  std::byte* data() const noexcept { return buffer_.data(); }
  size_t size() const noexcept { return buffer_.size(); }

 private:
  std::shared_ptr<LockedPool> pool_;
  std::shared_ptr<Event> copied_;  // the last copy of the model
  LockedBuffer buffer_;
};

// The pieces of a sequence, one after the other. Page-locked, so that it comes back as fast as the link is.
class LockedCheckpoint final : public Checkpoint {
 public:
  LockedCheckpoint(int n_past, bool has_kv, CopyMemory taken)
      : Checkpoint(n_past, has_kv), memory(std::move(taken)) {}

  CopyMemory memory;
};

class LockedMemory final : public HostMemory {
 public:
  LockedMemory(CopyMemory memory, size_t n_bytes) : memory_(std::move(memory)) {
    data_ = memory_.data();
    size_ = n_bytes;
  }

 private:
  CopyMemory memory_;
};

}  // namespace

// Copies to main memory run beside the steps, in a stream of their own: pages that they read are not written
// again before wait_for_copies(), and the state of a sequence, which every step writes, is copied on the card
// first, to the next place of a ring. What one of the streams copies comes after what the other copied
// before.
void GpuModel::Impl::begin_copies() noexcept {
  written.record(stream.view());
  written.hold_back(copies.view());
}
void GpuModel::Impl::wait_for_copies() noexcept {
  copied->hold_back(stream.view());
}

// Copies between the pieces of a sequence and a checkpoint. They are queued: what follows in the stream sees
// them done.
void GpuModel::Impl::copy_pieces(int sequence, int n_tokens, bool with_kv, std::byte* checkpoint,
                                 bool restore) noexcept {
  finish_commits();
  flush_tables();
  if (restore || with_kv || staged_states.empty()) wait_for_copies();
  const auto base_of = [&](SequenceLayout::Region region) {
    if (region == SequenceLayout::Region::Recurrent) return recurrent.data();
    return pool_of(region == SequenceLayout::Region::Sliding ? KvKind::Sliding : KvKind::Full);
  };
  layout.for_each_piece(
      sequence, pages->tables(sequence), n_tokens, with_kv, [&](auto region, size_t offset, size_t bytes) {
        std::byte* const piece = base_of(region) + offset;
        if (restore) {
          cudaMemcpyAsync(piece, checkpoint, bytes, cudaMemcpyHostToDevice, stream.view().handle);
        } else if (region == SequenceLayout::Region::Recurrent && !staged_states.empty()) {
          StagedState& staged = staged_states[next_staged++ % staged_states.size()];
          staged.copied.hold_back(stream.view());
          cudaMemcpyAsync(staged.memory.data(), piece, bytes, cudaMemcpyDeviceToDevice, stream.view().handle);
          begin_copies();
          cudaMemcpyAsync(checkpoint, staged.memory.data(), bytes, cudaMemcpyDeviceToHost,
                          copies.view().handle);
          staged.copied.record(copies.view());
        } else {
          cudaMemcpyAsync(checkpoint, piece, bytes, cudaMemcpyDeviceToHost, stream.view().handle);
        }
        checkpoint += bytes;
      });
  if (!restore) begin_copies();
  copied->record(restore ? stream.view() : copies.view());
  check(restore ? "restoring a checkpoint" : "a checkpoint");
}

void GpuModel::clear(int sequence) noexcept {
  Impl& m = *impl_;
  m.drop_commits(sequence);
  m.wait_for_copies();
  const size_t bytes = m.layout.recurrent_bytes();
  if (bytes > 0)
    cudaMemsetAsync(m.recurrent.data() + static_cast<size_t>(sequence) * bytes, 0, bytes,
                    m.stream.view().handle);
  m.pages->cut(sequence, 0);
  m.n_past[static_cast<size_t>(sequence)] = 0;
}

std::unique_ptr<Checkpoint> GpuModel::checkpoint(int sequence, bool with_kv,
                                                 std::unique_ptr<Checkpoint> reuse) {
  Impl& m = *impl_;
  const int n_tokens = n_past(sequence);
  try {
    const size_t n_bytes = checkpoint_bytes(n_tokens, with_kv);
    auto* const old = static_cast<LockedCheckpoint*>(reuse.get());
    const bool fits = old != nullptr && old->memory.size() >= n_bytes;
    auto point = std::make_unique<LockedCheckpoint>(
        n_tokens, with_kv, fits ? std::move(old->memory) : CopyMemory(m.host_pool, m.copied, n_bytes));
    m.copy_pieces(sequence, n_tokens, with_kv, point->memory.data(), false);
    return point;
  } catch (const MemoryError&) {
    return nullptr;
  }
}

bool GpuModel::restore(int sequence, const Checkpoint& point) noexcept {
  Impl& m = *impl_;
  m.drop_commits(sequence);
  if (!m.pages->replace(sequence, point.n_past(), point.has_kv())) {
    clear(sequence);
    return false;
  }
  m.copy_pieces(sequence, point.n_past(), point.has_kv(),
                static_cast<const LockedCheckpoint&>(point).memory.data(), true);
  m.n_past[static_cast<size_t>(sequence)] = point.n_past();
  return true;
}

void GpuModel::finish_copies() noexcept {
  impl_->copied->synchronize();
}

std::span<const std::byte> GpuModel::bytes_of(const Checkpoint& point) const noexcept {
  return {static_cast<const LockedCheckpoint&>(point).memory.data(),
          checkpoint_bytes(point.n_past(), point.has_kv())};
}

std::unique_ptr<Checkpoint> GpuModel::make_checkpoint(int n_past, std::span<const std::byte> bytes) {
  const size_t n_bytes = checkpoint_bytes(n_past, false);
  if (!bytes.empty() && bytes.size() != n_bytes) return nullptr;
  try {
    auto point = std::make_unique<LockedCheckpoint>(n_past, false,
                                                    CopyMemory(impl_->host_pool, impl_->copied, n_bytes));
    if (!bytes.empty()) impl_->copied->synchronize();  // the last copy may be to this memory
    std::copy(bytes.begin(), bytes.end(), point->memory.data());
    return point;
  } catch (const MemoryError&) {
    return nullptr;
  }
}

void GpuModel::truncate(int sequence, int n) noexcept {
  THERMO_CHECK(n <= n_past(sequence) && can_truncate(sequence, n), "memory that cannot be cut there");
  if (n == 0) return clear(sequence);
  impl_->finish_commits();
  impl_->wait_for_copies();
  impl_->pages->cut(sequence, n);
  impl_->n_past[static_cast<size_t>(sequence)] = n;
}

void GpuModel::share(int from, int to, int n) noexcept {
  clear(to);
  impl_->finish_commits();
  impl_->pages->share(from, to, n);
  impl_->n_past[static_cast<size_t>(to)] = n;
}

std::unique_ptr<HostMemory> GpuModel::make_host_memory(size_t n_bytes) {
  try {
    return std::make_unique<LockedMemory>(CopyMemory(impl_->host_pool, impl_->copied, n_bytes), n_bytes);
  } catch (const MemoryError&) {
    return nullptr;
  }
}

std::unique_ptr<KvPin> GpuModel::pin_kv(int sequence) {
  impl_->finish_commits();
  return std::make_unique<KvPin>(*impl_->pages, sequence, n_past(sequence));
}

void GpuModel::save_kv(const KvPin& pin, const KvRange& range, std::byte* block) noexcept {
  THERMO_CHECK(range.position + range.n <= pin.n_tokens(), "keys and values that are not there");
  impl_->copy_block(pin.table(), range, block, false);
}

bool GpuModel::load_kv(int sequence, const KvRange& range, const std::byte* block) noexcept {
  Impl& m = *impl_;
  if (range.position == 0)
    m.drop_commits(sequence);
  else
    m.finish_commits();  // what lies before stays
  if (!m.pages->load(sequence, range.position, range.n)) {
    clear(sequence);
    return false;
  }
  m.finish_commits();
  m.flush_tables();
  m.copy_block(m.pages->table(KvKind::Full, sequence), range, const_cast<std::byte*>(block), true);
  m.n_past[static_cast<size_t>(sequence)] = range.position + range.n;
  return true;
}

// Copies between positions in pages and a block; queued, like those of copy_pieces().
void GpuModel::Impl::copy_block(const int32_t* table, const KvRange& range, std::byte* block,
                                bool load) noexcept {
  if (!fault.empty()) return;
  if (load)
    wait_for_copies();
  else
    begin_copies();
  const StreamView at_work = load ? stream.view() : copies.view();
  std::byte* const base = pool_of(KvKind::Full);
  layout.for_each_block_piece(
      table, range.position, range.slot, range.n, [&](size_t offset, size_t at, size_t bytes) {
        std::byte *const piece = base + offset, *const host = block + at;
        cudaMemcpyAsync(load ? piece : host, load ? host : piece, bytes,
                        load ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, at_work.handle);
      });
  copied->record(at_work);
  check(load ? "loading keys and values" : "saving keys and values");
}

}  // namespace thermo
