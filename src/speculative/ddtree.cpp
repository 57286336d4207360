#include "speculative/ddtree.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/check.h"

namespace thermo {
namespace {

// Whether `a` is taken after `b`: the order of a heap whose top is taken first.
bool later(const DraftNode& a, const DraftNode& b) {
  if (a.score != b.score) return a.score < b.score;
  return std::tie(a.depth, a.rank, a.parent) > std::tie(b.depth, b.rank, b.parent);
}

}  // namespace

void DraftTreeBuilder::build(const DraftCandidates& candidates, int budget, std::vector<DraftNode>& nodes,
                             float repeat) {
  THERMO_CHECK(budget >= 0 && budget <= kMaxDraftNodes, "a draft tree of more nodes than a step takes");
  nodes.clear();
  if (budget == 0) return;
  nodes.reserve(kMaxDraftNodes);
  heap_.clear();
  heap_.reserve(4 * kMaxDraftNodes + 4);
  const auto is_repeated = [&](int parent, int32_t token) {
    return repeat < 0.0f && parent > 0 && nodes[static_cast<size_t>(parent) - 1].token == token;
  };
  // Two positions that both have the token for sure have it both: at least by so much.
  const auto repeated = [&](int parent, int depth, float logprob) {
    const DraftNode& before = nodes[static_cast<size_t>(parent) - 1];
    const float p = std::exp(candidates.logprob(depth - 1, before.rank));
    const float both = p + std::exp(logprob) - 1.0f;
    return both > 0.0f ? std::max(logprob + repeat, std::log(both / p)) : logprob + repeat;
  };
  const auto push = [&](float parent_score, int parent, int depth, int rank) {
    for (; depth <= candidates.n_depths && rank < candidates.n_ranks; ++rank) {
      const float logprob = candidates.logprob(depth, rank);
      if (!std::isfinite(logprob)) return;
      const int32_t token = candidates.token(depth, rank);
      const bool again = is_repeated(parent, token);
      heap_.push_back({.token = token,
                       .parent = parent,
                       .depth = depth,
                       .rank = rank,
                       .score = parent_score + (again ? repeated(parent, depth, logprob) : logprob)});
      std::push_heap(heap_.begin(), heap_.end(), later);
      if (!again) return;  // else the next one may be heavier
    }
  };
  const auto score_of = [&](int slot) {
    return slot == 0 ? 0.0f : nodes[static_cast<size_t>(slot) - 1].score;
  };
  push(0.0f, 0, 1, 0);
  while (!heap_.empty() && static_cast<int>(nodes.size()) < budget) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const DraftNode node = heap_.back();
    heap_.pop_back();
    nodes.push_back(node);
    if (!is_repeated(node.parent, node.token))
      push(score_of(node.parent), node.parent, node.depth, node.rank + 1);    // its next sibling
    push(node.score, static_cast<int32_t>(nodes.size()), node.depth + 1, 0);  // its first child
  }
}

}  // namespace thermo
