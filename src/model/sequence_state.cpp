#include "model/sequence_state.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/error.h"

namespace thermo {
namespace {

// The pieces of a sequence, one after the other.
class HostCheckpoint final : public Checkpoint {
 public:
  HostCheckpoint(int n_past, bool has_kv, HostBuffer buffer)
      : Checkpoint(n_past, has_kv), memory(std::move(buffer)) {}

  HostBuffer memory;
};

}  // namespace

SequenceMemory::SequenceMemory(const ModelConfig& config, const SequenceConfig& options, int n_sequences,
                               int max_rows)
    : layout(SequenceLayout::on_cpu(config, options)),
      tables(KvPages::table_ints(layout, n_sequences)),
      pages(layout, n_sequences, max_rows, tables, [this](KvKind kind, int from, int to) {
        const size_t bytes = layout.page_bytes(kind);
        std::byte* const base = pool(kind).data();
        std::memcpy(base + static_cast<size_t>(to) * bytes, base + static_cast<size_t>(from) * bytes, bytes);
      }) {
  THERMO_CHECK(options.max_draft_rows <= kDeltaChunk, "more draft rows than the delta rule takes at once");
  const auto n = static_cast<size_t>(n_sequences);
  for (const KvKind kind : kEachKvKind)
    kv[static_cast<size_t>(kind)] = HostBuffer(layout.pool_bytes(kind, n_sequences, max_rows));
  recurrent = HostBuffer(n * layout.recurrent_bytes());
  tape = HostBuffer(n * layout.tape_bytes());
}

std::byte* SequenceMemory::at(SequenceLayout::Region region, size_t offset) const {
  switch (region) {
    case SequenceLayout::Region::Recurrent:
      return recurrent.data() + offset;
    case SequenceLayout::Region::Sliding:
      return pool(KvKind::Sliding).data() + offset;
    case SequenceLayout::Region::Full:
      break;
  }
  return pool(KvKind::Full).data() + offset;
}

void SequenceMemory::save_kv(const KvPin& pin, const KvRange& range, std::byte* block) const noexcept {
  THERMO_CHECK(range.position + range.n <= pin.n_tokens(), "keys and values that are not there");
  layout.for_each_block_piece(pin.table(), range.position, range.slot, range.n,
                              [&](size_t offset, size_t at, size_t bytes) {
                                std::memcpy(block + at, pool(KvKind::Full).data() + offset, bytes);
                              });
}

SequenceState::SequenceState(const ModelConfig& config, SequenceMemory& memory, const SequenceConfig& options,
                             int index)
    : config_(&config), memory_(&memory), k_type_(options.k_type), v_type_(options.v_type), index_(index) {}

void SequenceState::clear() noexcept {
  const size_t bytes = memory_->layout.recurrent_bytes();
  if (n_past_ > 0 && bytes > 0)
    std::memset(memory_->recurrent.data() + static_cast<size_t>(index_) * bytes, 0, bytes);
  memory_->pages.cut(index_, 0);
  n_past_ = 0;
}

std::unique_ptr<Checkpoint> SequenceState::checkpoint(bool with_kv, std::unique_ptr<Checkpoint> reuse) const {
  try {
    const SequenceLayout& layout = memory_->layout;
    const size_t n_bytes = layout.piece_bytes(n_past_, with_kv);
    HostBuffer buffer;
    if (reuse) std::swap(buffer, static_cast<HostCheckpoint&>(*reuse).memory);
    if (buffer.size() < n_bytes) buffer = HostBuffer(n_bytes);
    auto point = std::make_unique<HostCheckpoint>(n_past_, with_kv, std::move(buffer));
    std::byte* to = point->memory.data();
    layout.for_each_piece(index_, memory_->pages.tables(index_), n_past_, with_kv,
                          [&](auto region, size_t offset, size_t bytes) {
                            std::memcpy(to, memory_->at(region, offset), bytes);
                            to += bytes;
                          });
    return point;
  } catch (const MemoryError&) {
    return nullptr;
  }
}

std::span<const std::byte> SequenceState::bytes_of(const Checkpoint& point) noexcept {
  const HostBuffer& memory = static_cast<const HostCheckpoint&>(point).memory;
  return {memory.data(), memory.size()};
}

std::unique_ptr<Checkpoint> SequenceState::make_checkpoint(int n_past, size_t n_bytes,
                                                           std::span<const std::byte> bytes) {
  try {
    HostBuffer memory(n_bytes);
    if (bytes.empty()) touch_pages(memory.data(), memory.size());
    std::copy(bytes.begin(), bytes.end(), memory.data());
    return std::make_unique<HostCheckpoint>(n_past, false, std::move(memory));
  } catch (const MemoryError&) {
    return nullptr;
  }
}

bool SequenceState::restore(const Checkpoint& point) noexcept {
  THERMO_CHECK(point.has_kv() || point.n_past() <= n_past_, "a checkpoint of a longer past");
  if (!memory_->pages.replace(index_, point.n_past(), point.has_kv())) {
    clear();
    return false;
  }
  const std::byte* from = static_cast<const HostCheckpoint&>(point).memory.data();
  memory_->layout.for_each_piece(index_, memory_->pages.tables(index_), point.n_past(), point.has_kv(),
                                 [&](auto region, size_t offset, size_t bytes) {
                                   std::memcpy(memory_->at(region, offset), from, bytes);
                                   from += bytes;
                                 });
  n_past_ = point.n_past();
  return true;
}

bool SequenceState::load_kv(const KvRange& range, const std::byte* block) noexcept {
  THERMO_CHECK(range.position <= n_past_, "keys and values after a gap");
  if (!memory_->pages.load(index_, range.position, range.n)) {
    clear();
    return false;
  }
  std::byte* const pool = memory_->pool(KvKind::Full).data();
  memory_->layout.for_each_block_piece(
      memory_->pages.table(KvKind::Full, index_), range.position, range.slot, range.n,
      [&](size_t offset, size_t at, size_t bytes) { std::memcpy(pool + offset, block + at, bytes); });
  n_past_ = range.position + range.n;
  return true;
}

void SequenceState::truncate(int n) noexcept {
  if (n == 0) return clear();
  memory_->pages.cut(index_, n);
  n_past_ = n;
}

void SequenceState::share(const SequenceState& from, int n) noexcept {
  clear();
  memory_->pages.share(from.index_, index_, n);
  n_past_ = n;
}

void SequenceState::advance(int n) noexcept {
  n_past_ += n;
  memory_->pages.advance(index_, n_past_);
}

KvView SequenceState::kv(int layer) noexcept {
  const KvKind kind = memory_->layout.kv_kind(layer);
  const SequenceLayout::Kv at = memory_->layout.kv(layer, 0);
  std::byte* const pool = memory_->pool(kind).data();
  return {.k_type = k_type_,
          .v_type = v_type_,
          .k = pool + at.k,
          .v = pool + at.v,
          .pages = memory_->pages.table(kind, index_),
          .page_bytes = static_cast<int64_t>(memory_->layout.page_bytes(kind))};
}

float* SequenceState::delta_state(int layer) noexcept {
  return reinterpret_cast<float*>(memory_->recurrent.data() + memory_->layout.recurrent(index_, layer).state);
}
float* SequenceState::conv_state(int layer) noexcept {
  return reinterpret_cast<float*>(memory_->recurrent.data() +
                                  memory_->layout.recurrent(index_, layer).columns);
}

SequenceState::Tape SequenceState::tape(int layer) noexcept {
  const SequenceLayout::Tape at = memory_->layout.tape(index_, layer);
  const auto floats = [&](size_t offset) { return reinterpret_cast<float*>(memory_->tape.data() + offset); };
  return {floats(at.conv_input), floats(at.k), floats(at.g), floats(at.delta)};
}

void SequenceState::commit_path(std::span<const int32_t> path, const DeltaNetKernels& kernels,
                                ThreadPool& pool) noexcept {
  const int n = static_cast<int>(path.size()), n_layers = memory_->layout.n_layers();
  for (int layer = 0; layer < n_layers; ++layer)
    if (!memory_->layout.is_recurrent(layer)) move_keys(layer, path);
  if (n > 0 && memory_->layout.n_recurrent() > 0) {
    // A thread has the heads that it has in a step: their state lies in its cache.
    pool.run(config_->ssm_n_head_k * n_layers, [&](int task, int) {
      if (memory_->layout.is_recurrent(task % n_layers))
        commit_head(task % n_layers, task / n_layers, path, kernels);
    });
  }
  advance(n);
}

// Accepted rows move down to the end of the committed ones. path[d] >= d, so nothing is overwritten before it
// moved.
void SequenceState::move_keys(int layer, std::span<const int32_t> path) noexcept {
  const size_t k_bytes = memory_->layout.k_slot_bytes(), v_bytes = memory_->layout.v_slot_bytes();
  const KvView view = kv(layer);
  const auto slot = [&](std::byte* base, int i, size_t bytes) {
    return base + view.pages[i / kKvPage] * view.page_bytes + static_cast<size_t>(i % kKvPage) * bytes;
  };
  for (int d = 0; d < static_cast<int>(path.size()); ++d) {
    const int row = path[static_cast<size_t>(d)];
    if (row == d) continue;
    std::memcpy(slot(view.k, n_past_ + d, k_bytes), slot(view.k, n_past_ + row, k_bytes), k_bytes);
    std::memcpy(slot(view.v, n_past_ + d, v_bytes), slot(view.v, n_past_ + row, v_bytes), v_bytes);
  }
}

// A key head and the value heads that read it: their state, and the columns of their channels.
void SequenceState::commit_head(int layer, int kh, std::span<const int32_t> path,
                                const DeltaNetKernels& kernels) noexcept {
  const int dim = config_->ssm_dim, n_k = config_->ssm_n_head_k, n_v = config_->ssm_n_head_v;
  const Tape rows = tape(layer);
  const auto shift = [&](int first) {
    shift_conv_state(conv_state(layer), rows.conv_input, path, config_->ssm_taps,
                     config_->ssm_channel_stride(), first, first + dim);
  };
  shift(kh * dim);
  shift((n_k + kh) * dim);
  for (int head = kh; head < n_v; head += n_k) {
    kernels.commit({.k = rows.k,
                    .g = rows.g,
                    .delta = rows.delta,
                    .k_stride = n_k * dim,
                    .state = delta_state(layer),
                    .path = path,
                    .n_head_k = n_k,
                    .n_head_v = n_v,
                    .dim = dim},
                   head, head + 1);
    shift((2 * n_k + head) * dim);
  }
}

void shift_conv_state(float* state, const float* inputs, std::span<const int32_t> path, int taps, int stride,
                      int begin, int end) noexcept {
  // The new columns are the last taps - 1 of [old columns, inputs along the path].
  const int n_columns = taps - 1;
  const int n = static_cast<int>(path.size());
  const size_t column = static_cast<size_t>(stride);
  for (int t = 0; t < n_columns; ++t) {
    const int source = t + n - n_columns;  // along the path; negative: an old column
    const float* const from = source >= 0
                                  ? inputs + static_cast<size_t>(path[static_cast<size_t>(source)]) * column
                                  : state + static_cast<size_t>(source + n_columns) * column;
    std::copy(from + begin, from + end, state + static_cast<size_t>(t) * column + begin);
  }
}

}  // namespace thermo
