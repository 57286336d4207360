// Blocks that architectures have in common, with the names and shapes that the file format gives them.
#pragma once

#include <string>
#include <vector>

#include "model/arch/keys.h"
#include "model/model_config.h"

namespace thermo {

// Keys that architectures share; each fills its part of the config.
std::vector<int> read_heads(const Keys& keys, const ModelConfig& config);  // query heads of each layer
void read_experts(const Keys& keys, ModelConfig& config);                  // sets route, n_ff_expert

std::string tensor_name(int layer, std::string_view name);  // "blk.3.attn_q.weight" for "attn_q.weight"

// The embedding before the layers and the head after them.
void add_ends(const Keys& keys, ModelConfig& config);

struct AttentionOptions {
  int n_head = 0;
  int window = 0;
  HeadGate gate = HeadGate::None;
  int rope = 0;
};
Block attention_block(const ModelConfig& config, int layer, const AttentionOptions& options);

Block delta_net_block(const ModelConfig& config, int layer);

// `norm`: the norm before the FFN has two names.
Block dense_block(const ModelConfig& config, int layer, std::string_view norm);

struct RoutedOptions {
  std::string_view norm;
  bool router_bias = false;    // added for the choice only
  bool shared_weight = false;  // the shared expert is multiplied by sigmoid(weight . h)
};
Block routed_block(const Keys& keys, const ModelConfig& config, int layer, const RoutedOptions& options);

// Makes the last layer the next-token block: its input before what the layer has, its own norm and head
// after it.
void add_nextn(const Keys& keys, ModelConfig& config);

}  // namespace thermo
