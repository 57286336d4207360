// `thermocline experts`: which experts a model uses, as a picture. Runs the model over a text, or shows a
// heat file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "base/units.h"
#include "base/utf8.h"
#include "chat/model_source.h"
#include "cli/bench/bench_text.h"
#include "cli/commands.h"
#include "cli/heat_view.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/json_text.h"
#include "cli/options/model_options.h"
#include "cli/progress.h"
#include "engine/memory_plan.h"
#include "experts/budget.h"
#include "experts/heat_file.h"
#include "experts/placement.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

constexpr int kDefaultTokens = 1024;

class ExpertsCommand : public Command {
 public:
  CommandText text() const override {
    return {
        "experts", "experts [MODEL] [-p TEXT | -f FILE | --heat-file FILE] [options]",
        "show which experts a text uses, as a heat map",
        "Runs the model over the text (without one: over a built-in text) and shows a line for each layer: "
        "its experts from the first to the last, shaded by use, the share of the uses that go to the hottest "
        "10, 25 and 50 %, and the entropy (1: all used equally). With --expert-cache the last column is the "
        "share of "
        "the uses that such a cache would serve. --heat-file alone shows a saved file; with a text, the "
        "file is continued.",
        "thermocline experts\nthermocline experts model.gguf -f book.txt --heat-file book.heat\n"
        "thermocline experts --heat-file book.heat --expert-cache 40%\n"
        "thermocline experts model.gguf --layer 12"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Text");
    set.value("-p,--prompt", "TEXT", prompt_, "the text").no_environment().once();
    set.value("-f,--file", "FILE", file_, "file with the text; - is stdin").no_environment().once();
    set.count("--tokens", "N", n_tokens_,
              "use at most this many tokens of the text; 0: all (default: all; 1024 of the built-in text)")
        .range(0, 1 << 24)
        .no_environment();
    set.section("Output");
    set.flag("--sort", sort_, "hottest expert first in each line").no_environment();
    set.value("--layer", "N", layer_, "list the hottest experts of one layer")
        .range(0, 100000)
        .no_environment();
    set.value("--top", "N", n_top_, "with --layer: how many (default 20)").range(1, 1000000).no_environment();
    set.flag("--json", json_, "print one JSON object");
    add_engine_options(set, flags_);
  }

  ExitCode run(const Terminal& terminal) override {
    if (prompt_ && !file_.empty())
      throw ConfigError("--prompt and --file exclude each other: give one of them");
    const bool has_text = prompt_ || !file_.empty();
    if (!flags_.experts.heat_file.empty() && !has_text) {
      show_file();
    } else {
      run_text(terminal, engine_options(flags_), has_text ? read_text() : std::string());
    }
    place(terminal);
    if (layer_) {
      write_stdout(json_ ? dump(layer_json(checked_layer(), true)) : layer_table(terminal, checked_layer()));
    } else {
      write_stdout(json_ ? dump(json()) : table(terminal));
    }
    return interrupted_ ? InterruptScope::exit_code() : ExitCode::Ok;
  }

 private:
  std::string read_text() const {
    const std::string text = prompt_ ? *prompt_ : read_text_file(file_);
    if (text.empty()) throw ConfigError("the text is empty: give one with -p or -f");
    require_utf8(text, "the text");
    return text;
  }

  // A saved file. The model is needed only to turn sizes into experts, and to see that both belong together.
  void show_file() {
    Result<SavedHeat> saved = read_heat(flags_.experts.heat_file);
    if (!saved) throw ConfigError("--heat-file " + saved.error().message);
    info_ = saved->info;
    catalog_.n_active = info_.n_active;
    catalog_.n_embd = info_.n_embd;
    for (const int n : info_.n_expert) {
      ExpertLayer layer;
      layer.experts.resize(static_cast<size_t>(n));
      layer.expert_bytes = 1;  // alike, as far as the file says
      catalog_.layers.push_back(layer);
    }
    if (!model_.empty()) {
      const GgufFile file = open_model(model_);
      use_model(file, read_model_config(file));
      if (!info_.same_model(saved->info))
        throw ConfigError(fmt::format(
            "--heat-file {}: it belongs to another model: {}, but {} is {}; give the file of this "
            "model, or leave the model out",
            flags_.experts.heat_file, saved->info.describe(), model_, info_.describe()));
    }
    heat_ = HeatMap(catalog_);
    heat_.set(saved->values, saved->n_tokens);
    source_ = flags_.experts.heat_file;
  }

  void use_model(const GgufFile& file, const ModelConfig& config) {
    catalog_ = expert_catalog(config, file);
    has_bytes_ = true;
    info_ = HeatFileInfo::of(catalog_, config.arch_name, config.name.empty() ? file.path() : config.name);
    if (catalog_.n_moe_layers() == 0)
      throw LoadError(fmt::format("{}: this is a dense model: it has no experts to show", file.path()));
  }

  void run_text(const Terminal& terminal, EngineOptions options, const std::string& text) {
    const GgufFile file = open_model(model_);
    const ModelConfig config = read_model_config(file);
    use_model(file, config);
    set_expert_options(flags_.experts, config, options);
    if (model_.empty())
      terminal.note(
          "no model given: using the embedded one (Plankton, 35M parameters); -m FILE names another");
    const std::vector<TokenId> ids = token_ids(file, config, text);
    count(terminal, file, options, ids);
  }

  void count(const Terminal& terminal, const GgufFile& file, EngineOptions options,
             std::span<const TokenId> ids) {
    ProgressLine progress(terminal);
    options.progress = progress.callback();
    Engine engine(file, options);
    progress.clear();
    terminal.note_unless_empty(engine.plan().note);
    Result<Session> session = engine.open_session();
    if (!session) throw ThermoError(ExitCode::Internal, session.error().message);
    const InterruptScope interrupts;
    read(engine, *session, ids);
    interrupted_ = InterruptScope::interrupted();
    if (interrupted_) terminal.note("interrupted: the map shows what was read so far");
    heat_ = *engine.heat();
  }

  // The built-in text or the one given, as ids; a model without a vocabulary gets an id for each word.
  std::vector<TokenId> token_ids(const GgufFile& file, const ModelConfig& config, const std::string& text) {
    if (text.empty()) {
      const BenchText builtin =
          make_bench_text("builtin", file, config.n_vocab,
                          static_cast<size_t>(n_tokens_ > 0 ? n_tokens_ : kDefaultTokens), 1);
      source_ = "the built-in text";
      return builtin.ids;
    }
    source_ = prompt_ ? "the prompt" : file_;
    std::vector<TokenId> ids = encode_or_hash(text, file, config.n_vocab);
    if (n_tokens_ > 0 && ids.size() > static_cast<size_t>(n_tokens_))
      ids.resize(static_cast<size_t>(n_tokens_));
    return ids;
  }

  // A text longer than the context is read in pieces, each from the start.
  static void read(Engine& engine, Session& session, std::span<const TokenId> ids) {
    const auto go_on = [](int, int) { return !InterruptScope::interrupted(); };
    const auto piece = static_cast<size_t>(engine.n_ctx());
    for (size_t at = 0; at < ids.size() && !InterruptScope::interrupted(); at += piece) {
      session.clear();
      const Status status = session.append(ids.subspan(at, std::min(piece, ids.size() - at)), go_on);
      if (!status && status.error().code != ErrorCode::Cancelled)
        throw ThermoError(
            status.error().code == ErrorCode::DeviceFault ? ExitCode::DeviceFault : ExitCode::Internal,
            "experts: " + status.error().message);
    }
  }

  // The hot set that --expert-cache would have.
  void place(const Terminal& terminal) {
    const ExpertFlags& flags = flags_.experts;
    std::string text = flags.cpu_moe ? "0" : flags.cache;
    if (flags.n_cpu_moe >= 0) {
      const int n_moe = catalog_.n_moe_layers();
      text = fmt::format("{:.4f}%", 100.0 * (n_moe - std::min(n_moe, flags.n_cpu_moe)) / std::max(1, n_moe));
    }
    const Result<ExpertBudget> budget = parse_expert_budget(text);
    if (!budget || budget->is_auto()) return;
    if (budget->bytes && *budget->bytes > 0 && !has_bytes_) {
      terminal.note(
          fmt::format("--expert-cache {}: the file does not say how large an expert is; name the model with "
                      "-m, or give a share (60%)",
                      text));
      return;
    }
    PlacementInputs inputs;
    inputs.catalog = &catalog_;
    inputs.heat = &heat_;
    inputs.budget_bytes = budget->resolve(catalog_.total_bytes(), 0);
    inputs.pin_layers = flags.pin_layers;
    budget_ = *budget;
    budget_bytes_ = inputs.budget_bytes;
    placement_ = place_experts(inputs);
  }

  int n_layers() const { return heat_.n_layers(); }
  std::vector<float> heat_of(int layer) const {
    std::vector<float> heat(static_cast<size_t>(heat_.n_expert(layer)));
    for (size_t e = 0; e < heat.size(); ++e) heat[e] = heat_.heat(layer, static_cast<int>(e));
    return heat;
  }
  double hot_share(int layer, const LayerSpread& spread) const {
    double sum = 0.0;
    for (const int32_t e : placement_->hot[static_cast<size_t>(layer)]) sum += heat_.heat(layer, e);
    return spread.total > 0.0 ? sum / spread.total : 0.0;
  }

  std::string heading(const Terminal& terminal) const {
    std::string out = terminal.on_stdout(Style::Bold, printable(info_.describe()));
    out += fmt::format("\n{} tokens counted, from {}\n", heat_.n_tokens(), source_);
    if (placement_)
      out += fmt::format("with {} ({} of {} experts, at least {} in a layer): {:.1f} % of the uses are hot\n",
                         budget_.describe(), placement_->n_hot, n_experts(), placement_->floor,
                         100.0 * placement_->expected_hit_rate);
    return out + "\n";
  }

  int n_experts() const {
    int n = 0;
    for (int l = 0; l < n_layers(); ++l) n += heat_.n_expert(l);
    return n;
  }

  std::string table(const Terminal& terminal) const {
    const int numbers = placement_ ? 37 : 30;
    int most = 1;
    for (int l = 0; l < n_layers(); ++l) most = std::max(most, heat_.n_expert(l));
    const int cells = std::min(most, std::clamp(terminal.width - 6 - numbers, 8, 256));
    std::string out = heading(terminal);
    out += fmt::format("{:>5} {:<{}} {:>6}{:>6}{:>6}{:>9}{}\n", "layer", sort_ ? "hottest first" : "experts",
                       cells, "10 %", "25 %", "50 %", "entropy", placement_ ? "   hot" : "");
    LayerSpread sum;
    int n_counted = 0;
    for (int l = 0; l < n_layers(); ++l) {
      std::vector<float> heat = heat_of(l);
      if (heat.empty()) {
        out += fmt::format("{:>5} {}\n", l, terminal.on_stdout(Style::Dim, "dense"));
        continue;
      }
      const LayerSpread spread = spread_of(heat);
      if (sort_) std::sort(heat.begin(), heat.end(), std::greater<>());
      const std::string bar = heat_bar(heat, cells, terminal);
      const std::string space(static_cast<size_t>(std::max(0, cells - static_cast<int>(heat.size()))), ' ');
      out += fmt::format("{:>5} {}{} {}", l, bar, space, spread_text(spread));
      if (placement_) out += fmt::format(" {:>5.1f}", 100.0 * hot_share(l, spread));
      out += "\n";
      sum.top10 += spread.top10;
      sum.top25 += spread.top25;
      sum.top50 += spread.top50;
      sum.entropy += spread.entropy;
      ++n_counted;
    }
    if (n_counted > 0) {
      for (double* value : {&sum.top10, &sum.top25, &sum.top50, &sum.entropy}) *value /= n_counted;
      out += fmt::format("{:>5} {:<{}} {}", "mean", "", cells, spread_text(sum));
      if (placement_) out += fmt::format(" {:>5.1f}", 100.0 * placement_->expected_hit_rate);
      out += "\n";
    }
    out += "\n" + heat_legend(terminal) + "\n";
    if (cells < most)
      out += fmt::format("a cell is the average of {} experts; a wider terminal, or --layer N, shows more\n",
                         most % cells == 0 ? std::to_string(most / cells)
                                           : fmt::format("{} to {}", most / cells, most / cells + 1));
    return out;
  }

  static std::string spread_text(const LayerSpread& s) {
    return fmt::format("{:>6.1f}{:>6.1f}{:>6.1f}{:>9.3f}", 100.0 * s.top10, 100.0 * s.top25, 100.0 * s.top50,
                       s.entropy);
  }

  int checked_layer() const {
    if (*layer_ >= n_layers())
      throw ConfigError(fmt::format("--layer {}: the model has layers 0 to {}", *layer_, n_layers() - 1));
    if (heat_.n_expert(*layer_) == 0)
      throw ConfigError(fmt::format(
          "--layer {}: this layer is dense: it has no experts; see the others without --layer", *layer_));
    return *layer_;
  }

  std::string layer_table(const Terminal& terminal, int layer) const {
    const std::vector<float> heat = heat_of(layer);
    const LayerSpread spread = spread_of(heat);
    std::string out = heading(terminal);
    out += fmt::format("layer {}: {} of {} experts used, entropy {:.3f}\n\n", layer, spread.n_used,
                       heat.size(), spread.entropy);
    out += fmt::format("{:>5} {:>7} {:>10} {:>7} {:>7}{}\n", "rank", "expert", "heat", "share", "sum",
                       placement_ ? "  place" : "");
    double sum = 0.0;
    int rank = 0;
    for (const int32_t e : by_heat(heat)) {
      if (++rank > n_top_) break;
      const double h = heat[static_cast<size_t>(e)];
      const double share = spread.total > 0.0 ? h / spread.total : 0.0;
      sum += share;
      out +=
          fmt::format("{:>5} {:>7} {:>10.2f} {:>6.2f}% {:>6.2f}%{}\n", rank, e, h, 100.0 * share, 100.0 * sum,
                      !placement_                    ? ""
                      : placement_->is_hot(layer, e) ? "  " + terminal.on_stdout(Style::Red, "hot")
                                                     : "  cold");
    }
    return out;
  }

  Json layer_json(int layer, bool alone) const {
    const std::vector<float> heat = heat_of(layer);
    const LayerSpread spread = spread_of(heat);
    Json out;
    if (alone) out["model"] = info_.name;
    out["layer"] = layer;
    out["n_expert"] = heat.size();
    out["n_used"] = spread.n_used;
    out["top10"] = spread.top10;
    out["top25"] = spread.top25;
    out["top50"] = spread.top50;
    out["entropy"] = spread.entropy;
    if (placement_) {
      out["hot_share"] = hot_share(layer, spread);
      out["hot"] = placement_->hot[static_cast<size_t>(layer)];
    }
    out["heat"] = heat;
    return out;
  }

  Json json() const {
    Json out;
    out["architecture"] = info_.architecture;
    out["name"] = info_.name;
    out["n_layers"] = info_.n_expert.size();
    out["n_active"] = info_.n_active;
    out["n_tokens"] = heat_.n_tokens();
    out["source"] = source_;
    if (placement_) {
      out["expert_cache"] = {{"budget", budget_.describe()},
                             {"n_hot", placement_->n_hot},
                             {"n_expert", n_experts()},
                             {"floor", placement_->floor},
                             {"expected_hit_rate", placement_->expected_hit_rate}};
      if (has_bytes_) {
        out["expert_cache"]["budget_bytes"] = budget_bytes_;
        out["expert_cache"]["hot_bytes"] = placement_->bytes;
        out["expert_cache"]["total_bytes"] = catalog_.total_bytes();
      }
    }
    out["layers"] = Json::array();
    for (int l = 0; l < n_layers(); ++l) out["layers"].push_back(layer_json(l, false));
    return out;
  }

  static std::string dump(const Json& json) { return json_text(json); }

  std::string model_, file_;
  std::optional<std::string> prompt_;
  int n_tokens_ = 0, n_top_ = 20;
  std::optional<int> layer_;
  bool sort_ = false, json_ = false, interrupted_ = false;
  EngineFlags flags_;

  HeatFileInfo info_;
  ExpertCatalog catalog_;
  bool has_bytes_ = false;  // the catalog's sizes are the model's
  HeatMap heat_;
  std::string source_;
  ExpertBudget budget_;
  uint64_t budget_bytes_ = 0;
  std::optional<Placement> placement_;
};

}  // namespace

std::unique_ptr<Command> make_experts_command() {
  return std::make_unique<ExpertsCommand>();
}

}  // namespace thermo
