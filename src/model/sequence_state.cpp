#include "model/sequence_state.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/host_buffer.h"
#include "base/units.h"

namespace thermo {
namespace {

// Floats of one DeltaNet layer: matrices, then convolution inputs.
size_t delta_floats(const ModelConfig& c) {
  return static_cast<size_t>(c.ssm_n_head_v) * static_cast<size_t>(c.ssm_dim) *
         static_cast<size_t>(c.ssm_dim);
}
size_t conv_floats(const ModelConfig& c) {
  return static_cast<size_t>(c.ssm_taps - 1) * static_cast<size_t>(c.ssm_channel_stride());
}
size_t recurrent_floats(const ModelConfig& c) {
  return align_up<size_t>(delta_floats(c) + conv_floats(c), 16);
}

// Floats of one tape row of one layer: conv input, k, g, delta; each starts on a cache line.
struct TapeLayout {
  size_t conv_input, k, g, delta;  // floats per row
  explicit TapeLayout(const ModelConfig& c)
      : conv_input(static_cast<size_t>(c.ssm_channel_stride())),
        k(align_up<size_t>(static_cast<size_t>(c.ssm_n_head_k * c.ssm_dim), 16)),
        g(align_up<size_t>(static_cast<size_t>(c.ssm_n_head_v), 16)),
        delta(align_up<size_t>(static_cast<size_t>(c.ssm_inner()), 16)) {}
  size_t total() const { return conv_input + k + g + delta; }
};

// Cache rows of one layer: the context and the uncommitted rows behind it.
size_t kv_slots(const SequenceConfig& o) {
  return static_cast<size_t>(o.n_ctx + o.max_draft_rows);
}
size_t k_row_bytes(const ModelConfig& c, const SequenceConfig& o) {
  return static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.k_type, c.head_dim);
}
size_t v_row_bytes(const ModelConfig& c, const SequenceConfig& o) {
  return static_cast<size_t>(c.n_head_kv) * kv_head_bytes(o.v_type, c.head_dim);
}
size_t kv_layer_bytes(const ModelConfig& c, const SequenceConfig& o) {
  return align_up<size_t>(kv_slots(o) * k_row_bytes(c, o), 64) +
         align_up<size_t>(kv_slots(o) * v_row_bytes(c, o), 64);
}

size_t n_kv_layers(const ModelConfig& c) {
  return static_cast<size_t>(c.n_attention_layers() + c.n_nextn);
}

}  // namespace

struct SequenceState::Memory {
  HostBuffer kv;
  HostBuffer recurrent;
  HostBuffer tape;
};

uint64_t SequenceState::kv_bytes(const ModelConfig& c, const SequenceConfig& o) {
  return n_kv_layers(c) * kv_layer_bytes(c, o);
}
uint64_t SequenceState::recurrent_bytes(const ModelConfig& c) {
  return static_cast<uint64_t>(c.n_recurrent_layers()) * recurrent_floats(c) * sizeof(float);
}
uint64_t SequenceState::tape_bytes(const ModelConfig& c, const SequenceConfig& o) {
  if (c.n_recurrent_layers() == 0) return 0;
  return static_cast<uint64_t>(c.n_recurrent_layers()) * TapeLayout(c).total() *
         static_cast<size_t>(o.max_draft_rows) * sizeof(float);
}

SequenceState::SequenceState(const ModelConfig& config, const SequenceConfig& options)
    : config_(&config), options_(options), memory_(std::make_unique<Memory>()) {
  THERMO_CHECK(options.max_draft_rows <= kDeltaChunk, "more draft rows than the delta rule takes at once");
  for (const LayerConfig& layer : config.layers)
    memory_index_.push_back(layer.recurrent ? n_recurrent_++ : n_attention_++);
  memory_->kv = HostBuffer(kv_bytes(config, options));
  memory_->recurrent = HostBuffer(recurrent_bytes(config));
  memory_->tape = HostBuffer(tape_bytes(config, options));
}
SequenceState::~SequenceState() = default;
SequenceState::SequenceState(SequenceState&&) noexcept = default;
SequenceState& SequenceState::operator=(SequenceState&&) noexcept = default;

void SequenceState::clear() noexcept {
  memory_->recurrent.reset(memory_->recurrent.size());
  n_past_ = 0;
}

Checkpoint SequenceState::checkpoint() const {
  Checkpoint point;
  point.n_past = n_past_;
  const float* const floats = memory_->recurrent.as<float>();
  point.recurrent.assign(floats, floats + recurrent_bytes(*config_) / sizeof(float));
  return point;
}

