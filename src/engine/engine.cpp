// The step, commits and sessions. Loading is in engine_load.cpp, the plan in engine_plan.cpp.
#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "base/sha256.h"
#include "engine/disk_cache.h"
#include "engine/engine_impl.h"
#include "engine/engine_plan.h"
#include "engine/session.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"
#include "model/model_fingerprint.h"

namespace thermo {
namespace {

Error invalid(std::string message) {
  return {ErrorCode::InvalidArgument, std::move(message)};
}

}  // namespace

MemoryPlan Engine::plan_for(const GgufFile& file, const EngineOptions& options) {
  check_options(options);
  return plan_engine(describe_model(file, options), file, options, /*imagine=*/true).memory;
}

Engine::~Engine() {
  if (impl_) impl_->write_heat();
}

const ModelConfig& Engine::config() const {
  return impl_->backend->config();
}
const EngineInfo& Engine::info() const {
  return impl_->info;
}
const MemoryPlan& Engine::plan() const {
  return impl_->plan;
}
int Engine::n_ctx() const {
  return impl_->plan.n_ctx;
}
int Engine::n_batch() const {
  return impl_->n_batch;
}
bool Engine::reset_experts() {
  const bool done = !config().has_parts() && impl_->backend->reset_experts();  // parts have no heat
  if (!done && impl_->first_heat) impl_->backend->set_heat(*impl_->first_heat);
  return done;
}

ExpertTelemetry Engine::expert_telemetry() const {
  return impl_->backend->expert_telemetry() - impl_->warm_up_telemetry;
}
std::vector<ExpertPlace> Engine::expert_places() const {
  const HeatMap* const counted = heat();
  std::vector<ExpertPlace> places(counted == nullptr ? 0 : counted->uses().size());
  if (counted != nullptr) impl_->backend->expert_places(places);
  return places;
}
std::vector<LayerUses> Engine::layer_uses() const {
  const std::span<const LayerUses> now = impl_->backend->layer_uses();
  std::vector<LayerUses> uses(now.begin(), now.end());
  for (size_t i = 0; i < impl_->warm_up_uses.size(); ++i) {
    uses[i].hot -= impl_->warm_up_uses[i].hot;
    uses[i].all -= impl_->warm_up_uses[i].all;
  }
  return uses;
}
const HeatMap* Engine::heat() const {
  return impl_->backend->heat();
}
KvPoolState Engine::kv_pool() const {
  return impl_->backend->kv_pool();
}
void Engine::save_heat(const std::string& name) {
  const Impl& e = *impl_;
  if (name.empty()) return impl_->write_heat();
  if (e.heat_path.empty() || heat() == nullptr) return log_warning("engine", "heat has no file here");
  if (const Status status = thermo::save_heat(e.heat_path_of(name), e.heat_info, *heat()); !status)
    log_warning("engine", "{}", status.error().message);
}
void Engine::load_heat(const std::string& name) {
  Impl& e = *impl_;
  if (e.heat_path.empty() || !e.first_heat) return log_warning("engine", "there is no heat file to read");
  HeatMap heat = *e.first_heat;
  if (const Status status = thermo::load_heat(e.heat_path_of(name), e.heat_info, heat); !status)
    return log_warning("engine", "{}", status.error().message);
  e.backend->set_heat(heat);
  e.heat_base.ours = heat;
  if (name.empty()) e.heat_base.file = heat;
}
DraftTelemetry Engine::draft_telemetry() const {
  return impl_->speculation ? impl_->speculation->telemetry() : DraftTelemetry{};
}

void Engine::set_drafting(bool on) {
  Impl& e = *impl_;
  if (on && e.paused) e.speculation = std::move(e.paused);
  if (!on && e.speculation) e.paused = std::move(e.speculation);
}

Status Engine::Impl::check(const StepBatch& batch) const {
  const int n_rows = batch.n_rows();
  if (n_rows == 0) return invalid("a step without rows");
  if (n_rows > n_batch)
    return Error{ErrorCode::InvalidArgument,
                 fmt::format("a step of {} rows, at most {} fit", n_rows, n_batch), Remedy::LargerBatch};
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    const SequenceRows& group = batch.groups[g];
    for (const SequenceRows& other : batch.groups.first(g))
      if (other.sequence == group.sequence)
        return invalid(fmt::format("sequence {} is in the step twice", group.sequence));
    if (Status status = check_group(group); !status) return status;
  }
  return {};
}

