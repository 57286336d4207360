#include "engine/draft_plan.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "model/drafter_network.h"
#include "model/model.h"
#include "speculative/dflash_drafter.h"
#include "speculative/lookup_drafter.h"
#include "speculative/mtp_drafter.h"
#include "speculative/oracle_drafter.h"

namespace thermo {
namespace {

using Kind = DraftOptions::Kind;

Kind resolve(const DraftOptions& o, const ModelConfig& config) {
  if (o.kind != Kind::Auto) return o.kind;
  if (o.file != nullptr) return Kind::File;
  return config.n_nextn > 0 ? Kind::Mtp : Kind::Lookup;
}

ModelOptions model_options(const DraftOptions& o, const ModelOptions& target, int block) {
  ModelOptions options = drafter_model_options({.n_ctx = target.sequence.n_ctx,
                                                .n_sequences = target.n_sequences,
                                                .k_type = o.k_type.value_or(KvType::F16),
                                                .v_type = o.v_type.value_or(KvType::F16),
                                                .isa = target.isa},
                                               block);
  options.device = target.device;
  options.graphs = target.graphs;
  return options;
}

void add_network(const ModelConfig& network, const DraftOptions& o, int block, int n_threads,
                 size_t max_panel_bytes, DraftPlan& plan) {
  const ModelOptions options = model_options(o, {}, block);
  for (const KvType type : {options.sequence.k_type, options.sequence.v_type})
    if (kv_in_blocks(type) && network.head_dim % 32 != 0)
      throw ConfigError(
          fmt::format("a {} cache needs a head size that is a multiple of 32, which the drafter does not "
                      "have; use f16",
                      kv_type_name(type)));
  const SequenceLayout layout = SequenceLayout::on_cpu(network, options.sequence);
  plan.block = block;
  plan.token_bytes = static_cast<uint64_t>(network.n_layer) * (layout.k_slot_bytes() + layout.v_slot_bytes());
  plan.fixed_bytes += Model::workspace_bytes(network, options, n_threads, max_panel_bytes);
  plan.untouched_bytes = Model::untouched_bytes(network, options);
}

// A panel of the target's head, where the drafter has none of its own. Its other matrices are repacked.
size_t borrowed_panel_bytes(const ModelConfig& drafter, const Weights& target) {
  const Matrix& head = target.output.front()[Role::Output];
  for (const TensorSpec& spec : drafter.network.output.front().tensors)
    if (spec.role == Role::Output && spec.of_target) return panel_bytes(head.dtype, head.n_cols);
  return 0;
}

// The network of a drafter that has one, and its weights.
struct DraftNetwork {
  ModelConfig config;
  Weights weights;
  int block;  // 0: it is not a block that is drafted
};
DraftNetwork bind_network(const DraftPlan& plan, const DraftOptions& o, const ModelConfig& target,
                          const Weights& weights, bool repack, ThreadPool& pool) {
  if (plan.kind == Kind::Mtp) {
    const ModelConfig config = nextn_network(target);
    return {config, Weights::of_nextn(config, weights), 0};
  }
  const DflashConfig config = read_dflash_config(*o.file, target);
  return {config.model, Weights::of_drafter(config.model, *o.file, weights, repack, pool), config.block};
}

}  // namespace

DraftPlan plan_draft(const DraftOptions& o, const ModelConfig& config, int n_threads,
                     const Weights* unpacked) {
  DraftPlan plan;
  plan.kind = resolve(o, config);
  if (plan.kind == Kind::None) return plan;
  plan.max_rows = 1 + (o.budget > 0 ? o.budget : kMaxDraftNodes);
  int depth = kMaxDraftNodes;  // tokens in a row that it can guess
  if (plan.kind == Kind::Lookup) plan.token_bytes = LookupDrafter::kTokenBytes;
  if (plan.kind == Kind::Mtp) {
    if (config.n_nextn == 0)
      throw ConfigError("this model has no next-token block to draft with; use a drafter or lookup");
    plan.states = {config.n_layer};
    const ModelConfig network = nextn_network(config);
    const size_t panel =
        unpacked ? Weights::of_nextn(network, *unpacked).max_unpacked_panel_bytes(network) : 0;
    add_network(network, o, 0, n_threads, panel, plan);
    depth = MtpDrafter::kMaxDepth;
  }
  if (plan.kind == Kind::File) {
    const DflashConfig drafter = read_dflash_config(*o.file, config);
    plan.states = drafter.states;
    plan.fixed_bytes = Weights::planned_packed_bytes(drafter.model, *o.file);
    const size_t panel = unpacked ? borrowed_panel_bytes(drafter.model, *unpacked) : 0;
    add_network(drafter.model, o, drafter.block, n_threads, panel, plan);
    depth = drafter.block - 1;
  }
  if (o.min_depth > depth)
    throw ConfigError(
        fmt::format("the drafter guesses at most {} tokens in a row, so none of its guesses would be "
                    "verified if they needed {}; ask for fewer",
                    depth, o.min_depth));
  return plan;
}

uint64_t draft_state_bytes(const DraftPlan& plan, const ModelConfig& config, int n_queued,
                           int max_draft_rows) {
  // The next-token block keeps the state of one row more.
  return static_cast<uint64_t>(n_queued + 1 + max_draft_rows) * plan.states.size() *
         static_cast<uint64_t>(config.n_embd) * sizeof(float);
}

uint64_t gpu_draft_bytes(const DraftPlan& plan, const DraftOptions& o, const ModelConfig& config,
                         const Weights& weights, const ModelOptions& model, const GpuChoice& gpu) {
  if (plan.kind != Kind::Mtp && plan.kind != Kind::File) return 0;
  ThreadPool nobody({.n_threads = 1, .pin = false});
  const DraftNetwork network = bind_network(plan, o, config, weights, false, nobody);
  return plan_gpu_drafter(network.config, network.weights, gpu, model_options(o, model, network.block),
                          config, weights) +
         static_cast<uint64_t>(model.n_sequences) *
             draft_state_bytes(plan, config, kGpuDrafterQueueRows, model.sequence.max_draft_rows);
}

namespace {

std::unique_ptr<Drafter> make_plain_drafter(const DraftPlan& plan, const DraftOptions& o,
                                            const Backend& target, const Weights& weights,
                                            const ModelOptions& model, ThreadPool& pool) {
  if (plan.kind == Kind::Lookup)
    return std::make_unique<LookupDrafter>(model.n_sequences, model.sequence.n_ctx);
  DraftNetwork network = bind_network(plan, o, target.config(), weights, !target.is_gpu(), pool);
  const ModelOptions options = model_options(o, model, network.block);
  std::unique_ptr<Backend> own;
  if (target.is_gpu())
    own = make_gpu_drafter(std::move(network.config), network.weights, options, &target, pool);
  else
    own = std::make_unique<Model>(std::move(network.config), std::move(network.weights), options, pool);
  if (plan.kind == Kind::Mtp)
    return std::make_unique<MtpDrafter>(target.config().n_layer, std::move(own), model.n_sequences);
  return std::make_unique<DflashDrafter>(read_dflash_config(*o.file, target.config()), std::move(own),
                                         model.n_sequences);
}

}  // namespace

std::unique_ptr<Drafter> make_drafter(const DraftPlan& plan, const DraftOptions& o, const Backend& target,
                                      const Weights& weights, const ModelOptions& model, ThreadPool& pool) {
  auto drafter = make_plain_drafter(plan, o, target, weights, model, pool);
  if (!o.oracle) return drafter;
  return std::make_unique<OracleDrafter>(std::move(drafter), *o.oracle, target.config().n_vocab,
                                         model.n_sequences);
}

}  // namespace thermo
