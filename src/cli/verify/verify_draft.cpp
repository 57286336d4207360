#include "cli/verify/verify_draft.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/error.h"
#include "base/json.h"
#include "base/thread_pool.h"
#include "cli/json_text.h"
#include "cli/options/draft_options.h"
#include "engine/gpu_backend.h"
#include "gguf/gguf_file.h"
#include "model/model.h"
#include "speculative/dflash_drafter.h"
#include "speculative/mtp_drafter.h"

namespace thermo {
namespace {

DraftCheck check_logits(std::string name, std::span<const float> ours, std::span<const float> expected,
                        int n_vocab) {
  return {.tensor = std::move(name),
          .error = compare_tensor(ours, expected, n_vocab),
          .n_rows = static_cast<int>(expected.size()) / n_vocab,
          .n_equal_argmax = count_equal_argmax(ours, expected, n_vocab)};
}

std::vector<float> all_logits(const StepOutput& output) {
  std::vector<float> all;
  for (const RowLogits& row : output.rows) all.insert(all.end(), row.logits.begin(), row.logits.end());
  return all;
}

[[noreturn]] void refused(const Error& error) {
  throw ThermoError(ExitCode::Internal, "verify: a step was refused: " + error.message);
}

// A step that does what a tensor of the reference says.
[[noreturn]] void refused(const Error& error, const GgufFile& expected, std::string_view tensor) {
  if (error.code != ErrorCode::InvalidArgument) refused(error);
  throw LoadError(
      fmt::format("{}: `{}`: {}; record the reference again", expected.path(), tensor, error.message));
}

constexpr size_t kMostNodes = kMaxDraftNodes + 1;

// Makes the drafter's model where it is to be verified.
using MakeModel = std::function<std::unique_ptr<Backend>(ModelConfig, Weights, const ModelOptions&)>;

// Recorded hidden states, [taps][n][n_embd], as a step of the target would have left them.
std::unique_ptr<StateBuffer> put_states(Backend& model, std::span<const float> hidden, size_t n_taps) {
  const auto width = static_cast<size_t>(model.config().n_embd), n = hidden.size() / n_taps / width;
  std::unique_ptr<StateBuffer> states = model.make_states(static_cast<int>(n), static_cast<int>(n_taps));
  std::vector<float> row(n_taps * width);
  for (size_t i = 0; i < n; ++i) {
    for (size_t tap = 0; tap < n_taps; ++tap)
      std::copy_n(hidden.data() + (tap * n + i) * width, width, row.data() + tap * width);
    states->write(static_cast<int>(i), row);
  }
  return states;
}

StateRows rows_of(const StateBuffer& states, size_t begin, size_t end) {
  return states.rows(static_cast<int>(begin), static_cast<int>(end - begin));
}

std::vector<size_t> read_anchors(const GgufFile& expected, size_t n_ids) {
  std::vector<size_t> anchors;
  for (const uint64_t anchor : expected.find_uints("anchors").value_or(std::vector<uint64_t>{})) {
    if (anchor == 0 || anchor >= n_ids || (!anchors.empty() && anchor <= anchors.back()))
      throw LoadError(fmt::format("{}: anchor {} is out of order", expected.path(), anchor));
    anchors.push_back(anchor);
  }
  return anchors;
}

std::vector<DraftCheck> check_dflash(const GgufFile& drafter_file, const ModelConfig& target,
                                     const Weights& weights, const GgufFile& expected, DrafterOptions options,
                                     bool repack, const MakeModel& make_model, ThreadPool& pool) {
  const DflashConfig config = read_dflash_config(drafter_file, target);
  const std::vector<TokenId> ids = read_reference_ids(expected, "ids", target);
  options.n_ctx = static_cast<int>(ids.size()) + config.block;
  DflashDrafter drafter(
      config,
      make_model(config.model, Weights::of_drafter(config.model, drafter_file, weights, repack, pool),
                 drafter_model_options(options, config.block)),
      1);
  const auto block = static_cast<size_t>(config.block), width = static_cast<size_t>(target.n_embd);
  const std::vector<size_t> anchors = read_anchors(expected, ids.size());
  const size_t n_states = anchors.empty() ? ids.size() - 1 : ids.size();
  std::vector<float> features;
  for (const int layer : config.layers) {
    const std::vector<float> rows =
        read_reference_rows(expected, fmt::format("feature.{}", layer), target.n_embd, n_states);
    features.insert(features.end(), rows.begin(), rows.end());
  }
  const std::unique_ptr<StateBuffer> states = put_states(drafter.model(), features, config.layers.size());
  std::vector<DraftCheck> checks;
  std::vector<float> hidden(block * width);
  if (anchors.empty()) {  // one block, after all but the last token; its first slot predicts nothing
    drafter.commit(0, std::span(ids).first(n_states), rows_of(*states, 0, n_states));
    const std::vector<float> ours = all_logits(drafter.run_block(0, ids.back(), hidden.data()));
    const std::vector<float> want = read_reference_rows(expected, "logits", target.n_vocab, block);
    const auto first = static_cast<size_t>(target.n_vocab);
    checks.push_back(check_logits("logits", std::span(ours).subspan(first), std::span(want).subspan(first),
                                  target.n_vocab));
  }
  size_t done = 0;
  for (const size_t anchor : anchors) {
    drafter.commit(0, std::span(ids).subspan(done, anchor - done), rows_of(*states, done, anchor));
    done = anchor;
    const std::vector<float> ours = all_logits(drafter.run_block(0, ids[anchor], hidden.data()));
    const std::string name = fmt::format("anchor.{}", anchor);
    checks.push_back(check_logits(name + ".logits", ours,
                                  read_reference_rows(expected, name + ".logits", target.n_vocab, block),
                                  target.n_vocab));
    checks.push_back(
        {.tensor = name + ".hidden",
         .error = compare_tensor(
             hidden, read_reference_rows(expected, name + ".hidden", target.n_embd, block), target.n_embd)});
  }
  return checks;
}

std::vector<DraftCheck> check_mtp(const ModelConfig& target, const Weights& weights, const GgufFile& expected,
                                  DrafterOptions options, const MakeModel& make_model) {
  const std::vector<TokenId> ids = read_reference_ids(expected, "ids", target);
  const std::vector<size_t> anchors = read_anchors(expected, ids.size());
  std::vector<std::vector<TokenId>> chains;
  size_t longest = 0;
  for (const size_t anchor : anchors) {
    chains.push_back(read_reference_ids(expected, fmt::format("chain.{}.ids", anchor), target));
    longest = std::max(longest, chains.back().size());
  }
  options.n_ctx = static_cast<int>(ids.size() + longest);
  options.n_sequences = 1 + static_cast<int>(anchors.size());
  const ModelConfig config = nextn_network(target);
  MtpDrafter drafter(
      target.n_layer,
      make_model(config, Weights::of_nextn(config, weights), drafter_model_options(options, 0)),
      options.n_sequences);
  const std::unique_ptr<StateBuffer> states =
      put_states(drafter.model(), read_reference_rows(expected, "hidden", target.n_embd, ids.size()), 1);
  std::vector<DraftCheck> checks;
  const std::vector<float> ours =
      drafter.run_pairs(0, std::span(ids).subspan(1), rows_of(*states, 0, ids.size() - 1));
  checks.push_back(check_logits("mtp.logits", ours,
                                read_reference_rows(expected, "mtp.logits", target.n_vocab, ids.size() - 1),
                                target.n_vocab));
  for (size_t a = 0; a < anchors.size(); ++a) {
    const int sequence = 1 + static_cast<int>(a);
    const std::vector<TokenId>& chain = chains[a];
    drafter.commit(sequence, std::span(ids).first(anchors[a]), rows_of(*states, 0, anchors[a]));
    const DraftRequest request{.sequence = sequence,
                               .root = ids[anchors[a]],
                               .n_depths = static_cast<int>(chain.size()),
                               .n_ranks = 1};
    Draft draft;
    drafter.draft({&request, 1}, {&draft, 1});
    DraftCheck check{.tensor = fmt::format("chain.{}.ids", anchors[a]),
                     .error = {},
                     .n_rows = static_cast<int>(chain.size())};
    for (size_t i = 0; i < chain.size(); ++i) check.n_equal_argmax += draft.tokens[i] == chain[i] ? 1 : 0;
    if (check.n_equal_argmax < check.n_rows) check.error.relative = check.error.rms = INFINITY;
    checks.push_back(std::move(check));
  }
  return checks;
}

}  // namespace

bool DraftCheck::passes(double tolerance, const std::optional<double>& rms) const {
  if (!rms) return error.relative <= tolerance;
  return error.rms <= *rms && n_equal_argmax == n_rows;
}

bool is_tree_reference(const GgufFile& file) {
  return file.find_tensor("tree.tokens") != nullptr;
}

std::vector<DraftCheck> check_tree(const GgufFile& file, const ModelConfig& config, const GgufFile& expected,
                                   const EngineOptions& given) {
  const std::vector<TokenId> ids = read_reference_ids(expected, "ids", config),
                             tokens = read_reference_ids(expected, "tree.tokens", config);
  const std::vector<int32_t> parents = read_reference_numbers(expected, "tree.parents");
  if (parents.size() != tokens.size())
    throw LoadError(
        fmt::format("{}: the tree has {} tokens and {} parents, expected one of each token; record "
                    "the reference again",
                    expected.path(), tokens.size(), parents.size()));
  if (tokens.size() > kMostNodes)
    throw LoadError(
        fmt::format("{}: the tree has {} tokens, at most {} are verified in a step; record a "
                    "smaller one",
                    expected.path(), tokens.size(), kMostNodes));
  struct Path {
    std::string slots_name, name;
    std::vector<int32_t> slots;
    std::vector<TokenId> after;
  };
  std::vector<Path> paths;
  size_t longest = 0;
  for (int k = 0; expected.find_tensor(fmt::format("path.{}.slots", k)); ++k) {
    const std::string name = fmt::format("path.{}", k);
    paths.push_back({name + ".slots", name, read_reference_numbers(expected, name + ".slots"),
                     read_reference_ids(expected, name + ".ids", config)});
    longest = std::max(longest, paths.back().after.size());
  }
  EngineOptions options = given;
  options.n_ctx = static_cast<int>(ids.size() + tokens.size() + longest);
  options.max_draft_rows = static_cast<int>(tokens.size());
  for (int k = 0; k <= config.n_layer; ++k) options.taps.push_back(k);
  Engine engine(file, options);
  const auto width = static_cast<size_t>(config.n_embd), n = tokens.size();
  std::vector<Row> rows;
  for (size_t i = 0; i < n; ++i)
    rows.push_back({.token = tokens[i], .parent = parents[i], .want_logits = true});
  std::vector<DraftCheck> checks;
  for (const Path& path : paths) {
    Result<Session> session = engine.open_session();
    if (!session) refused(session.error());
    if (const Status status = session->append(ids); !status) refused(status.error());
    std::vector<float> hidden((static_cast<size_t>(config.n_layer) + 1) * n * width);
    const SequenceRows group{.sequence = session->sequence(), .rows = rows, .uncommitted = true};
    const Result<StepOutput> output = engine.step({.groups = {&group, 1}, .hidden = hidden.data()});
    if (!output) refused(output.error(), expected, "tree.parents");
    if (&path == &paths.front()) {
      checks.push_back(check_logits("tree.logits", all_logits(*output),
                                    read_reference_rows(expected, "tree.logits", config.n_vocab, n),
                                    config.n_vocab));
      for (size_t l = 0; l <= static_cast<size_t>(config.n_layer); ++l) {
        const std::string name = fmt::format("tree.hidden.{}", l);
        checks.push_back(
            {.tensor = name,
             .error = compare_tensor(std::span(hidden).subspan(l * n * width, n * width),
                                     read_reference_rows(expected, name, config.n_embd, n), config.n_embd)});
      }
    }
    if (const Status status = engine.commit(session->sequence(), path.slots); !status)
      refused(status.error(), expected, path.slots_name);
    std::vector<float> ours;
    for (const TokenId token : path.after) {
      const Row row{.token = token, .parent = -1, .want_logits = true};
      const SequenceRows one{.sequence = session->sequence(), .rows = {&row, 1}};
      const Result<StepOutput> next = engine.step({.groups = {&one, 1}});
      if (!next) refused(next.error());
      const std::vector<float> logits = all_logits(*next);
      ours.insert(ours.end(), logits.begin(), logits.end());
    }
    const std::string name = path.name + ".logits";
    checks.push_back(check_logits(
        name, ours, read_reference_rows(expected, name, config.n_vocab, path.after.size()), config.n_vocab));
  }
  return checks;
}

std::vector<DraftCheck> check_drafter(const GgufFile& file, const ModelConfig& config,
                                      const std::string& draft, const GgufFile& expected,
                                      const EngineOptions& options) {
  if (draft == "mtp" && config.n_nextn == 0)
    throw ConfigError("--draft mtp: this model has no next-token block");
  ThreadPool pool({.n_threads = options.n_threads, .pin = options.pin_threads});
  std::string note;
  const std::optional<GpuChoice> gpu = choose_gpu(options.device, note);
  const bool repack = options.repack && !gpu;  // a GPU packs what it uploads
  const Weights weights = Weights::load(config, file, repack, pool, {});
  const DrafterOptions drafter{.k_type = options.k_type.value_or(KvType::F32),
                               .v_type = options.v_type.value_or(KvType::F32),
                               .isa = options.isa.value_or(best_isa())};
  const MakeModel make_model = [&](ModelConfig network, Weights w,
                                   ModelOptions model) -> std::unique_ptr<Backend> {
    if (!gpu) return std::make_unique<Model>(std::move(network), std::move(w), model, pool);
    model.device = gpu->index;
    return make_gpu_drafter(std::move(network), w, model, nullptr, pool);
  };
  if (draft == "mtp") return check_mtp(config, weights, expected, drafter, make_model);
  const GgufFile drafter_file = open_drafter(draft);
  return check_dflash(drafter_file, config, weights, expected, drafter, repack, make_model, pool);
}

std::string draft_checks_table(const std::vector<DraftCheck>& checks, bool passed) {
  std::string out = fmt::format("{:<20} {:>10} {:>10} {:>10} {:>6} {:>12}\n", "tensor", "largest", "relative",
                                "rms", "row", "same best");
  for (const DraftCheck& check : checks)
    out += fmt::format("{:<20} {:>10.3g} {:>10.3g} {:>10.3g} {:>6} {:>12}\n", check.tensor,
                       check.error.largest, check.error.relative, check.error.rms, check.error.row,
                       check.n_rows > 0 ? fmt::format("{} of {}", check.n_equal_argmax, check.n_rows) : "");
  return out + (passed ? "\npassed\n" : "\nFAILED\n");
}

std::string draft_checks_json(const std::vector<DraftCheck>& checks, bool passed) {
  Json out;
  out["passed"] = passed;
  for (const DraftCheck& check : checks) {
    Json& entry = out["tensors"][check.tensor];
    entry["relative"] = std::isfinite(check.error.relative) ? Json(check.error.relative) : Json(nullptr);
    entry["rms"] = std::isfinite(check.error.rms) ? Json(check.error.rms) : Json(nullptr);
    entry["rows"] = check.n_rows;
    entry["argmax_equal"] = check.n_equal_argmax;
  }
  return json_text(out);
}

}  // namespace thermo