Status Engine::Impl::check_group(const SequenceRows& group) const {
  if (group.sequence < 0 || group.sequence >= n_sequences)
    return invalid(fmt::format("sequence {} is outside 0..{}", group.sequence, n_sequences - 1));
  if (!uncommitted[static_cast<size_t>(group.sequence)].empty())
    return invalid(fmt::format("sequence {} has uncommitted rows", group.sequence));
  const int n_past = backend->n_past(group.sequence), n = static_cast<int>(group.rows.size());
  if (n == 0) return invalid(fmt::format("sequence {} is in the step without rows", group.sequence));
  if (group.uncommitted && n > max_draft_rows)
    return invalid(fmt::format("{} uncommitted rows, at most {} were planned", n, max_draft_rows));
  if (n_past + n > plan.n_ctx)
    return Error{ErrorCode::ContextFull,
                 fmt::format("{} tokens and {} more do not fit into a context of {}; use a larger one",
                             n_past, n, plan.n_ctx),
                 Remedy::LargerContext};
  for (int r = 0; r < n; ++r) {
    const Row& row = group.rows[static_cast<size_t>(r)];
    if (row.token < 0 || row.token >= backend->config().n_vocab)
      return invalid(
          fmt::format("token {} is outside the vocabulary of {}", row.token, backend->config().n_vocab));
    if (!group.uncommitted && row.parent != r - 1)
      return invalid(fmt::format("row {} has parent {}, expected {}: only uncommitted rows may branch", r,
                                 row.parent, r - 1));
    if (row.parent < -1 || row.parent >= r)
      return invalid(fmt::format("row {} has parent {}, expected -1 or an earlier row", r, row.parent));
  }
  return {};
}

Result<StepOutput> Engine::step(const StepBatch& batch) {
  Impl& e = *impl_;
  if (Status status = e.check(batch); !status) return status.error();
  for (const SequenceRows& group : batch.groups) {
    const int n = static_cast<int>(group.rows.size());
    if (e.backend->reserve(group.sequence, n) < n) return no_pages(*e.backend);
  }
  e.save_unread_logits(batch);
  for (const SequenceRows& group : batch.groups)
    if (group.uncommitted)
      for (const Row& row : group.rows)
        e.uncommitted[static_cast<size_t>(group.sequence)].push_back(row.parent);
  if (e.speculation) e.speculation->before_step();
  if (e.watch) e.watch->begin();
  const ExpertTelemetry experts = e.speculation ? e.backend->expert_telemetry() : ExpertTelemetry{};
  const auto start = std::chrono::steady_clock::now();
  const StepOutput output = e.backend->step(batch);
  if (e.watch) e.trace->add(e.watch->end(batch.n_rows()));
  if (!e.backend->fault().empty()) return device_fault(*e.backend);
  if (const std::string fault = e.model_file->fault(); !fault.empty())
    return Error{ErrorCode::DeviceFault, fault};
  if (e.speculation)
    e.speculation->took_step(batch,
                             std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
                             e.backend->expert_telemetry() - experts);
  return output;
}

std::span<const float> Engine::fetch_logits(int i) {
  return impl_->backend->fetch_logits(i);
}

// A step of a session's own timeline replaces its logits; any other one would only overwrite them.
void Engine::Impl::save_unread_logits(const StepBatch& batch) {
  while (!unread.empty()) {
    Session::Impl& session = *unread.back();
    const bool replaced = std::any_of(batch.groups.begin(), batch.groups.end(), [&](const auto& group) {
      return group.sequence == session.sequence && !group.uncommitted;
    });
    if (replaced)
      session.drop_logits();
    else
      session.fetch_logits();
  }
}

Error no_pages(const Backend& backend) {
  const KvPoolState pool = backend.kv_pool();
  return {ErrorCode::Busy, fmt::format("the KV cache is full: other sequences use the {} tokens it holds",
                                       static_cast<int64_t>(pool.n_pages) * pool.page_tokens)};
}

Error device_fault(const Backend& backend) {
  return {ErrorCode::DeviceFault,
          fmt::format("{}{}; start again", backend.is_gpu() ? "the GPU failed: " : "", backend.fault())};
}