void SequenceState::restore(const Checkpoint& point) noexcept {
  THERMO_CHECK(point.n_past <= n_past_, "a checkpoint of a longer past");
  if (!point.recurrent.empty())
    std::memcpy(memory_->recurrent.data(), point.recurrent.data(), point.recurrent.size() * sizeof(float));
  n_past_ = point.n_past;
}

void SequenceState::truncate(int n) noexcept {
  THERMO_CHECK(n_recurrent_ == 0 && n <= n_past_, "recurrent memory cannot be cut");
  n_past_ = n;
}

KvView SequenceState::kv(int layer) noexcept {
  std::byte* const base =
      memory_->kv.data() +
      static_cast<size_t>(memory_index_[static_cast<size_t>(layer)]) * kv_layer_bytes(*config_, options_);
  return {.k_type = options_.k_type,
          .v_type = options_.v_type,
          .k = base,
          .v = base + align_up<size_t>(kv_slots(options_) * k_row_bytes(*config_, options_), 64)};
}

float* SequenceState::delta_state(int layer) noexcept {
  return memory_->recurrent.as<float>() +
         static_cast<size_t>(memory_index_[static_cast<size_t>(layer)]) * recurrent_floats(*config_);
}
float* SequenceState::conv_state(int layer) noexcept {
  return delta_state(layer) + delta_floats(*config_);
}

SequenceState::Tape SequenceState::tape(int layer) noexcept {
  const TapeLayout layout(*config_);
  const size_t rows = static_cast<size_t>(options_.max_draft_rows);
  float* const base = memory_->tape.as<float>() +
                      static_cast<size_t>(memory_index_[static_cast<size_t>(layer)]) * layout.total() * rows;
  return {.conv_input = base,
          .k = base + layout.conv_input * rows,
          .g = base + (layout.conv_input + layout.k) * rows,
          .delta = base + (layout.conv_input + layout.k + layout.g) * rows};
}

void SequenceState::commit_path(std::span<const int32_t> path, const DeltaNetKernels& kernels) noexcept {
  const int n = static_cast<int>(path.size());
  const size_t k_bytes = k_row_bytes(*config_, options_);
  const size_t v_bytes = v_row_bytes(*config_, options_);
  for (int layer = 0; layer < static_cast<int>(config_->layers.size()); ++layer) {
    if (!config_->layers[static_cast<size_t>(layer)].recurrent) {
      // Accepted rows move down behind the committed ones. path[d] >= d, so nothing is overwritten before it
      // moved.
      const KvView view = kv(layer);
      for (int d = 0; d < n; ++d) {
        if (path[static_cast<size_t>(d)] == d) continue;
        const size_t from = static_cast<size_t>(n_past_ + path[static_cast<size_t>(d)]);
        const size_t to = static_cast<size_t>(n_past_ + d);
        std::memcpy(view.k + to * k_bytes, view.k + from * k_bytes, k_bytes);
        std::memcpy(view.v + to * v_bytes, view.v + from * v_bytes, v_bytes);
      }
      continue;
    }
    const Tape rows = tape(layer);
    kernels.commit({.k = rows.k,
                    .g = rows.g,
                    .delta = rows.delta,
                    .k_stride = config_->ssm_n_head_k * config_->ssm_dim,
                    .state = delta_state(layer),
                    .path = path,
                    .n_head_k = config_->ssm_n_head_k,
                    .n_head_v = config_->ssm_n_head_v,
                    .dim = config_->ssm_dim},
                   0, config_->ssm_n_head_v);
    shift_conv_state(conv_state(layer), rows.conv_input, path, config_->ssm_taps,
                     config_->ssm_channel_stride(), 0, config_->ssm_channels());
  }
  n_past_ += n;
}

void shift_conv_state(float* state, const float* inputs, std::span<const int32_t> path, int taps, int stride,
                      int begin, int end) noexcept {
  // The new columns are the last taps - 1 of [old columns, inputs along the path].
  const int keep = taps - 1;
  const int n = static_cast<int>(path.size());
  const size_t column = static_cast<size_t>(stride);
  for (int t = 0; t < keep; ++t) {
    const int source = t + n - keep;  // along the path; negative: an old column
    const float* const from = source >= 0
                                  ? inputs + static_cast<size_t>(path[static_cast<size_t>(source)]) * column
                                  : state + static_cast<size_t>(source + keep) * column;
    std::copy(from + begin, from + end, state + static_cast<size_t>(t) * column + begin);
  }
}

}  // namespace thermo
