// What a network computes, as a value: per layer a short list of blocks, each with its weights by name and
// shape and with its options. It is built from the keys of a file (arch/), and everything else follows from
// it: what is loaded, what memory is planned, what `inspect` prints, what a step runs on either back end. A
// back end never asks for the architecture; where it would have to, a field is missing here.
//
// Pure: no weights, no device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/head_gate.h"
#include "kernels/route_topk/route_topk.h"

namespace thermo {

enum class BlockKind : uint8_t {
  Embedding,    // x = row of the token
  Attention,    // x += output(gate(attention(norm(x))))
  DeltaNet,     // x += output(gated delta rule(norm(x)))
  FeedForward,  // x += FFN that every row takes + chosen experts, of norm(x)
  Tap,          // copies the rows' state into a hidden-state buffer
  Head,         // logits = output . norm(x)
  NextnInput,   // the next-token block's input: projection of (token, trunk's state)
  Features,     // norm(projection) of some hidden states of another network, for its keys and values
};

// What a tensor is to its block.
enum class Role : uint8_t {
  Norm,  // of the block's input

  Q,  // attention; twice as wide with HeadGate::SigmoidElement
  K,
  V,
  Gate,
  Output,  // DeltaNet and the head too
  QNorm,
  KNorm,

  Qkv,  // DeltaNet
  Z,
  Alpha,
  Beta,
  Conv,
  Decay,
  TimeStep,
  InnerNorm,

  Router,  // feed-forward
  RouterBias,
  FfnGate,  // of the FFN that every row takes: a dense layer's, or the shared expert
  FfnUp,
  FfnDown,
  SharedWeight,
  ExpertGate,
  ExpertUp,
  ExpertDown,

  Embedding,        // embedding and next-token input
  StateProjection,  // and features
  EmbeddingNorm,
  StateNorm,
};
inline constexpr int kRoles = static_cast<int>(Role::StateNorm) + 1;

// How a tensor is used.
enum class TensorForm : uint8_t {
  Matrix,   // multiplied: repacked into panels
  Lookup,   // a matrix whose rows are looked up
  Vector,   // small, kept as floats
  Experts,  // [inputs, outputs, experts]: one matrix of each routed expert
};

struct TensorSpec {
  Role role{};
  TensorForm form{};
  std::string name;
  std::vector<int> shape;  // as in the file: shape[0] is contiguous
  // Experts only: the rows of each expert that are meant, where gate and up share a tensor.
  int row_begin = 0;
  int n_rows = 0;
  // Experts only: a matrix [inputs, outputs] is cut into so many, by outputs (gate, up) or inputs (down).
  int n_parts = 0;
  // Not in this file: a drafter has it of its target.
  bool of_target = false;
};

enum class TapOf : uint8_t {
  Stream,  // the residual stream at this place in the list
  Normed,  // what the norm of the head made of it
};

struct Block {
  BlockKind kind{};
  std::vector<TensorSpec> tensors;  // in the order a step reads them

  // Attention.
  int n_head = 0;
  int window = 0;  // 0: full
  HeadGate gate = HeadGate::None;
  int rope = 0;            // which of ModelConfig::ropes
  bool both_ways = false;  // the rows of a step see each other, later ones too
  // FeedForward: n_expert 0 where every row takes the same FFN and nothing else. Gating::Every: that FFN, cut
  // into parts that can lie in different places (dense_parts.h).
  RouteConfig route{};
  // Tap: which of the hidden states of a step.
  int tap = 0;
  TapOf tap_of = TapOf::Stream;

  const TensorSpec* find(Role role) const;
  bool has(Role role) const { return find(role) != nullptr; }
  bool routed() const { return route.n_expert > 0; }
};

struct Layer {
  std::vector<Block> blocks;

  const Block* find(BlockKind kind) const;  // the first one; nullptr: none
  bool recurrent() const { return find(BlockKind::DeltaNet) != nullptr; }
  bool routed() const;
};

struct Network {
  std::vector<Block> input;
  std::vector<Layer> layers;  // the main stack, then the next-token block's
  std::vector<Block> output;
  // What becomes keys and values of every layer, before the step's own: features of another network. A
  // drafter has them.
  std::vector<Block> features;
  int n_taps = 0;

  // The most outputs of any matrix in that role; 0: there is none.
  int widest(Role role) const;
  int max_n_head() const;
};

// The shape's outputs.
int rows_of(const TensorSpec& tensor);

// Makes a step leave hidden states: `states` is increasing, k is the input of layer k (0: the embedding), and
// the number of layers of the main stack is what the head's norm makes of the last one; last_stream() is the
// last one itself. They come in that order. Before weights are loaded: weights go by block.
void insert_taps(Network& network, int n_layer, const std::vector<int>& states);
constexpr int last_stream(int n_layer) {
  return n_layer + 1;
}
// The state that is the output of a layer of the main stack.
constexpr int output_state(int layer, int n_layer) {
  return layer + 1 == n_layer ? last_stream(n_layer) : layer + 1;
}

// In the last layer of the main stack, the first block after those that mix rows: from there on, a row
// matters to its own logits only. None: somebody takes a hidden state of every row after it.
std::optional<size_t> first_block_of_single_rows(const Network& network, int n_layer);

// "attention 16 heads of ..., gate ..." for tables; n_layer lines at most, layers that are alike on one.
std::string describe_block(const Block& block);
struct LayerLine {
  int n_layers;
  std::string layers;  // "0-2, 4-6"
  std::string text;
};
std::vector<LayerLine> describe_layers(const Network& network);

}  // namespace thermo
