#include <algorithm>

#include "base/units.h"
#include "model/forward.h"

namespace thermo {
namespace {

int q_dim(const ModelConfig& c) {
  return c.max_n_head() * c.head_dim;
}
int max_n_rot(const ModelConfig& c) {
  int most = 0;
  for (const RopeConfig& rope : c.ropes) most = std::max(most, rope.n_rot);
  return most;
}
// The widest states that are projected.
int states_dim(const std::vector<Block>& blocks) {
  int most = 0;
  for (const Block& block : blocks)
    if (const TensorSpec* spec = block.find(Role::StateProjection)) most = std::max(most, spec->shape[0]);
  return most;
}
int mixed_dim(const ModelConfig& c) {
  return std::max({q_dim(c), c.ssm_n_head_v > 0 ? c.ssm_inner() : 0, states_dim(c.network.features)});
}
// What norms write: a block's input is as wide as the stream, states may be several.
int input_dim(const ModelConfig& c) {
  return std::max(c.n_embd, states_dim(c.network.input));
}

// Pairs of (row, expert), the shared expert or the dense FFN included.
int max_pairs(const ModelConfig& c, int n_batch) {
  return n_batch * (c.route.n_expert_used + 1);
}
int max_groups(const ModelConfig& c) {
  return c.route.n_expert + 1;
}

// Where all rows take one FFN, only those of small ones are of use.
bool has_whole_experts(const ModelConfig& c) {
  constexpr int kMostFf = 2048;
  return c.is_moe() || c.max_n_ff() <= kMostFf;
}

// Hands out consecutive cache-aligned pieces; with no memory behind it, it only adds up.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(size_t count) {
    std::byte* const piece = base_ ? base_ + used_ : nullptr;
    used_ += align_up<size_t>(count * sizeof(T), 64);
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

// The one list of buffers: run once to measure, once to assign.
void carve(Carver& carver, const ModelConfig& c, int n_batch, int n_threads, Activations* a) {
  const size_t rows = static_cast<size_t>(n_batch);
  const auto floats = [&](float* Activations::*member, size_t per_row) {
    float* const piece = carver.take<float>(rows * per_row);
    if (a) a->*member = piece;
  };
  const auto scratch = [&](float* Activations::*member, size_t per_thread) {
    float* const piece =
        carver.take<float>(static_cast<size_t>(n_threads) * align_up<size_t>(per_thread, 16));
    if (a) a->*member = piece;
  };
  const auto ints = [&](int32_t* Activations::*member, size_t count) {
    int32_t* const piece = carver.take<int32_t>(count);
    if (a) a->*member = piece;
  };
  const auto dim = [](int n) { return static_cast<size_t>(std::max(n, 0)); };

  floats(&Activations::x, dim(c.n_embd));
  floats(&Activations::q_full, dim(c.network.widest(Role::Q)));
  floats(&Activations::q, dim(q_dim(c)));
  floats(&Activations::k, dim(c.n_kv_dim()));
  floats(&Activations::v, dim(c.n_kv_dim()));
  floats(&Activations::gate, dim(c.network.widest(Role::Gate)));
  floats(&Activations::angles, c.ropes.size() * dim(max_n_rot(c)));
  scratch(&Activations::attention_scratch, attention_scratch_floats(c.max_n_head(), c.n_head_kv, c.head_dim));
  if (c.ssm_n_head_v > 0) {
    floats(&Activations::conv_input, dim(c.ssm_channel_stride()));
    floats(&Activations::conv_output, dim(c.ssm_channel_stride()));
    floats(&Activations::z, dim(c.ssm_inner()));
    floats(&Activations::alpha, dim(c.ssm_n_head_v));
    floats(&Activations::beta, dim(c.ssm_n_head_v));
    scratch(&Activations::delta_scratch, delta_net_scratch_floats(c.ssm_dim));
  }
  floats(&Activations::router_logits, dim(c.route.n_expert));
  floats(&Activations::expert_weights, dim(c.route.n_expert_used));
  floats(&Activations::shared_weights, 1);
  floats(&Activations::pair_weights, dim(max_pairs(c, 1)));
  ints(&Activations::expert_ids, rows * dim(c.route.n_expert_used));
  ints(&Activations::pair_rows, dim(max_pairs(c, n_batch)));
  floats(&Activations::taps, dim(c.network.n_taps) * dim(c.n_embd));
  floats(&Activations::logits, dim(c.n_vocab));
}

size_t carved_bytes(const ModelConfig& c, int n_batch, int n_threads) {
  Carver carver(nullptr);
  carve(carver, c, n_batch, n_threads, nullptr);
  return carver.used();
}

}  // namespace

uint64_t Activations::untouched_bytes(const ModelConfig& c, int n_batch) {
  return static_cast<uint64_t>(n_batch - 1) * static_cast<uint64_t>(c.n_vocab) * sizeof(float);
}

uint64_t Activations::planned_bytes(const ModelConfig& c, int n_batch, int n_threads,
                                    size_t max_panel_bytes) {
  return carved_bytes(c, n_batch, n_threads) - untouched_bytes(c, n_batch) +
         ActBuffer::planned_bytes(n_batch, input_dim(c)) + ActBuffer::planned_bytes(n_batch, mixed_dim(c)) +
         ExpertFfnScratch::planned_bytes(max_pairs(c, n_batch), c.max_n_ff()) +
         (has_whole_experts(c) ? WholeExperts::planned_bytes(c.max_n_ff(), c.n_embd, n_threads) : 0) +
         ExpertSums::planned_bytes(n_batch, c.n_embd) +
         LinearScratch::planned_bytes(n_threads, max_panel_bytes);
}

Activations::Activations(const ModelConfig& c, int n_batch, int n_threads, size_t max_panel_bytes)
    : h(n_batch, input_dim(c)),
      mixed(n_batch, mixed_dim(c)),
      expert_first(static_cast<size_t>(c.route.n_expert) + 1),
      ffn_scratch(max_pairs(c, n_batch), c.max_n_ff(), max_groups(c), n_threads),
      whole_experts(has_whole_experts(c) ? WholeExperts(c.max_n_ff(), c.n_embd, max_groups(c), n_threads)
                                         : WholeExperts()),
      expert_sums(n_batch, c.n_embd),
      linear_scratch(n_threads, max_panel_bytes),
      memory_(carved_bytes(c, n_batch, n_threads)) {
  groups.reserve(static_cast<size_t>(max_groups(c)));
  attention.reserve(static_cast<size_t>(n_batch));
  Carver carver(memory_.data());
  carve(carver, c, n_batch, n_threads, this);
}

}  // namespace thermo
