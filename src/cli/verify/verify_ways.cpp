#include "cli/verify/verify_ways.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace thermo {
namespace {

Session open(Engine& engine) {
  Result<Session> session = engine.open_session();
  if (!session) throw ThermoError(ExitCode::Internal, "verify: " + session.error().message);
  return std::move(*session);
}

std::vector<Row> chain(std::span<const TokenId> ids) {
  std::vector<Row> rows;
  for (size_t i = 0; i < ids.size(); ++i)
    rows.push_back({.token = ids[i], .parent = static_cast<int32_t>(i) - 1, .want_logits = true});
  return rows;
}

void copy_row(std::span<const float> row, size_t index, std::vector<float>& rows) {
  std::copy(row.begin(), row.end(), rows.begin() + static_cast<ptrdiff_t>(index * row.size()));
}

}  // namespace

struct VerifyWays::Tree {
  std::vector<Row> rows;
  std::vector<int32_t> true_path;  // rows that hold the true continuation
};

VerifyWays::VerifyWays(Engine& engine) : engine_(engine), first_(open(engine)), second_(open(engine)) {}

StepOutput VerifyWays::step(std::span<const SequenceRows> groups, float* hidden) {
  const StepBatch batch{.groups = groups, .hidden = hidden};
  Result<StepOutput> output = engine_.step(batch);
  if (!output) throw ThermoError(ExitCode::Internal, "verify: a step was refused: " + output.error().message);
  if (output->rows.size() != static_cast<size_t>(batch.n_rows()))
    throw ThermoError(ExitCode::Internal, fmt::format("verify: {} rows gave {} rows of logits",
                                                      batch.n_rows(), output->rows.size()));
  return *output;
}

Outputs VerifyWays::in_chunks(std::span<const TokenId> ids, int chunk, bool want_hidden) {
  const ModelConfig& config = engine_.config();
  const auto n_embd = static_cast<size_t>(config.n_embd), n_vocab = static_cast<size_t>(config.n_vocab);
  const size_t n_hidden = want_hidden ? static_cast<size_t>(config.network.n_taps) : 0;
  first_.clear();
  Outputs out;
  out.logits.resize(ids.size() * n_vocab);
  out.hidden.assign(n_hidden, std::vector<float>(ids.size() * n_embd));
  std::vector<float> hidden;
  std::vector<Row> rows;
  for (size_t at = 0; at < ids.size(); at += rows.size()) {
    rows = chain(ids.subspan(at, std::min(static_cast<size_t>(chunk), ids.size() - at)));
    hidden.resize(n_hidden * rows.size() * n_embd);
    const SequenceRows group{.sequence = first_.sequence(), .rows = rows};
    const StepOutput output = step({&group, 1}, want_hidden ? hidden.data() : nullptr);
    for (size_t i = 0; i < rows.size(); ++i) copy_row(output.rows[i].logits, at + i, out.logits);
    for (size_t k = 0; k < n_hidden; ++k)
      std::copy_n(hidden.begin() + static_cast<ptrdiff_t>(k * rows.size() * n_embd), rows.size() * n_embd,
                  out.hidden[k].begin() + static_cast<ptrdiff_t>(at * n_embd));
  }
  return out;
}

Outputs VerifyWays::beside_another(std::span<const TokenId> ids) {
  constexpr size_t kChunks[] = {5, 1, 12};
  first_.clear();
  second_.clear();
  Outputs out;
  out.logits.resize(ids.size() * static_cast<size_t>(engine_.config().n_vocab));
  const std::vector<TokenId> other(ids.rbegin(), ids.rend());
  size_t at = 0, other_at = 0;
  for (size_t turn = 0; at < ids.size(); ++turn) {
    const size_t n = std::min(kChunks[turn % 3], ids.size() - at);
    const size_t n_other = std::min(kChunks[(turn + 1) % 3], other.size() - other_at);
    // Both orders, so that no sequence is always in front.
    const bool other_first = turn % 2 == 1 && n_other > 0;
    const std::vector<Row> rows = chain(ids.subspan(at, n)),
                           other_rows = chain(std::span(other).subspan(other_at, n_other));
    SequenceRows groups[] = {{.sequence = first_.sequence(), .rows = rows},
                             {.sequence = second_.sequence(), .rows = other_rows}};
    if (other_first) std::swap(groups[0], groups[1]);
    const StepOutput output = step(std::span(groups).first(n_other > 0 ? 2 : 1));
    for (size_t i = 0; i < n; ++i)
      copy_row(output.rows[other_first ? n_other + i : i].logits, at + i, out.logits);
    at += n;
    other_at += n_other;
  }
  return out;
}

