// A model as its file describes it: hyper-parameters, and the network that is built from them. Read from the
// metadata and validated once. Everything after this trusts them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/route_topk/route_topk.h"
#include "kernels/row_ops/row_ops.h"
#include "model/network.h"

namespace thermo {

class GgufFile;

struct ModelConfig {
  std::string arch_name;  // as in the file: the prefix of its keys
  std::string name;       // general.name, may be empty
  int n_layer = 0;        // main stack
  int n_nextn = 0;        // next-token (MTP) blocks after it, 0 or 1
  int n_embd = 0;
  int n_vocab = 0;
  int n_ctx_train = 0;
  float norm_eps = 0.0f;

  // Attention: the same in every layer, as the KV cache has it.
  int n_head_kv = 0;
  int head_dim = 0;
  std::vector<RopeConfig> ropes;  // blocks say which one they use

  // Feed-forward.
  int n_ff = 0;         // dense layers
  int n_ff_expert = 0;  // one routed expert
  int n_ff_shared = 0;  // the shared expert; 0: there is none
  RouteConfig route;

  // Gated DeltaNet.
  int ssm_taps = 0;  // convolution taps
  int ssm_dim = 0;   // key and value dim of a head
  int ssm_n_head_k = 0;
  int ssm_n_head_v = 0;

  Network network;

  bool is_moe() const { return route.n_expert > 0 && route.gating != Gating::Every; }
  bool has_parts() const { return route.n_expert > 0 && route.gating == Gating::Every; }  // dense_parts.h
  bool recurrent(int layer) const { return network.layers[static_cast<size_t>(layer)].recurrent(); }
  int n_attention_layers() const;  // main stack
  int n_recurrent_layers() const;
  int n_routed_layers() const;
  int ssm_inner() const { return ssm_n_head_v * ssm_dim; }
  int ssm_channels() const { return (2 * ssm_n_head_k + ssm_n_head_v) * ssm_dim; }
  // Floats between rows of channels in memory: an odd number of cache lines. With a power of two (8192
  // channels) one head's columns of all rows would share a few sets of the cache.
  int ssm_channel_stride() const { return ((ssm_channels() + 15) / 16 | 1) * 16; }
  int max_n_head() const { return network.max_n_head(); }
  int max_n_ff() const;  // widest FFN of any kind, main stack; of one that is cut, a part
  int n_kv_dim() const { return n_head_kv * head_dim; }

  // "qwen35moe 35B.A3B": family and rough size, for tables.
  std::string describe(uint64_t n_params) const;
};

// Throws LoadError: unknown architecture, missing key, a value out of range. `assumed`: tensors that the file
// will have; for one whose tensors are yet to be written.
ModelConfig read_model_config(const GgufFile& file, std::span<const std::string_view> assumed = {});

}  // namespace thermo
