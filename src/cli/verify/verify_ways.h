// The ways in which verify runs a prompt. They differ in how its tokens are put into steps and must not
// differ in what comes out.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "cli/verify/verify_reference.h"
#include "engine/engine.h"

namespace thermo {

// Uses sequences 0 and 1 of the engine; needs n_ctx >= prompt + kVerifyDraftRows.
inline constexpr int kVerifyDraftRows = 16;

class VerifyWays {
 public:
  // Throws ThermoError when the engine has fewer than two sequences.
  explicit VerifyWays(Engine& engine);

  // Steps of `chunk` tokens, the last one shorter.
  Outputs in_chunks(std::span<const TokenId> ids, int chunk, bool want_hidden);

  // The prompt as sequence 0 beside another text as sequence 1, in steps that hold rows of both.
  Outputs beside_another(std::span<const TokenId> ids);

  // As drafting does it: each step holds a random tree in which the true continuation is one path, and
  // commits a random part of that path. Also follows a wrong branch now and then and checks its end against a
  // run of that text alone: the worst such difference is added to `branch_errors`.
  Outputs as_trees(std::span<const TokenId> ids, uint64_t seed, std::vector<TensorError>& branch_errors);

 private:
  struct Tree;
  Tree random_tree(std::span<const TokenId> rest);
  TensorError check_branch(std::span<const TokenId> past, const Tree& tree, int leaf,
                           std::span<const float> logits);
  StepOutput step(std::span<const SequenceRows> groups, float* hidden = nullptr);

  Engine& engine_;
  Session first_, second_;
  std::mt19937_64 random_;
};

}  // namespace thermo
