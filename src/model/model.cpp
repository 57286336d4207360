#include "model/model.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/error.h"
#include "kernels/linear/prefetch_choice.h"
#include "model/draft_uses.h"
#include "model/forward.h"
#include "model/sequence_state.h"

namespace thermo {

struct Model::Impl {
  ModelConfig config;
  Weights weights;
  ModelOptions options;
  ThreadPool& pool;
  CpuKernels kernels;
  Activations act;
  SequenceMemory memory;
  std::vector<SequenceState> sequences;
  Forward pass;
  std::unique_ptr<ExpertRunner> experts;
  std::optional<HeatMap> own_heat;  // where nobody else counts
  HeatMap* heat = nullptr;

  // The rows of the current step, reserved at load.
  std::vector<RowGroup> groups;
  std::vector<TokenId> tokens;
  std::vector<int32_t> positions;
  std::vector<int32_t> parents;     // relative to the group
  std::vector<uint64_t> ancestors;  // [rows][words_per_row]
  std::vector<int32_t> logit_rows;
  std::vector<RowLogits> row_logits;
  std::vector<int32_t> row_numbers;
  int words_per_row;
  int n_step_rows = 0;  // of the last step
  DraftUses draft_uses;

  Impl(ModelConfig c, Weights w, const ModelOptions& o, ThreadPool& p, std::unique_ptr<ExpertRunner> runner)
      : config(std::move(c)),
        weights(std::move(w)),
        options(o),
        pool(p),
        kernels(o.isa),
        act(config, o.n_batch, p.size(), weights.max_unpacked_panel_bytes(config)),
        memory(config, o.sequence, o.n_sequences, o.n_batch),
        pass(config, weights, act, kernels, p),
        experts(std::move(runner)),
        words_per_row((o.sequence.max_draft_rows + 63) / 64) {
    const size_t rows = static_cast<size_t>(o.n_batch);
    for (int s = 0; s < o.n_sequences; ++s) sequences.emplace_back(config, memory, o.sequence, s);
    groups.reserve(static_cast<size_t>(o.n_sequences));
    tokens.resize(rows);
    positions.resize(rows);
    parents.resize(rows);
    ancestors.resize(rows * static_cast<size_t>(words_per_row));
    logit_rows.reserve(rows);
    row_logits.reserve(rows);
    row_numbers.resize(rows);
    std::iota(row_numbers.begin(), row_numbers.end(), 0);
    if (experts)
      heat = &experts->heat();
    else if (config.route.n_expert > 0)
      heat = &own_heat.emplace(expert_catalog(config, weights));
    pass.attach(heat, experts.get());
    choose_prefetch(weights.packed_matrices(config), kernels.matmul, pool);
    if (heat)
      draft_uses.reserve(o.n_sequences, config.n_layer, o.sequence.max_draft_rows,
                         config.route.n_expert_used);
  }

