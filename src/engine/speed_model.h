// How fast a model will be, computed from the work of a token and from what this machine was measured to do.
// Pure; the formula is in docs/memory.md.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "model/model_config.h"
#include "model/weights.h"
#include "tensor/dtype.h"

namespace thermo {

// Of the matrices of one type, for one token.
struct TypeWork {
  DType dtype{};
  uint64_t core_bytes = 0, expert_bytes = 0;  // what a decoded token reads; experts: the routed ones
  double core_macs = 0.0, expert_macs = 0.0;  // multiply-adds of a prompt's token, which needs no logits
};

struct TokenWork {
  std::vector<TypeWork> types;
  uint64_t state_bytes = 0;  // recurrent state, which is read and written
  // In floats, of a prompt's token: the recurrence; scores and sums of attention over kPromptRows tokens.
  double state_macs = 0.0, attention_macs = 0.0;
  int n_layers = 0;
  double expert_share = 0.0;  // experts used of all: rows of a prompt that one expert sees, for each row
};
inline constexpr int kPromptRows = 512;
TokenWork token_work(const ModelConfig& config, const Weights& weights);

// What all threads do together.
struct TypeRates {
  double one_row = 0.0;    // bytes of weights a second with one activation row, from memory
  double few_rows = 0.0;   // multiply-adds a second with kFewRows rows, from memory
  double many_rows = 0.0;  // with kManyRows, from the caches
};
inline constexpr int kFewRows = 16, kManyRows = 256;

struct MachineRates {
  std::map<DType, TypeRates> types;
  double read = 0.0;        // bytes a second from memory
  double small_s = 0.0;     // that a small product takes beyond its bytes
  double cache_gain = 1.0;  // how much faster one row is when the weights stay in the caches
};

// A card, and what reaches it.
struct CardRates {
  double read = 0.0;  // bytes a second from its memory
  int n_multiprocessors = 0;
  bool warpgroups = false;  // it multiplies prompts with dense matrices by warpgroups (9.0)
  double link = 0.0;        // bytes a second from main memory
  double hot_share = 1.0;   // of the experts' bytes; the rest is cold
  bool parts = false;       // the experts are parts of dense FFNs: every token uses all of them
  int n_batch = 2048;       // most rows of a prompt chunk
};

// Tokens a second: of a prompt of kPromptRows tokens, and of an answer in a short context.
struct SpeedEstimate {
  double prefill = 0.0, decode = 0.0;
};

// On the processor, prompts in chunks of at most `n_batch` rows. `cached`: the weights of a token fit into
// the caches.
SpeedEstimate expected_speed(const TokenWork& work, const MachineRates& machine, int n_batch, bool cached);
// On a card, cold experts computed by the processor unless the link brought them in time, and sent to the
// card for prompts.
SpeedEstimate expected_speed(const TokenWork& work, const MachineRates& machine, const CardRates& card);

}  // namespace thermo