Status Engine::commit(int sequence, std::span<const int32_t> path) {
  Impl& e = *impl_;
  if (sequence < 0 || sequence >= e.n_sequences)
    return invalid(fmt::format("sequence {} is outside 0..{}", sequence, e.n_sequences - 1));
  std::vector<int32_t>& parents = e.uncommitted[static_cast<size_t>(sequence)];
  if (parents.empty()) return invalid(fmt::format("sequence {} has no uncommitted rows", sequence));
  int32_t parent = -1;
  for (const int32_t row : path) {
    if (row < 0 || row >= static_cast<int32_t>(parents.size()))
      return invalid(fmt::format("row {} is outside the {} uncommitted rows", row, parents.size()));
    if (parents[static_cast<size_t>(row)] != parent)
      return invalid(fmt::format("row {} does not follow row {}", row, parent));
    parent = row;
  }
  const auto start = std::chrono::steady_clock::now();
  e.backend->commit(sequence, path);
  if (e.speculation)
    e.speculation->committed(sequence, path,
                             std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  parents.clear();
  return {};
}

std::unique_ptr<PrefixCache> Engine::make_prefix_cache(uint64_t limit_bytes) {
  Backend* const backend = impl_->backend.get();
  const size_t snapshot_bytes = impl_->speculation ? impl_->speculation->drafter().snapshot_bytes() : 0;
  return std::make_unique<PrefixCache>(PrefixCacheOptions{
      .limit_bytes = limit_bytes,
      .block_bytes =
          backend->block_bytes() + (impl_->speculation ? impl_->speculation->block_bytes() : size_t{0}),
      .needs_points = !backend->can_cut(),
      .point_bytes = [backend,
                      snapshot_bytes](int n) { return backend->checkpoint_bytes(n, false) + snapshot_bytes; },
      .make_memory = [backend](size_t n_bytes) { return backend->make_host_memory(n_bytes); },
      .make_spare_point = [backend](int n) { return backend->make_checkpoint(n, {}); },
      .finish_copies = [backend] { backend->finish_copies(); },
      .bytes_of = [backend](const Checkpoint& point) { return backend->bytes_of(point); },
      .make_point = [backend](int n, auto bytes) { return backend->make_checkpoint(n, bytes); }});
}

std::unique_ptr<DiskCache> Engine::make_disk_cache(const std::string& folder, uint64_t limit_bytes) {
  const Impl& e = *impl_;
  const Backend& backend = *e.backend;
  Sha256 id;
  const auto add = [&id](std::string_view text) { id.update(std::as_bytes(std::span(text))); };
  add(model_fingerprint(*e.model_file, backend.config(), e.info.k_type, e.info.v_type));
  add(fmt::format("{} {} {} {}\n", e.info.device, backend.block_bytes(), backend.checkpoint_bytes(1, false),
                  e.speculation ? e.speculation->telemetry().drafter : ""));
  if (e.speculation && e.speculation->block_bytes() > 0) {
    add(fmt::format("{} {}\n", static_cast<int>(e.draft.k_type.value_or(KvType::F16)),
                    static_cast<int>(e.draft.v_type.value_or(KvType::F16))));
    if (e.draft.file != nullptr) add(file_fingerprint(*e.draft.file));
  }
  return std::make_unique<DiskCache>(DiskCacheOptions{
      .folder = folder,
      .model = id.finish(),
      .limit_bytes = limit_bytes,
      .block_bytes = backend.block_bytes() + (e.speculation ? e.speculation->block_bytes() : size_t{0}),
      .needs_points = !backend.can_cut()});
}

Result<Session> Engine::open_session() {
  Impl& e = *impl_;
  for (int s = 0; s < e.n_sequences; ++s) {
    if (e.taken[static_cast<size_t>(s)]) continue;
    e.taken[static_cast<size_t>(s)] = true;
    e.uncommitted[static_cast<size_t>(s)].clear();
    e.backend->clear(s);
    if (e.speculation) e.speculation->truncate(s, 0);
    auto session = std::make_unique<Session::Impl>();
    session->engine = this;
    session->backend = e.backend.get();
    session->speculation = e.speculation.get();
    session->sequence = s;
    session->max_checkpoints = static_cast<size_t>(e.plan.n_checkpoints);
    session->unread = &e.unread;
    session->uncommitted = &e.uncommitted[static_cast<size_t>(s)];
    session->release = [this, s] {
      impl_->backend->clear(s);  // its pages are for others
      impl_->taken[static_cast<size_t>(s)] = false;
    };
    return Session(std::move(session));
  }
  return Error{ErrorCode::Unsupported, fmt::format("all {} sequences are in use", e.n_sequences),
               Remedy::MoreSequences};
}

}  // namespace thermo