  void lay_out_rows(const StepBatch& batch) noexcept;
  SequenceState& sequence(int index) noexcept { return sequences[static_cast<size_t>(index)]; }
  RowGroup lay_out_group(const SequenceRows& rows, int begin) noexcept;
  std::span<const float> logits_of(size_t i) const noexcept {
    const auto n_vocab = static_cast<size_t>(config.n_vocab);
    return {act.logits + i * n_vocab, n_vocab};
  }
};

// Tokens, positions and ancestors of every row.
void Model::Impl::lay_out_rows(const StepBatch& batch) noexcept {
  groups.clear();
  logit_rows.clear();
  int begin = 0;
  for (const SequenceRows& rows : batch.groups) {
    groups.push_back(lay_out_group(rows, begin));
    begin += static_cast<int>(rows.rows.size());
  }
}

RowGroup Model::Impl::lay_out_group(const SequenceRows& group, int begin) noexcept {
  SequenceState& state = sequence(group.sequence);
  const int n = static_cast<int>(group.rows.size());
  THERMO_CHECK(state.reserve(n) == n, "a step without room for its rows");
  const size_t words = group.uncommitted ? static_cast<size_t>(words_per_row) : 0;
  // Of the sequence's rows.
  int32_t* const position = positions.data() + begin;
  int32_t* const parent_of = parents.data() + begin;
  uint64_t* const bits = ancestors.data() + static_cast<size_t>(begin) * words;
  for (int r = 0; r < n; ++r) {
    const Row& row = group.rows[static_cast<size_t>(r)];
    tokens[static_cast<size_t>(begin + r)] = row.token;
    if (row.want_logits) logit_rows.push_back(begin + r);
    const int parent = parent_of[r] = row.parent;
    position[r] = parent < 0 ? state.n_past() : position[parent] + 1;
    if (words == 0) continue;
    uint64_t* const own = bits + static_cast<size_t>(r) * words;
    if (parent < 0)
      std::fill_n(own, words, 0);
    else
      std::copy_n(bits + static_cast<size_t>(parent) * words, words, own);
    own[static_cast<size_t>(r) / 64] |= uint64_t{1} << (r % 64);
  }
  const bool tree = group.uncommitted;
  if (tree && heat) draft_uses.begin(group.sequence, n);
  return {.sequence = &state,
          .row_begin = begin,
          .n_rows = n,
          .uncommitted = tree,
          .ancestors = tree ? AncestorBits{bits, words_per_row} : AncestorBits{},
          .parents = tree ? parent_of : nullptr,
          .experts = tree && heat ? draft_uses.of_layer(group.sequence, 0) : nullptr};
}

Model::Model(ModelConfig config, Weights weights, const ModelOptions& options, ThreadPool& pool,
             std::unique_ptr<ExpertRunner> experts)
    : impl_(
          std::make_unique<Impl>(std::move(config), std::move(weights), options, pool, std::move(experts))) {}
Model::~Model() = default;

uint64_t Model::workspace_bytes(const ModelConfig& config, const ModelOptions& options, int n_threads,
                                size_t max_panel_bytes) {
  return Activations::planned_bytes(config, options.n_batch, n_threads, max_panel_bytes);
}
uint64_t Model::untouched_bytes(const ModelConfig& config, const ModelOptions& options) {
  return Activations::untouched_bytes(config, options.n_batch);
}

const ModelConfig& Model::config() const {
  return impl_->config;
}
const Weights& Model::weights() const {
  return impl_->weights;
}
const SequenceLayout& Model::layout() const noexcept {
  return impl_->memory.layout;
}
KvPages& Model::pages() const noexcept {
  return impl_->memory.pages;
}
int Model::n_past(int sequence) const noexcept {
  return impl_->sequence(sequence).n_past();
}
void Model::clear(int sequence) noexcept {
  impl_->sequence(sequence).clear();
}
std::unique_ptr<Checkpoint> Model::checkpoint(int sequence, bool with_kv, std::unique_ptr<Checkpoint> reuse) {
  return impl_->sequence(sequence).checkpoint(with_kv, std::move(reuse));
}
bool Model::restore(int sequence, const Checkpoint& point) noexcept {
  return impl_->sequence(sequence).restore(point);
}
void Model::truncate(int sequence, int n) noexcept {
  THERMO_CHECK(n <= n_past(sequence) && can_truncate(sequence, n), "memory that cannot be cut there");
  impl_->sequence(sequence).truncate(n);
}
void Model::share(int from, int to, int n) noexcept {
  impl_->sequence(to).share(impl_->sequence(from), n);
}

namespace {

class OrdinaryMemory final : public HostMemory {
 public:
  explicit OrdinaryMemory(size_t n_bytes) : memory_(n_bytes) {
    data_ = memory_.data();
    size_ = memory_.size();
  }

