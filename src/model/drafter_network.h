// Networks that draft for another one: its own next-token block, and DFlash drafters. Both are ordinary
// networks of attention layers, so a model runs them; only their input comes from elsewhere.
#pragma once

#include <string_view>
#include <vector>

#include "model/model_config.h"

namespace thermo {

class GgufFile;
struct ModelShape;

// The next-token block of `target` as a network of its own: a step reads tokens and the target's states after
// its final norm, and gives the block's own as its only tap. REQUIRES: target.n_nextn > 0. Its weights are
// Weights::of_nextn().
ModelConfig nextn_network(const ModelConfig& target);

// A DFlash drafter: fills a block of masked positions in one pass. Keys and values of what is committed come
// from hidden states of its target (Model::append_features), those of the block from itself. Its one tap is
// the state after its last norm.
struct DflashConfig {
  ModelConfig model;
  int block = 0;            // slots: the root and the masked ones
  int32_t mask = 0;         // the token of a masked slot
  std::vector<int> layers;  // of the target, counted from 0, whose outputs are the features
  std::vector<int> states;  // the same as insert_taps() counts them
};

// Published drafters, in the naming of llama.cpp.
inline constexpr std::string_view kDflashName = "dflash";
// The magnitude of YaRN itself, instead of the one that follows from the factor. Checkpoints may have it, and
// it gets this key; converters write none.
inline constexpr std::string_view kRopeMagnitude = "rope.scaling.attention_factor";
std::vector<ModelShape> dflash_shapes();

// Whether the file is a drafter by its architecture.
bool is_drafter(const GgufFile& file);
// Both naming schemes. Throws LoadError: no drafter, a kind that is not known, damaged, or made for a model
// of other width, vocabulary or depth. Its weights are Weights::of_drafter().
DflashConfig read_dflash_config(const GgufFile& file, const ModelConfig& target);

}  // namespace thermo
