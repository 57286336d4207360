// `thermocline verify`: our outputs against reference outputs, layer by layer and in every way of running a
// prompt.
//
// Without recorded outputs, a quantised model is compared with a float evaluation of its own weights; a float
// model only with itself, which finds faults in batching, chunking, trees and placement, but not in its
// arithmetic.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>

#include "base/cpu_info.h"
#include "base/json.h"
#include "chat/model_source.h"
#include "cli/commands.h"
#include "cli/json_text.h"
#include "cli/options/draft_options.h"
#include "cli/options/model_options.h"
#include "cli/progress.h"
#include "cli/verify/verify_draft.h"
#include "cli/verify/verify_float.h"
#include "cli/verify/verify_reference.h"
#include "cli/verify/verify_ways.h"
#include "engine/memory_plan.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

struct NamedError {
  std::string tensor;
  TensorError error;
  double allowed = 0.0;
  bool by_rms = false;  // what is allowed is a root mean square: some rows may be far off

  bool passes() const { return (by_rms ? error.rms : error.relative) <= allowed; }
};

// One way of running the prompt and how far its outputs are off.
struct WayReport {
  std::string name;
  std::vector<NamedError> errors;
  int n_equal_argmax = -1;  // -1: there is nothing to compare the logits with

  bool passes() const {
    return std::all_of(errors.begin(), errors.end(), [](const NamedError& e) { return e.passes(); });
  }
};

std::vector<int> parse_chunks(const std::string& text) {
  std::vector<int> chunks;
  size_t at = 0;
  while (at <= text.size()) {
    const size_t comma = std::min(text.find(',', at), text.size());
    try {
      chunks.push_back(parse_count(text.substr(at, comma - at)));
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("--chunks: '{}' cannot be used, {}", text, error.what()));
    }
    if (chunks.back() < 1)
      throw ConfigError(fmt::format("--chunks {}: a chunk has at least one token", text));
    at = comma + 1;
  }
  return chunks;
}

Json json_error(const TensorError& error) {
  Json out;
  // JSON has no infinity: null says that ours was no number.
  out["largest"] = std::isfinite(error.largest) ? Json(error.largest) : Json(nullptr);
  out["relative"] = std::isfinite(error.relative) ? Json(error.relative) : Json(nullptr);
  out["rms"] = std::isfinite(error.rms) ? Json(error.rms) : Json(nullptr);
  out["row"] = error.row;
  return out;
}

