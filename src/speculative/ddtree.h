// The draft tree with the most expected hits, from what a drafter says about each position.
//
// A drafter gives, for each of L positions after the root, K candidates with their log-probabilities,
// independent of the other positions. The weight of a node is the product of the probabilities along its
// path. A child never weighs more than its parent, so the `budget` heaviest nodes form a tree, and taking
// nodes by weight is optimal: the sum of the weights is the number of drafted tokens that will be accepted,
// by the drafter's own estimate.
//
// Pure: no model, no device. A chain is the case K = 1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace thermo {

inline constexpr int kMaxDraftNodes = 63;  // with the root, the 64 rows of an uncommitted step

// Candidates of position d (1..n_depths), best first: token(d, k) and logprob(d, k), k < n_ranks.
struct DraftCandidates {
  int n_depths = 0;
  int n_ranks = 0;
  std::span<const int32_t> tokens;  // [n_depths][n_ranks]
  std::span<const float> logprobs;  // the same, falling; -inf: no such candidate

  int32_t token(int depth, int rank) const { return tokens[at(depth, rank)]; }
  float logprob(int depth, int rank) const { return logprobs[at(depth, rank)]; }

 private:
  size_t at(int depth, int rank) const {
    return static_cast<size_t>(depth - 1) * static_cast<size_t>(n_ranks) + static_cast<size_t>(rank);
  }
};

struct DraftNode {
  int32_t token = 0;
  int32_t parent = 0;  // slot; 0 is the root, slot i is nodes[i - 1]
  int32_t depth = 1;
  int32_t rank = 0;
  float score = 0.0f;  // log-probability of the path
};

// At most `budget` nodes, heaviest first, so that parents precede their children. Of equal weights the lower
// depth comes first, then the lower rank, then the lower parent. NaN and -inf candidates end their list.
// REQUIRES: 0 <= budget <= kMaxDraftNodes. `nodes` is overwritten; it allocates nothing after the first call.
//
// `repeat`: log-weight of a node that has its parent's token. A drafter that guesses positions independently
// often knows a token and not whether it comes now or next; its trees then hold the token twice in a row,
// which is what the text almost never has. 0: positions are taken as they are.
class DraftTreeBuilder {
 public:
  void build(const DraftCandidates& candidates, int budget, std::vector<DraftNode>& nodes,
             float repeat = 0.0f);

 private:
  std::vector<DraftNode> heap_;
};

}  // namespace thermo