// A chain of the next true tokens, with wrong tokens hung on at random. Wrong rows lie between the true ones,
// so that neither rows nor positions are a plain sequence.
VerifyWays::Tree VerifyWays::random_tree(std::span<const TokenId> rest) {
  const size_t n_true = std::min<size_t>(rest.size(), 1 + random_() % 6);
  Tree tree;
  while (tree.rows.size() < kVerifyDraftRows) {
    const bool is_true =
        tree.true_path.size() < n_true &&
        (random_() % 2 == 0 || kVerifyDraftRows - tree.rows.size() <= n_true - tree.true_path.size());
    Row row{.token = 0, .parent = -1, .want_logits = true};
    if (is_true) {
      row.token = rest[tree.true_path.size()];
      if (!tree.true_path.empty()) row.parent = tree.true_path.back();
      tree.true_path.push_back(static_cast<int32_t>(tree.rows.size()));
    } else {
      row.token = static_cast<TokenId>(random_() % static_cast<uint64_t>(engine_.config().n_vocab));
      row.parent = static_cast<int32_t>(random_() % (tree.rows.size() + 1)) - 1;
    }
    tree.rows.push_back(row);
  }
  return tree;
}

TensorError VerifyWays::check_branch(std::span<const TokenId> past, const Tree& tree, int leaf,
                                     std::span<const float> logits) {
  std::vector<TokenId> branch;
  for (int row = leaf; row >= 0; row = tree.rows[static_cast<size_t>(row)].parent)
    branch.push_back(tree.rows[static_cast<size_t>(row)].token);
  std::vector<TokenId> text(past.begin(), past.end());
  text.insert(text.end(), branch.rbegin(), branch.rend());
  const std::vector<float> ours(logits.begin(), logits.end());  // the next step overwrites them
  second_.clear();
  if (const Status status = second_.append(text); !status)
    throw ThermoError(ExitCode::Internal, "verify: a branch was refused: " + status.error().message);
  return compare_tensor(ours, second_.logits(), engine_.config().n_vocab);
}

Outputs VerifyWays::as_trees(std::span<const TokenId> ids, uint64_t seed,
                             std::vector<TensorError>& branch_errors) {
  random_.seed(seed);
  first_.clear();
  Outputs out;
  out.logits.resize(ids.size() * static_cast<size_t>(engine_.config().n_vocab));
  size_t at = 0;
  for (size_t turn = 0; at < ids.size(); ++turn) {
    const Tree tree = random_tree(ids.subspan(at));
    const SequenceRows group{.sequence = first_.sequence(), .rows = tree.rows, .uncommitted = true};
    const StepOutput output = step({&group, 1});
    for (size_t i = 0; i < tree.true_path.size(); ++i)
      copy_row(output.rows[static_cast<size_t>(tree.true_path[i])].logits, at + i, out.logits);
    const std::span<const float> leaf = output.rows[kVerifyDraftRows - 1].logits;
    const std::vector<float> leaf_logits(leaf.begin(), leaf.end());

    const size_t n_accepted = 1 + random_() % tree.true_path.size();
    const auto path = std::span(tree.true_path).first(n_accepted);
    if (const Status status = engine_.commit(first_.sequence(), path); !status)
      throw ThermoError(ExitCode::Internal, "verify: a commit was refused: " + status.error().message);
    if (turn % 8 == 0)
      branch_errors.push_back(check_branch(ids.first(at), tree, kVerifyDraftRows - 1, leaf_logits));
    at += n_accepted;
  }
  return out;
}

}  // namespace thermo