 private:
  HostBuffer memory_;
};

}  // namespace

std::unique_ptr<HostMemory> Model::make_host_memory(size_t n_bytes) {
  try {
    return std::make_unique<OrdinaryMemory>(n_bytes);
  } catch (const MemoryError&) {
    return nullptr;
  }
}
std::unique_ptr<KvPin> Model::pin_kv(int sequence) {
  return impl_->sequence(sequence).pin_kv();
}
void Model::save_kv(const KvPin& pin, const KvRange& range, std::byte* block) noexcept {
  impl_->memory.save_kv(pin, range, block);
}
bool Model::load_kv(int sequence, const KvRange& range, const std::byte* block) noexcept {
  return impl_->sequence(sequence).load_kv(range, block);
}

std::span<const std::byte> Model::bytes_of(const Checkpoint& point) const noexcept {
  return SequenceState::bytes_of(point).first(checkpoint_bytes(point.n_past(), point.has_kv()));
}
std::unique_ptr<Checkpoint> Model::make_checkpoint(int n_past, std::span<const std::byte> bytes) {
  const size_t n_bytes = checkpoint_bytes(n_past, false);
  if (!bytes.empty() && bytes.size() != n_bytes) return nullptr;
  return SequenceState::make_checkpoint(n_past, n_bytes, bytes);
}

StepOutput Model::step(const StepBatch& batch) noexcept {
  Impl& m = *impl_;
  THERMO_CHECK(batch.n_rows() <= m.options.n_batch, "a step of more rows than its memory is for");
  batch.do_meanwhile();
  m.lay_out_rows(batch);
  const auto n = static_cast<size_t>(batch.n_rows());
  m.pass.begin(m.groups, std::span(m.tokens).first(n), std::span(m.positions).first(n), m.row_numbers,
               m.logit_rows, batch.states);
  if (m.experts) m.experts->begin_step(static_cast<int>(n));
  m.pass.run();
  m.n_step_rows = batch.n_rows();
  if (batch.hidden != nullptr)
    std::copy_n(m.act.taps,
                static_cast<size_t>(m.config.network.n_taps) * n * static_cast<size_t>(m.config.n_embd),
                batch.hidden);
  int n_committed = 0;
  for (const RowGroup& group : m.groups)
    if (!group.uncommitted) {
      group.sequence->advance(group.n_rows);
      n_committed += group.n_rows;
    }
  if (m.heat && n_committed > 0) m.heat->advance(n_committed);
  if (m.experts) m.experts->end_step();
  m.row_logits.clear();
  for (size_t i = 0; i < m.logit_rows.size(); ++i)
    m.row_logits.push_back({.row = m.logit_rows[i], .logits = m.logits_of(i)});
  return {m.row_logits};
}

std::span<const float> Model::fetch_logits(int i) noexcept {
  return impl_->logits_of(static_cast<size_t>(i));
}

StateRows Model::states() const noexcept {
  const Impl& m = *impl_;
  return {.data = m.act.taps,
          .n_taps = m.config.network.n_taps,
          .n_embd = m.config.n_embd,
          .tap_stride = static_cast<int64_t>(m.n_step_rows) * m.config.n_embd,
          .row_stride = m.config.n_embd,
          .n = m.n_step_rows};
}

std::unique_ptr<StateBuffer> Model::make_states(int n_rows, int n_taps) {
  return std::make_unique<HostStates>(n_rows, n_taps, impl_->config.n_embd);
}

void Model::append_features(int sequence, const StateRows& features) noexcept {
  Impl& m = *impl_;
  SequenceState& state = m.sequence(sequence);
  const int n = features.n;
  const auto rows = static_cast<size_t>(n);
  THERMO_CHECK(n <= m.options.n_batch, "features of more rows than their memory is for");
  THERMO_CHECK(state.reserve(n) == n, "features without room for their rows");
  for (size_t r = 0; r < rows; ++r) m.positions[r] = state.n_past() + static_cast<int>(r);
  const RowGroup group{.sequence = &state,
                       .row_begin = 0,
                       .n_rows = n,
                       .uncommitted = false,
                       .ancestors = {},
                       .parents = nullptr,
                       .experts = nullptr};
  m.pass.begin({&group, 1}, std::span(m.tokens).first(rows), std::span(m.positions).first(rows),
               m.row_numbers, {});
  m.pass.run_features(features);
  state.advance(n);
}

void Model::commit(int sequence, std::span<const int32_t> path) noexcept {
  impl_->sequence(sequence).commit_path(path, impl_->kernels.delta_net, impl_->pool);
  if (impl_->heat) impl_->draft_uses.count(sequence, path, *impl_->heat);
}

HeatMap* Model::heat() noexcept {
  return impl_->heat;
}
const HeatMap* Model::heat() const noexcept {
  return impl_->heat;
}
void Model::set_heat(const HeatMap& heat) {
  *impl_->heat = heat;
}
bool Model::reset_experts() {
  return impl_->experts != nullptr && impl_->experts->reset();
}
ExpertTelemetry Model::expert_telemetry() const noexcept {
  ExpertTelemetry telemetry = impl_->experts ? impl_->experts->telemetry() : ExpertTelemetry{};
  telemetry.routed_layers = impl_->pass.n_routed_layers();
  telemetry.distinct_experts = impl_->pass.n_distinct_experts();
  return telemetry;
}
void Model::expert_places(std::span<ExpertPlace> out) const noexcept {
  if (impl_->experts)
    impl_->experts->places(out);
  else
    std::fill(out.begin(), out.end(), ExpertPlace{.tier = ExpertTier::Host});
}
std::span<const LayerUses> Model::layer_uses() const noexcept {
  return impl_->experts ? impl_->experts->layer_uses() : std::span<const LayerUses>();
}
std::string_view Model::fault() const noexcept {
  return impl_->experts ? impl_->experts->fault() : std::string_view{};
}

}  // namespace thermo