class VerifyCommand : public Command {
 public:
  CommandText text() const override {
    return {"verify", "verify -m MODEL [--expected REF.gguf] [options]",
            "compare our outputs with reference outputs",
            "Runs the prompt of the reference in one step, in chunks, token by token, together with another "
            "sequence and as draft trees, and prints the largest error of each tensor, divided by the "
            "reference's standard deviation. Without --expected, a quantised model is compared with a float "
            "evaluation of its weights, and these ways of running it with each other. Exits with 9 if an "
            "error is larger than allowed.",
            "thermocline verify -m model.gguf --expected model-expected.gguf --tolerance 1e-4\n"
            "thermocline verify -m model.gguf --tokens 200\n"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Verification");
    set.value("--expected", "FILE", expected_, "reference outputs (GGUF: ids, logits, hidden.N)");
    set.value("--tolerance", "X", tolerance_,
              "largest error allowed, in standard deviations of the reference (default: 0.001, for drafters "
              "and draft trees 0.0001; for quantised models what rounding activations to 8 bits can cause, "
              "as a root mean square)")
        .range(0.0, 1e9);
    set.value("--chunks", "LIST", chunks_, "sizes of the chunks to run the prompt in");
    set.value("--draft", "WHO", draft_,
              "verify a drafter instead: its file, or mtp; with its own --expected");
    set.value("--tolerance-rms", "X", tolerance_rms_,
              "for drafters: allow this root mean square instead, if the most likely tokens agree (default "
              "for quantised weights: 0.05, for mtp 0.06)")
        .range(0.0, 1e9);
    set.flag("--tree", tree_, "also run the prompt as random draft trees");
    set.flag("--sequences", sequences_, "also run the prompt together with another sequence");
    set.flag(
        "--floats", floats_,
        "without --expected: compare a quantised model with a float evaluation of its weights (default)");
    set.count("--tokens", "N", n_tokens_, "tokens of the random prompt when there is no reference");
    set.value("-s,--seed", "N", seed_, "seed of the random prompt and trees");
    set.flag("--json", json_, "print one JSON object");
    flags_.k_type = flags_.v_type = "f32";  // references are float32
    set.section("Engine");
    add_engine_options(set, flags_);
  }

  ExitCode run(const Terminal& terminal) override {
    const std::vector<int> chunks = parse_chunks(chunks_);
    if (n_tokens_ < 1) throw ConfigError(fmt::format("--tokens {}: at least one is needed", n_tokens_));
    const GgufFile file = open_model(model_);
    ModelConfig config = read_model_config(file);
    override_rope(flags_.rope, config);
    if (!draft_.empty() && expected_.empty())
      throw ConfigError("--draft is verified against reference outputs: name them with --expected");
    if (!expected_.empty()) {
      const GgufFile expected(expected_);
      if (!draft_.empty() || is_tree_reference(expected)) return run_draft(terminal, file, config, expected);
    }
    Reference reference;
    if (!expected_.empty()) {
      reference = read_reference(GgufFile(expected_), config);
    } else {
      std::mt19937_64 random(seed_);
      for (int i = 0; i < n_tokens_; ++i)
        reference.ids.push_back(static_cast<TokenId>(random() % static_cast<uint64_t>(config.n_vocab)));
    }
    ids_ = reference.ids;
    n_vocab_ = config.n_vocab;
    n_embd_ = config.n_embd;
    n_layer_ = config.n_layer;
    quantised_ = is_quantised(file);

    ProgressLine progress(terminal);
    const EngineOptions options = make_options(config, progress);
    against_ = expected_.empty() ? "each other" : expected_;
    if (expected_.empty() && quantised_ && floats_) {
      terminal.note("evaluating the same weights in floats");
      const FloatEvaluation evaluation =
          evaluate_in_floats(file, config, ids_, options, available_memory_bytes() / 10 * 7);
      reference.outputs = evaluation.outputs;
      if (evaluation.n_layers == 0)
        terminal.note(
            "the model does not fit into memory as floats: only the ways of running it are compared with "
            "each other");
      else if (evaluation.n_layers == config.n_layer)
        against_ = "a float evaluation of the same weights";
      else
        against_ = fmt::format("a float evaluation of the first {} layers (more do not fit into memory)",
                               evaluation.n_layers);
    }
    Engine engine(file, options);
    progress.clear();
    terminal.note_unless_empty(engine.plan().note);
    note_unused_cache(flags_.experts, engine, terminal);
    run_ways(engine, reference, chunks);

    const bool passed =
        std::all_of(ways_.begin(), ways_.end(), [](const WayReport& way) { return way.passes(); });
    write_stdout(json_ ? json_text(json(engine, passed)) : table(terminal, engine, passed));
    if (passed) return ExitCode::Ok;
    const auto [way, worst] = worst_error();
    throw ThermoError(
        ExitCode::BelowTarget,
        fmt::format(
            "{}, {}: {:.3g} standard deviations off{}, {:.3g} is allowed; compare with --isa portable and "
            "--no-repack to see whether a kernel is at fault",
            way, worst.tensor, worst.by_rms ? worst.error.rms : worst.error.relative,
            worst.by_rms ? " (root mean square)" : "", worst.allowed));
  }

 private:
  // Its head is the model's.
  bool is_quantised_draft(const GgufFile& file) const {
    return is_quantised(file) || (draft_ != "mtp" && is_quantised(open_drafter(draft_)));
  }

  // A drafter, or a recorded draft tree.
  ExitCode run_draft(const Terminal& terminal, const GgufFile& file, const ModelConfig& config,
                     const GgufFile& expected) const {
    EngineOptions options = engine_options(flags_);
    set_expert_options(flags_.experts, config, options);
    const std::vector<DraftCheck> checks = draft_.empty()
                                               ? check_tree(file, config, expected, options)
                                               : check_drafter(file, config, draft_, expected, options);
    std::optional<double> rms = tolerance_rms_;
    if (!rms && !tolerance_ && !draft_.empty() && is_quantised_draft(file))
      rms = draft_ == "mtp" ? kMtpRms : kDrafterRms;
    const bool passed = std::all_of(checks.begin(), checks.end(), [&](const DraftCheck& check) {
      return check.passes(tolerance_.value_or(kDraftTolerance), rms);
    });
    write_stdout(json_ ? draft_checks_json(checks, passed) : draft_checks_table(checks, passed));
    if (passed) {
      terminal.note(fmt::format("{} tensors as recorded", checks.size()));
      return ExitCode::Ok;
    }
    throw ThermoError(ExitCode::BelowTarget, "the outputs are further off than is allowed");
  }

  EngineOptions make_options(const ModelConfig& config, ProgressLine& progress) const {
    const int n_tokens = static_cast<int>(ids_.size());
    EngineOptions options = engine_options(flags_);
    set_expert_options(flags_.experts, config, options);
    const int needed = n_tokens + kVerifyDraftRows;
    if (flags_.n_ctx > 0 && flags_.n_ctx < needed)
      throw ConfigError(fmt::format("-c {}: verifying {} tokens needs {}", flags_.n_ctx, n_tokens, needed));
    if (flags_.n_ctx == 0) options.n_ctx = needed;
    // One step takes the whole prompt, within reason: its logits are kept for every row.
    if (flags_.n_batch == 0) options.n_batch = std::clamp(n_tokens, 64, 1024);
    options.n_sequences = 2;
    options.max_draft_rows = tree_ ? kVerifyDraftRows : 0;
    for (int k = 0; k <= config.n_layer; ++k) options.taps.push_back(k);
    options.progress = progress.callback();
    return options;
  }

  void run_ways(Engine& engine, const Reference& reference, const std::vector<int>& chunks) {
    VerifyWays ways(engine);
    const Outputs& expected = reference.outputs;
    const bool hidden = expected_.empty() || !expected.hidden.empty();
    const int n_tokens = static_cast<int>(ids_.size()), n_batch = engine.n_batch();
    const Outputs first = ways.in_chunks(ids_, 1, hidden);
    const auto add = [&](std::string name, const Outputs& ours) {
      report(std::move(name), ours, expected, first);
    };

    if (!expected.logits.empty() || !expected.hidden.empty()) add("token by token", first);
    if (n_batch >= n_tokens) add("at once", ways.in_chunks(ids_, n_tokens, hidden));
    std::vector<int> done{1};
    const auto add_chunks = [&](int chunk) {
      if (chunk > n_batch || std::find(done.begin(), done.end(), chunk) != done.end()) return;
      done.push_back(chunk);
      if (chunk < n_tokens) add(fmt::format("chunks of {}", chunk), ways.in_chunks(ids_, chunk, hidden));
    };
    for (const int chunk : chunks) add_chunks(chunk);
    add_chunks(n_batch);
    if (sequences_ && n_batch >= 32) add("with another", ways.beside_another(ids_));
    if (tree_ && n_batch >= kVerifyDraftRows) {
      std::vector<TensorError> branches;
      add("draft trees", ways.as_trees(ids_, seed_, branches));
      const auto worst = std::max_element(branches.begin(), branches.end(), [](const auto& a, const auto& b) {
        return a.relative < b.relative;
      });
      if (worst != branches.end()) ways_.back().errors.push_back({"branches", *worst, between_ways()});
    }
  }

  // What two ways of running the prompt may differ by.
  double between_ways() const { return tolerance_.value_or(kTolerance); }
  // What the output of layer k, or the logits (k = layers + 1), may be off from the reference.
  NamedError judged(std::string tensor, const TensorError& error, int k) const {
    if (tolerance_ || !quantised_) return {std::move(tensor), error, tolerance_.value_or(kTolerance)};
    return {std::move(tensor), error, std::max(1e-6, rounding_bound(k)), true};
  }

  void report(std::string name, const Outputs& ours, const Outputs& expected, const Outputs& first) {
    WayReport way{.name = std::move(name), .errors = {}};
    if (!expected.logits.empty()) {
      way.errors.push_back(
          judged("logits", compare_tensor(ours.logits, expected.logits, n_vocab_), n_layer_ + 1));
      way.n_equal_argmax = count_equal_argmax(ours.logits, expected.logits, n_vocab_);
    }
    if (!ours.hidden.empty())
      for (size_t k = 0; k < expected.hidden.size(); ++k)
        way.errors.push_back(judged(fmt::format("hidden.{}", k),
                                    compare_tensor(ours.hidden[k], expected.hidden[k], n_embd_),
                                    static_cast<int>(k)));
    if (&ours != &first) {
      way.errors.push_back(
          {"logits, ways compared", compare_tensor(ours.logits, first.logits, n_vocab_), between_ways()});
      if (expected.logits.empty())
        way.n_equal_argmax = count_equal_argmax(ours.logits, first.logits, n_vocab_);
    }
    ways_.push_back(std::move(way));
  }

  // By how much of what is allowed, and the way it was found in.
  std::pair<std::string, NamedError> worst_error() const {
    std::pair<std::string, NamedError> worst;
    double share = -1.0;
    for (const WayReport& way : ways_)
      for (const NamedError& e : way.errors) {
        const double error = e.by_rms ? e.error.rms : e.error.relative;
        const double of_allowed = e.allowed > 0.0 ? error / e.allowed : error > 0.0 ? INFINITY : 0.0;
        if (of_allowed <= share) continue;
        share = of_allowed;
        worst = {way.name, e};
      }
    return worst;
  }

  Json json(const Engine& engine, bool passed) const {
    Json out;
    out["model"] = model_display_name(model_);
    out["expected"] = expected_.empty() ? Json(nullptr) : Json(expected_);
    out["compared_with"] = against_;
    out["isa"] = isa_name(engine.info().isa);
    out["repacked"] = engine.info().repacked;
    out["n_threads"] = engine.info().n_threads;
    out["type_k"] = kv_type_name(engine.info().k_type);
    out["type_v"] = kv_type_name(engine.info().v_type);
    out["n_tokens"] = ids_.size();
    out["tolerance"] = tolerance_ ? Json(*tolerance_) : Json(nullptr);
    out["passed"] = passed;
    out["ways"] = Json::array();
    for (const WayReport& way : ways_) {
      Json entry;
      entry["name"] = way.name;
      entry["passed"] = way.passes();
      entry["argmax_equal"] = way.n_equal_argmax < 0 ? Json(nullptr) : Json(way.n_equal_argmax);
      for (const NamedError& e : way.errors) {
        Json error = json_error(e.error);
        error["allowed"] = e.allowed;
        error["judged_by"] = e.by_rms ? "rms" : "relative";
        if (e.tensor == "logits, ways compared")
          entry["from_token_by_token"] = std::move(error);
        else
          entry["tensors"][e.tensor] = std::move(error);
      }
      out["ways"].push_back(std::move(entry));
    }
    return out;
  }

  std::string table(const Terminal& terminal, const Engine& engine, bool passed) const {
    std::string out = fmt::format(
        "{}: {} tokens against {}, {}, {}{} threads, kv {}/{}\n\n", model_display_name(model_), ids_.size(),
        against_, isa_name(engine.info().isa), engine.info().repacked ? "repacked, " : "",
        engine.info().n_threads, kv_type_name(engine.info().k_type), kv_type_name(engine.info().v_type));
    out += fmt::format("{:<16} {:<22} {:>10} {:>10} {:>10} {:>10} {:>6}\n", "way", "tensor", "largest",
                       "relative", "rms", "allowed", "token");
    for (const WayReport& way : ways_)
      for (const NamedError& e : way.errors)
        out += fmt::format(
            "{:<16} {:<22} {:>10.3g} {:>10.3g} {:>10.3g} {:>10.3g} {:>6}  {}\n", way.name, e.tensor,
            e.error.largest, e.error.relative, e.error.rms, e.allowed, e.error.row,
            terminal.on_stdout(e.passes() ? Style::Green : Style::Red, e.passes() ? "pass" : "FAIL"));
    out += '\n';
    for (const WayReport& way : ways_)
      if (way.n_equal_argmax >= 0)
        out += fmt::format("{:<16} same most likely token for {} of {}\n", way.name, way.n_equal_argmax,
                           ids_.size());
    const auto [way, worst] = worst_error();
    out += fmt::format(
        "\n{}: compared with {}; the nearest to what is allowed is {}, {}: {} {:.3g}, allowed {:.3g}\n",
        terminal.on_stdout(passed ? Style::Green : Style::Red, passed ? "passed" : "FAILED"), against_, way,
        worst.tensor, worst.by_rms ? "rms" : "relative",
        worst.by_rms ? worst.error.rms : worst.error.relative, worst.allowed);
    return out;
  }

  std::string model_, expected_, draft_, chunks_ = "7,63,64,65";
  EngineFlags flags_;
  static constexpr double kTolerance = 1e-3;  // of float models, and between ways
  static constexpr double kDraftTolerance = 1e-4;
  static constexpr double kDrafterRms = 0.05, kMtpRms = 0.06;  // what quantisation costs, and a little more
  std::optional<double> tolerance_;
  std::optional<double> tolerance_rms_;
  bool tree_ = true, sequences_ = true, floats_ = true, json_ = false;
  int n_tokens_ = 100;
  uint64_t seed_ = 1;

  std::vector<TokenId> ids_;
  int n_vocab_ = 0, n_embd_ = 0, n_layer_ = 0;
  bool quantised_ = false;
  std::string against_;  // what the outputs are compared with
  std::vector<WayReport> ways_;
};

}  // namespace

std::unique_ptr<Command> make_verify_command() {
  return std::make_unique<VerifyCommand>();
}

}  // namespace thermo
