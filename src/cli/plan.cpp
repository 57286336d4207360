// `thermocline plan`: what the engine would take on this machine. Reads the header of the file, loads
// nothing.
#include <fmt/format.h>

#include "base/cpu_info.h"
#include "base/json.h"
#include "base/units.h"
#include "chat/model_source.h"
#include "cli/commands.h"
#include "cli/expected_speed.h"
#include "cli/json_text.h"
#include "cli/options/cache_options.h"
#include "cli/options/draft_options.h"
#include "cli/options/model_options.h"
#include "cli/options/parallel_option.h"
#include "cli/plan_json.h"
#include "engine/memory_plan.h"
#include "model/model_config.h"

namespace thermo {
namespace {

class PlanCommand : public Command {
 public:
  CommandText text() const override {
    return {"plan", "plan [MODEL] [options]", "the memory a model would take on this machine; loads nothing",
            "Also prints the speed to expect, from what the kernels reach on this machine. That is measured "
            "once, which takes a few seconds, and kept in the cache folder.\nExits with 4 if the model does "
            "not fit.",
            "thermocline plan model.gguf -c 32K\nthermocline plan model.gguf -ctk q8_0 -ctv q8_0 --json\n"
            "thermocline plan model.gguf --draft drafter.gguf"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    add_engine_options(set, flags_);
    add_draft_options(set, draft_);
    set.section("Server");
    add_parallel_option(set, parallel_);
    add_cache_ram_option(set, cache_ram_);
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
    set.flag("--measure", measure_,
             "measure this machine again for the expected speed; the best result counts")
        .no_environment();
  }

  ExitCode run(const Terminal& terminal) override {
    EngineOptions options = engine_options(flags_);
    GgufFile file = open_model(model_);
    ModelConfig config = read_model_config(file);
    override_rope(options.rope, config);
    set_expert_options(flags_.experts, config, options);
    std::optional<GgufFile> drafter;
    set_draft_options(draft_, model_, config, drafter, options);
    MemoryPlan plan;
    try {
      options.n_sequences = n_parallel(parallel_, file, options);
      options.cache_bytes = cache_ram_bytes(cache_ram_, file, options);
      plan = Engine::plan_for(file, options);
    } catch (const MemoryError& error) {
      if (json_) write_stdout(no_plan_json(file, config, error.what()));
      throw;
    }
    note_unusual(config, options, terminal);
    terminal.note_unless_empty(plan.note);
    const std::optional<SpeedEstimate> speed =
        expected_speed(file, config, options, plan, measure_ ? Measuring::Again : Measuring::Missing);
    write_stdout(json_ ? as_json(file, config, plan, options.n_sequences, speed)
                       : as_table(file, config, plan, speed, terminal));
    return ExitCode::Ok;
  }

 private:
  std::string context_reason(const ModelConfig& config, const MemoryPlan& plan) const {
    if (flags_.n_ctx > 0 || flags_.whole_context) return fmt::format("ctx {}: asked", plan.n_ctx);
    if (plan.n_ctx == config.n_ctx_train) return fmt::format("ctx {}: auto, the training length", plan.n_ctx);
    return fmt::format("ctx {}: auto, the training length is {}", plan.n_ctx, config.n_ctx_train);
  }

  std::string as_table(const GgufFile& file, const ModelConfig& config, const MemoryPlan& plan,
                       const std::optional<SpeedEstimate>& speed, const Terminal& terminal) const {
    std::string out =
        fmt::format("plan   {} ({}, {} layer{}), {}\n\n", file.path(), config.arch_name, config.n_layer,
                    config.n_layer == 1 ? "" : "s", context_reason(config, plan));
    const auto tier = [&](const std::vector<MemoryPlanItem>& items, uint64_t total, uint64_t available) {
      for (const MemoryPlanItem& item : items)
        out += fmt::format("  {:<18}{:>12}   {}\n", item.name, format_bytes(item.bytes), item.detail);
      out += terminal.on_stdout(Style::Bold, fmt::format("  {:<18}{:>12}", "total", format_bytes(total))) +
             fmt::format("   of {} available\n", format_bytes(available));
    };
    if (!plan.device_items.empty()) {
      out += fmt::format("  on {}\n", plan.device_name);
      tier(plan.device_items, plan.device_total_bytes, plan.device_available_bytes);
      out += "\n  in main memory\n";
    }
    tier(plan.items, plan.total_bytes, plan.available_bytes);
    if (plan.mapped_bytes > 0)
      out += fmt::format("  {:<18}{:>12}   read through the file mapping, not counted\n", "mapped",
                         format_bytes(plan.mapped_bytes));
    if (speed) out += fmt::format("\n  expected speed: {}\n", describe(*speed));
    return out;
  }

  // For a program that asks whether it fits, that it does not is an answer; the exit code says so, too.
  static std::string no_plan_json(const GgufFile& file, const ModelConfig& config,
                                  const std::string& reason) {
    const Json out = {{"model", file.path()},
                      {"architecture", config.arch_name},
                      {"context_train", config.n_ctx_train},
                      {"fits", false},
                      {"reason", reason}};
    return json_text(out);
  }

  std::string as_json(const GgufFile& file, const ModelConfig& config, const MemoryPlan& plan,
                      int n_sequences, const std::optional<SpeedEstimate>& speed) const {
    Json out;
    out["model"] = file.path();
    out["architecture"] = config.arch_name;
    out["context"] = plan.n_ctx;
    out["context_train"] = config.n_ctx_train;
    out["parallel"] = n_sequences;
    out["fits"] = plan.fits();
    out["tiers"] = memory_tiers_json(plan);
    out["expected_speed"] = speed_json(speed);
    out["decisions"] =
        Json::array({context_reason(config, plan),
                     kv_decision(kv_type_from_name(flags_.k_type).value_or(KvType::F16),
                                 kv_type_from_name(flags_.v_type).value_or(KvType::F16), flags_),
                     flags_.repack ? "weights repacked: default" : "weights mapped: asked"});
    return json_text(out);
  }

  std::string model_;
  EngineFlags flags_;
  DraftFlags draft_;
  std::string cache_ram_ = "off", parallel_ = "1";
  bool json_ = false, measure_ = false;
};

}  // namespace

std::unique_ptr<Command> make_plan_command() {
  return std::make_unique<PlanCommand>();
}

}  // namespace thermo
