#include "engine/draft_plan.h"

#include "base/error.h"
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

DrafterOptions drafter_options(const DraftOptions& o) {
  return {.k_type = o.k_type.value_or(KvType::F16), .v_type = o.v_type.value_or(KvType::F16)};
}

void add_network(const ModelConfig& network, const DraftOptions& o, int block, int n_threads,
                 DraftPlan& plan) {
  const ModelOptions options = drafter_model_options(drafter_options(o), block);
  if ((options.sequence.k_type == KvType::Q8_0 || options.sequence.v_type == KvType::Q8_0) &&
      network.head_dim % 32 != 0)
    throw ConfigError("a q8_0 cache of the drafter needs heads of a multiple of 32; use f16");
  const SequenceLayout layout = SequenceLayout::on_cpu(network, options.sequence);
  plan.token_bytes = static_cast<uint64_t>(network.n_layer) * (layout.k_slot_bytes() + layout.v_slot_bytes());
  plan.fixed_bytes += Model::workspace_bytes(network, options, n_threads, 0);
}

}  // namespace

DraftPlan plan_draft(const DraftOptions& o, const ModelConfig& config, int n_threads) {
  DraftPlan plan;
  plan.kind = resolve(o, config);
  if (plan.kind == Kind::None) return plan;
  plan.max_rows = 1 + (o.budget > 0 ? o.budget : kMaxDraftNodes);
  if (plan.kind == Kind::Mtp) {
    if (config.n_nextn == 0)
      throw ConfigError("this model has no next-token block to draft with; give a drafter, or look up");
    plan.states = {config.n_layer};
    add_network(nextn_network(config), o, 0, n_threads, plan);
  }
  if (plan.kind == Kind::File) {
    const DflashConfig drafter = read_dflash_config(*o.file, config);
    plan.states = drafter.states;
    plan.fixed_bytes = Weights::planned_packed_bytes(drafter.model, *o.file);
    add_network(drafter.model, o, drafter.block, n_threads, plan);
  }
  return plan;
}

namespace {

std::unique_ptr<Drafter> make_plain_drafter(const DraftPlan& plan, const DraftOptions& o, const Model& target,
                                            const ModelOptions& model, ThreadPool& pool) {
  DrafterOptions options = drafter_options(o);
  options.n_ctx = model.sequence.n_ctx;
  options.n_sequences = model.n_sequences;
  options.isa = model.isa;
  if (plan.kind == Kind::Mtp)
    return std::make_unique<MtpDrafter>(target.config(), target.weights(), options, pool);
  if (plan.kind == Kind::File)
    return std::make_unique<DflashDrafter>(read_dflash_config(*o.file, target.config()), *o.file,
                                           target.weights(), options, pool);
  return std::make_unique<LookupDrafter>(model.n_sequences);
}

}  // namespace

std::unique_ptr<Drafter> make_drafter(const DraftPlan& plan, const DraftOptions& o, const Model& target,
                                      const ModelOptions& model, ThreadPool& pool) {
  auto drafter = make_plain_drafter(plan, o, target, model, pool);
  if (!o.oracle) return drafter;
  return std::make_unique<OracleDrafter>(std::move(drafter), *o.oracle, target.config().n_vocab,
                                         model.n_sequences);
}

}  // namespace thermo
