// `thermocline inspect`: what is in a GGUF file, and the memory plan for it on this machine.
//
// Works for any GGUF file: drafters and reference files have no plan, but their metadata and tensors show.
#include <fmt/format.h>

#include <algorithm>

#include "base/cpu_info.h"
#include "base/json.h"
#include "base/units.h"
#include "base/utf8.h"
#include "chat/model_source.h"
#include "cli/commands.h"
#include "cli/expected_speed.h"
#include "cli/inspect_facts.h"
#include "cli/json_text.h"
#include "cli/options/model_options.h"
#include "cli/progress.h"
#include "gguf/gguf_file.h"
#include "model/check_tensors.h"

namespace thermo {
namespace {

constexpr size_t kMaxTensorsUnasked = 200;  // shown for a file that is no model we run

std::string describe_types(const KindFacts& kind) {
  std::vector<std::pair<uint64_t, DType>> types;
  for (const auto& [dtype, bytes] : kind.bytes_by_type) types.emplace_back(bytes, dtype);
  std::sort(types.rbegin(), types.rend());
  std::string out;
  for (const auto& [bytes, dtype] : types) {
    if (!out.empty()) out += ", ";
    out += dtype_name(dtype);
    const double share = 100.0 * static_cast<double>(bytes) / static_cast<double>(kind.n_bytes);
    if (types.size() > 1) out += share < 1.0 ? " <1 %" : fmt::format(" {:.0f} %", share);
  }
  return out;
}

Json json_value(const GgufFile& file, const GgufEntry& entry) {
  const GgufValue& value = entry.value;
  if (value.is_array()) {
    Json out;
    out["type"] = describe_type(value);
    out["value"] = describe_value(value);
    return out;
  }
  switch (value.type) {
    case GgufType::String:
      return Json(escape_text(*file.find_string(entry.key), 1000));
    case GgufType::Bool:
      return Json(*file.find_bool(entry.key));
    case GgufType::F32:
    case GgufType::F64:
      return Json(*file.find_float(entry.key));
    case GgufType::U64:
      return Json(*file.find_uint(entry.key));
    default:
      return Json(*file.find_int(entry.key));
  }
}

class InspectCommand : public Command {
 public:
  CommandText text() const override {
    return {"inspect", "inspect [MODEL] [options]", "show what is in a model file and the memory plan for it",
            "Reads the header only. Without a model it shows the embedded one.",
            "thermocline inspect model.gguf\nthermocline inspect model.gguf --tensors | grep attn_v\n"
            "thermocline inspect model.gguf --template > template.jinja\n"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
    set.flag("--tensors", tensors_, "list every tensor");
    set.flag("--metadata", metadata_, "list every metadata key");
    set.flag("--template", template_, "print the chat template and nothing else");
    add_engine_options(set, flags_);
  }

  ExitCode run(const Terminal& terminal) override {
    const GgufFile file = open_model(model_);
    EngineOptions options = engine_options(flags_);
    if (flags_.experts.n_cpu_moe >= 0) set_expert_options(flags_.experts, read_model_config(file), options);
    if (options.check_tensors) {
      ProgressLine progress(terminal);
      ThreadPool pool({.n_threads = options.n_threads, .pin = options.pin_threads});
      check_tensors(file, pool, progress.callback());
      progress.clear();
    }
    const ModelFacts facts = gather_facts(file, options);
    if (facts.plan && facts.plan->fits() && !template_)
      speed_ = expected_speed(file, *facts.config, options, *facts.plan, Measuring::Missing);
    if (template_) {
      if (!facts.chat_template)
        throw LoadError(fmt::format("{}: the file has no chat template", file.path()));
      write_stdout(terminal.stdout_is_terminal ? printable(*facts.chat_template) : *facts.chat_template);
      return ExitCode::Ok;
    }
    write_stdout(json_ ? json_text(json(file, facts)) : report(terminal, file, facts));
    return ExitCode::Ok;
  }

 private:
  std::string report(const Terminal& terminal, const GgufFile& file, const ModelFacts& facts) const {
    std::string out;
    const auto title = [&](std::string_view text) {
      out += fmt::format("\n{}\n", terminal.on_stdout(Style::Bold, text));
    };
    const auto line = [&](std::string_view name, std::string_view value) {
      if (!value.empty()) out += fmt::format("  {:<18} {}\n", name, value);
    };

    out += terminal.on_stdout(Style::Bold, printable(file.path())) + "\n";
    line("name", facts.name);
    line("description", facts.description);
    line("architecture", facts.architecture + (facts.config ? "" : " (not a model that this program runs)"));
    if (facts.config)
      line("model", fmt::format("{} {}", facts.config->describe(facts.n_params), facts.file_type));
    line("parameters", format_params(facts.n_params));
    line("file", fmt::format("{}, GGUF v{}{}", format_bytes(facts.file_bytes), file.version(),
                             facts.n_parts > 1 ? fmt::format(", {} parts", facts.n_parts) : ""));
    line("tensors", fmt::format("{}, {}", file.tensors().size(), format_bytes(facts.tensor_bytes)));

    if (facts.config) {
      title("Hyper-parameters");
      for (const auto& [name, value] : describe_config(*facts.config)) line(name, value);
      title("Network");
      for (const LayerLine& layers : describe_layers(facts.config->network)) {
        line(fmt::format("{} layer{}", layers.n_layers, layers.n_layers == 1 ? "" : "s"), layers.text);
        line("", layers.layers);
      }
      title("Weights");
      out += fmt::format("  {:<18} {:>8} {:>10} {:>11} {:>7}  {}\n", "", "tensors", "parameters", "size",
                         "share", "types");
      for (const KindFacts& kind : facts.kinds)
        out +=
            fmt::format("  {:<18} {:>8} {:>10} {:>11} {:>5.1f} %  {}\n", tensor_kind_name(kind.kind),
                        kind.n_tensors, format_params(kind.n_params), format_bytes(kind.n_bytes),
                        100.0 * static_cast<double>(kind.n_bytes) / static_cast<double>(facts.tensor_bytes),
                        describe_types(kind));
    }
    if (facts.tokenizer) {
      const TokenizerFacts& t = *facts.tokenizer;
      title("Tokenizer");
      line("kind", t.pre.empty() ? t.model : fmt::format("{} ({})", t.model, t.pre));
      if (t.n_tokens > 0) line("tokens", fmt::format("{}, {} merges", t.n_tokens, t.n_merges));
      for (const SpecialToken& s : t.special) line(s.role, fmt::format("{} {}", s.id, s.text));
      if (t.add_bos) line("adds bos", *t.add_bos ? "yes" : "no");
      line("chat template", facts.chat_template
                                ? fmt::format("{} bytes (--template prints it)", facts.chat_template->size())
                                : "none");
    }
    if (metadata_ || !facts.config) {
      title("Metadata");
      size_t width = 0;
      for (const GgufEntry& entry : file.metadata()) width = std::max(width, entry.key.size());
      for (const GgufEntry& entry : file.metadata())
        out += fmt::format("  {:<{}}  {:<8} {}\n", escape_text(entry.key), std::min<size_t>(width, 60),
                           entry.value.is_array() ? "array" : gguf_type_name(entry.value.type),
                           describe_value(entry.value));
    }
    if (tensors_ || (!facts.config && file.tensors().size() <= kMaxTensorsUnasked)) {
      title("Tensors");
      for (const GgufTensor& tensor : file.tensors())
        out += fmt::format("  {:<40} {:<7} {:<24} {:>11}  {}\n", escape_text(tensor.name),
                           dtype_name(tensor.dtype), describe_shape(tensor), format_bytes(tensor.n_bytes),
                           facts.config ? tensor_kind_name(facts.kind_of(tensor.name)) : "");
    }
    if (facts.plan && !facts.plan->device_items.empty()) {
      title(fmt::format("Memory plan on {}", facts.plan->device_name));
      for (const MemoryPlanItem& item : facts.plan->device_items)
        line(item.name, fmt::format("{:>11}  {}", format_bytes(item.bytes), item.detail));
      line("in all", fmt::format("{:>11}  of {} available", format_bytes(facts.plan->device_total_bytes),
                                 format_bytes(facts.plan->device_available_bytes)));
    }
    if (facts.plan) {
      title("Memory plan on this machine");
      for (const MemoryPlanItem& item : facts.plan->items)
        line(item.name, fmt::format("{:>11}  {}", format_bytes(item.bytes), item.detail));
      line("in all", fmt::format("{:>11}  of {} available", format_bytes(facts.plan->total_bytes),
                                 format_bytes(facts.plan->available_bytes)));
      if (facts.plan->mapped_bytes > 0)
        line("file mapping", fmt::format("{:>11}  read as needed", format_bytes(facts.plan->mapped_bytes)));
      if (speed_) line("expected speed", describe(*speed_));
    }
    if (!facts.warnings.empty()) {
      title("Warnings");
      for (const std::string& warning : facts.warnings)
        out += fmt::format("  {}\n", terminal.on_stdout(Style::Yellow, printable(warning)));
    }
    return out;
  }

  Json json(const GgufFile& file, const ModelFacts& facts) const {
    Json out;
    out["path"] = file.path();
    out["architecture"] = facts.architecture;
    out["name"] = facts.name;
    out["description"] = facts.description;
    out["runnable"] = facts.config.has_value();
    if (facts.config) out["model_type"] = facts.config->describe(facts.n_params);
    out["file_type"] = facts.file_type;
    out["gguf_version"] = file.version();
    out["n_parts"] = facts.n_parts;
    out["file_bytes"] = facts.file_bytes;
    out["tensor_bytes"] = facts.tensor_bytes;
    out["n_tensors"] = file.tensors().size();
    out["n_params"] = facts.n_params;
    out["kinds"] = Json::array();
    for (const KindFacts& kind : facts.kinds) {
      Json entry;
      entry["kind"] = tensor_kind_name(kind.kind);
      entry["n_tensors"] = kind.n_tensors;
      entry["n_params"] = kind.n_params;
      entry["bytes"] = kind.n_bytes;
      for (const auto& [dtype, bytes] : kind.bytes_by_type) entry["bytes_by_type"][dtype_name(dtype)] = bytes;
      out["kinds"].push_back(std::move(entry));
    }
    if (facts.config) out["config"] = json_config(*facts.config);
    if (facts.tokenizer) out["tokenizer"] = json_tokenizer(*facts.tokenizer);
    out["has_chat_template"] = facts.chat_template.has_value();
    out["metadata"] = Json::object();
    for (const GgufEntry& entry : file.metadata())
      out["metadata"][escape_text(entry.key)] = json_value(file, entry);
    if (tensors_ || !facts.config) {
      out["tensors"] = Json::array();
      for (const GgufTensor& tensor : file.tensors()) {
        Json entry;
        entry["name"] = escape_text(tensor.name);
        entry["type"] = dtype_name(tensor.dtype);
        entry["shape"] = std::vector<uint64_t>(tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims);
        entry["bytes"] = tensor.n_bytes;
        entry["part"] = tensor.part;
        entry["offset"] = tensor.file_offset;
        out["tensors"].push_back(std::move(entry));
      }
    }
    if (facts.plan) {
      Json& plan = out["plan"];
      plan["n_ctx"] = facts.plan->n_ctx;
      plan["expected_speed"] = speed_json(speed_);
      plan["items"] = Json::array();
      for (const MemoryPlanItem& item : facts.plan->items)
        plan["items"].push_back({{"name", item.name}, {"bytes", item.bytes}, {"detail", item.detail}});
      plan["total_bytes"] = facts.plan->total_bytes;
      plan["mapped_bytes"] = facts.plan->mapped_bytes;
      plan["available_bytes"] = facts.plan->available_bytes;
      if (!facts.plan->device_items.empty()) {
        plan["device"] = facts.plan->device_name;
        plan["device_items"] = Json::array();
        for (const MemoryPlanItem& item : facts.plan->device_items)
          plan["device_items"].push_back(
              {{"name", item.name}, {"bytes", item.bytes}, {"detail", item.detail}});
        plan["device_total_bytes"] = facts.plan->device_total_bytes;
        plan["device_available_bytes"] = facts.plan->device_available_bytes;
      }
    }
    out["warnings"] = facts.warnings;
    return out;
  }

  static Json json_config(const ModelConfig& config) {
    Json out;
    out["n_layer"] = config.n_layer;
    out["n_nextn"] = config.n_nextn;
    out["n_attention_layers"] = config.n_attention_layers();
    out["n_recurrent_layers"] = config.n_recurrent_layers();
    out["n_embd"] = config.n_embd;
    out["n_vocab"] = config.n_vocab;
    out["n_ctx_train"] = config.n_ctx_train;
    out["n_head"] = config.max_n_head();
    out["n_head_kv"] = config.n_head_kv;
    out["head_dim"] = config.head_dim;
    out["n_ff"] = config.n_ff;
    out["n_expert"] = config.route.n_expert;
    out["n_expert_used"] = config.route.n_expert_used;
    out["n_ff_expert"] = config.n_ff_expert;
    out["n_ff_shared"] = config.n_ff_shared;
    out["ssm_dim"] = config.ssm_dim;
    out["ssm_n_head_k"] = config.ssm_n_head_k;
    out["ssm_n_head_v"] = config.ssm_n_head_v;
    out["ssm_taps"] = config.ssm_taps;
    out["norm_eps"] = config.norm_eps;
    out["network"] = Json::array();
    for (const Layer& layer : config.network.layers) {
      Json blocks = Json::array();
      for (const Block& block : layer.blocks) blocks.push_back(describe_block(block));
      out["network"].push_back(std::move(blocks));
    }
    return out;
  }

  static Json json_tokenizer(const TokenizerFacts& facts) {
    Json out;
    out["model"] = facts.model;
    out["pre"] = facts.pre;
    out["n_tokens"] = facts.n_tokens;
    out["n_merges"] = facts.n_merges;
    out["add_bos"] = facts.add_bos ? Json(*facts.add_bos) : Json(nullptr);
    out["special"] = Json::object();
    for (const SpecialToken& s : facts.special) out["special"][s.role] = {{"id", s.id}, {"text", s.text}};
    return out;
  }

  std::string model_;
  EngineFlags flags_;
  bool json_ = false, tensors_ = false, metadata_ = false, template_ = false;
  std::optional<SpeedEstimate> speed_;
};

}  // namespace

std::unique_ptr<Command> make_inspect_command() {
  return std::make_unique<InspectCommand>();
}

}  // namespace thermo
