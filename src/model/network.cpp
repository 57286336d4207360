#include "model/network.h"

#include <fmt/format.h>

#include <algorithm>

namespace thermo {
namespace {

const char* gate_name(HeadGate gate) {
  switch (gate) {
    case HeadGate::None:
      return "no gate";
    case HeadGate::SigmoidElement:
      return "sigmoid gate by element";
    case HeadGate::SoftplusHead:
      return "softplus gate by head";
    case HeadGate::SoftplusElement:
      return "softplus gate by element";
  }
  return "";
}

const char* router_name(Gating gating) {
  switch (gating) {
    case Gating::Every:
      return "no";
    case Gating::Softmax:
      return "softmax";
    case Gating::Sigmoid:
      return "sigmoid";
    case Gating::SoftmaxSelected:
      return "softmax of the chosen";
    case Gating::SqrtSoftplus:
      return "sqrt softplus";
  }
  return "";
}

std::string describe_feed_forward(const Block& block) {
  const TensorSpec* const common = block.find(Role::FfnGate);
  if (!block.routed()) return fmt::format("FFN {}", rows_of(*common));
  if (block.route.gating == Gating::Every)
    return fmt::format("FFN {} in {} parts", block.find(Role::ExpertGate)->shape[1], block.route.n_expert);
  std::string text =
      fmt::format("experts {} of {}, {} wide, {} router{}", block.route.n_expert_used, block.route.n_expert,
                  rows_of(*block.find(Role::ExpertGate)), router_name(block.route.gating),
                  block.has(Role::RouterBias) ? " with bias" : "");
  if (!common) return text + ", no shared expert";
  return text + fmt::format(", {} expert {}", block.has(Role::SharedWeight) ? "gated shared" : "shared",
                            rows_of(*common));
}

// "0-2, 4-6, 8".
std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += end - i == 1 ? fmt::format("{}", numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace

const TensorSpec* Block::find(Role role) const {
  for (const TensorSpec& tensor : tensors)
    if (tensor.role == role) return &tensor;
  return nullptr;
}

const Block* Layer::find(BlockKind kind) const {
  for (const Block& block : blocks)
    if (block.kind == kind) return &block;
  return nullptr;
}

bool Layer::routed() const {
  const Block* const ffn = find(BlockKind::FeedForward);
  return ffn != nullptr && ffn->routed();
}

int rows_of(const TensorSpec& tensor) {
  if (tensor.n_rows > 0) return tensor.n_rows;
  return tensor.shape.size() > 1 ? tensor.shape[1] : 1;
}

int Network::widest(Role role) const {
  int most = 0;
  for (const Layer& layer : layers)
    for (const Block& block : layer.blocks)
      if (const TensorSpec* tensor = block.find(role)) most = std::max(most, rows_of(*tensor));
  return most;
}

int Network::max_n_head() const {
  int most = 0;
  for (const Layer& layer : layers)
    for (const Block& block : layer.blocks) most = std::max(most, block.n_head);
  return most;
}

std::optional<size_t> first_block_of_single_rows(const Network& network, int n_layer) {
  const std::vector<Block>& blocks = network.layers[static_cast<size_t>(n_layer) - 1].blocks;
  const auto mixes = [](const Block& block) {
    return block.kind == BlockKind::Attention || block.kind == BlockKind::DeltaNet;
  };
  const auto is_tap = [](const Block& block) { return block.kind == BlockKind::Tap; };
  const auto first = std::find_if(blocks.rbegin(), blocks.rend(), mixes).base();
  if (std::any_of(first, blocks.end(), is_tap) ||
      std::any_of(network.output.begin(), network.output.end(), is_tap))
    return std::nullopt;
  return static_cast<size_t>(first - blocks.begin());
}

void insert_taps(Network& network, int n_layer, const std::vector<int>& states) {
  for (const int state : states) {
    Block tap{.kind = BlockKind::Tap, .tensors = {}};
    tap.tap = network.n_taps++;
    if (state < n_layer) {
      auto& blocks = network.layers[static_cast<size_t>(state)].blocks;
      blocks.insert(blocks.begin(), std::move(tap));
    } else if (state == last_stream(n_layer)) {
      network.layers[static_cast<size_t>(n_layer) - 1].blocks.push_back(std::move(tap));
    } else {
      tap.tap_of = TapOf::Normed;
      network.output.push_back(std::move(tap));
    }
  }
}

std::string describe_block(const Block& block) {
  switch (block.kind) {
    case BlockKind::Embedding:
      return "embedding";
    case BlockKind::Attention: {
      std::string text = fmt::format("attention {} heads, {}", block.n_head, gate_name(block.gate));
      if (block.window > 0) text += fmt::format(", window {}", block.window);
      if (!block.has(Role::QNorm)) text += ", heads not normed";
      return text;
    }
    case BlockKind::DeltaNet:
      return fmt::format("DeltaNet {} heads", block.find(Role::Decay)->shape[0]);
    case BlockKind::FeedForward:
      return describe_feed_forward(block);
    case BlockKind::Tap:
      return fmt::format("tap {}", block.tap);
    case BlockKind::Head:
      return "norm and head";
    case BlockKind::NextnInput:
      return "next-token input";
    case BlockKind::Features:
      return "features";
  }
  return "";
}

std::vector<LayerLine> describe_layers(const Network& network) {
  std::vector<std::pair<std::string, std::vector<int>>> kinds;
  for (size_t il = 0; il < network.layers.size(); ++il) {
    std::vector<std::string> texts;
    for (const Block& block : network.layers[il].blocks) texts.push_back(describe_block(block));
    const std::string text = fmt::format("{}", fmt::join(texts, " | "));
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.first == text; });
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {text, {}});
    kind->second.push_back(static_cast<int>(il));
  }
  std::vector<LayerLine> lines;
  for (const auto& [text, layers] : kinds)
    lines.push_back({static_cast<int>(layers.size()), ranges(layers), text});
  return lines;
}

}  // namespace thermo
