#include "cli/verify/verify_draft.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "base/thread_pool.h"
#include "cli/options/draft_options.h"
#include "gguf/gguf_file.h"
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

// Rows of recorded hidden states as a step would have left them.
struct RecordedStates {
  std::vector<float> hidden;  // [taps][n][n_embd]
  size_t n = 0, n_embd = 0;
  std::vector<int32_t> rows;

  StateRows view(size_t begin, size_t end) {
    rows.clear();
    for (size_t i = begin; i < end; ++i) rows.push_back(static_cast<int32_t>(i));
    return {.hidden = hidden.data(), .n_step_rows = n, .n_embd = n_embd, .rows = rows};
  }
};

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
                                     const Weights& weights, const GgufFile& expected,
                                     const DrafterOptions& options, ThreadPool& pool) {
  const DflashConfig config = read_dflash_config(drafter_file, target);
  DflashDrafter drafter(config, drafter_file, weights, options, pool);
  const std::vector<TokenId> ids = read_reference_ids(expected, "ids", target);
  const auto block = static_cast<size_t>(config.block), width = static_cast<size_t>(target.n_embd);
  const std::vector<size_t> anchors = read_anchors(expected, ids.size());
  RecordedStates states{
      .hidden = {}, .n = anchors.empty() ? ids.size() - 1 : ids.size(), .n_embd = width, .rows = {}};
  for (const int layer : config.layers) {
    const std::vector<float> rows =
        read_reference_rows(expected, fmt::format("feature.{}", layer), target.n_embd, states.n);
    states.hidden.insert(states.hidden.end(), rows.begin(), rows.end());
  }
  std::vector<DraftCheck> checks;
  std::vector<float> hidden(block * width);
  if (anchors.empty()) {  // one block, after all but the last token; its first slot predicts nothing
    drafter.commit(0, std::span(ids).first(states.n), states.view(0, states.n));
    const std::vector<float> ours = all_logits(drafter.run_block(0, ids.back(), hidden.data()));
    const std::vector<float> want = read_reference_rows(expected, "logits", target.n_vocab, block);
    const auto first = static_cast<size_t>(target.n_vocab);
    checks.push_back(check_logits("logits", std::span(ours).subspan(first), std::span(want).subspan(first),
                                  target.n_vocab));
  }
  size_t done = 0;
  for (const size_t anchor : anchors) {
    drafter.commit(0, std::span(ids).subspan(done, anchor - done), states.view(done, anchor));
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
                                  DrafterOptions options, ThreadPool& pool) {
  const std::vector<TokenId> ids = read_reference_ids(expected, "ids", target);
  const size_t width = static_cast<size_t>(target.n_embd);
  const std::vector<size_t> anchors = read_anchors(expected, ids.size());
  options.n_sequences = 1 + static_cast<int>(anchors.size());
  MtpDrafter drafter(target, weights, options, pool);
  RecordedStates states{.hidden = read_reference_rows(expected, "hidden", target.n_embd, ids.size()),
                        .n = ids.size(),
                        .n_embd = width,
                        .rows = {}};
  std::vector<DraftCheck> checks;
  const std::vector<float> ours =
      all_logits(drafter.run_pairs(0, std::span(ids).subspan(1), states.hidden.data()));
  checks.push_back(check_logits("mtp.logits", ours,
                                read_reference_rows(expected, "mtp.logits", target.n_vocab, ids.size() - 1),
                                target.n_vocab));
  for (size_t a = 0; a < anchors.size(); ++a) {
    const int sequence = 1 + static_cast<int>(a);
    const std::string name = fmt::format("chain.{}.ids", anchors[a]);
    const std::vector<TokenId> chain = read_reference_ids(expected, name, target);
    drafter.commit(sequence, std::span(ids).first(anchors[a]), states.view(0, anchors[a]));
    const DraftRequest request{.sequence = sequence,
                               .root = ids[anchors[a]],
                               .n_depths = static_cast<int>(chain.size()),
                               .n_ranks = 1};
    Draft draft;
    drafter.draft({&request, 1}, {&draft, 1});
    DraftCheck check{.tensor = name, .error = {}, .n_rows = static_cast<int>(chain.size())};
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
  if (parents.size() != tokens.size() || tokens.size() > 64)
    throw LoadError(fmt::format("{}: the tree has {} tokens and {} parents", expected.path(), tokens.size(),
                                parents.size()));
  EngineOptions options = given;
  options.n_ctx = static_cast<int>(ids.size() + tokens.size()) + 64;
  options.max_draft_rows = static_cast<int>(tokens.size());
  for (int k = 0; k <= config.n_layer; ++k) options.taps.push_back(k);
  Engine engine(file, options);
  const auto width = static_cast<size_t>(config.n_embd), n = tokens.size();
  std::vector<Row> rows;
  for (size_t i = 0; i < n; ++i)
    rows.push_back({.token = tokens[i], .parent = parents[i], .want_logits = true});
  std::vector<DraftCheck> checks;
  for (int k = 0; expected.find_tensor(fmt::format("path.{}.slots", k)); ++k) {
    Result<Session> session = engine.open_session();
    if (!session) refused(session.error());
    if (const Status status = session->append(ids); !status) refused(status.error());
    std::vector<float> hidden((static_cast<size_t>(config.n_layer) + 1) * n * width);
    const SequenceRows group{.sequence = session->sequence(), .rows = rows, .uncommitted = true};
    const Result<StepOutput> output = engine.step({.groups = {&group, 1}, .hidden = hidden.data()});
    if (!output) refused(output.error());
    if (k == 0) {
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
    const std::vector<int32_t> path = read_reference_numbers(expected, fmt::format("path.{}.slots", k));
    if (const Status status = engine.commit(session->sequence(), path); !status) refused(status.error());
    const std::vector<TokenId> after = read_reference_ids(expected, fmt::format("path.{}.ids", k), config);
    std::vector<float> ours;
    for (const TokenId token : after) {
      const Row row{.token = token, .parent = -1, .want_logits = true};
      const SequenceRows one{.sequence = session->sequence(), .rows = {&row, 1}};
      const Result<StepOutput> next = engine.step({.groups = {&one, 1}});
      if (!next) refused(next.error());
      const std::vector<float> logits = all_logits(*next);
      ours.insert(ours.end(), logits.begin(), logits.end());
    }
    const std::string name = fmt::format("path.{}.logits", k);
    checks.push_back(check_logits(
        name, ours, read_reference_rows(expected, name, config.n_vocab, after.size()), config.n_vocab));
  }
  return checks;
}

std::vector<DraftCheck> check_drafter(const GgufFile& file, const ModelConfig& config,
                                      const std::string& draft, const GgufFile& expected,
                                      const EngineOptions& options) {
  if (options.device.kind == DeviceChoice::Kind::Gpu)
    throw ConfigError("drafting runs on the processor only so far; use --device cpu");
  if (draft == "mtp" && config.n_nextn == 0)
    throw ConfigError("--draft mtp: this model has no next-token block");
  ThreadPool pool({.n_threads = options.n_threads, .pin = options.pin_threads});
  const Weights weights = Weights::load(config, file, options.repack, pool, {});
  const DrafterOptions drafter{.n_ctx = 1024,
                               .n_sequences = 1,
                               .k_type = options.k_type.value_or(KvType::F32),
                               .v_type = options.v_type.value_or(KvType::F32),
                               .isa = options.isa.value_or(best_isa()),
                               .repack = options.repack};
  if (draft == "mtp") return check_mtp(config, weights, expected, drafter, pool);
  const GgufFile drafter_file = open_drafter(draft);
  return check_dflash(drafter_file, config, weights, expected, drafter, pool);
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
  return out.dump(2) + "\n";
}

}  // namespace thermo
