// What `synth` writes: the shapes of real models as data, and the tensors and metadata that follow from them.
// Pure: no file is touched here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_writer.h"
#include "model/model_config.h"
#include "tensor/dtype.h"

namespace thermo {

struct SynthShape {
  const char* name;
  Arch arch;
  int n_layer, n_embd, n_vocab, n_ctx;
  int n_head, n_head_window;  // of full and of windowed attention layers (laguna)
  int n_head_kv, head_dim;
  int n_rot, n_rot_window;
  int n_ff;                                  // dense layers
  int n_expert, n_expert_used, n_ff_expert;  // 0: no experts; the shared expert is as wide as a routed one
  int ssm_dim, ssm_n_head_k, ssm_n_head_v;
  int window;
  bool tied;  // token_embd is the output matrix too
};

std::span<const SynthShape> synth_shapes();

// The types of a file, as a quantiser names them.
struct SynthQuant {
  const char* name;
  DType plain;  // most matrices
  DType more;   // value, down and qkv matrices of the layers that get more bits
  DType embedding;
  DType output;
  uint32_t file_type;  // general.file_type
};

std::span<const SynthQuant> synth_quants();

struct SynthOptions {
  const SynthShape* shape = nullptr;
  const SynthQuant* quant = nullptr;
  int n_layer = 0;  // 0: all; fewer: the first ones, with the types they have in the whole model
  int n_vocab = 0;  // 0: as the model
  int n_ctx = 0;    // 0: as the model
  bool nextn = false;
  double skew = 0.0;
  uint64_t seed = 1;
};

// How the values of a tensor are drawn.
enum class SynthFill {
  Matrix,     // normal, deviation `scale`
  Embedding,  // the same, with the constant channels of synth_fill.h when there is skew
  Router,     // normal, with a part along the constant channels when there is skew
  Norm,       // near 1
  Decay,      // ssm_a: -16 .. -1
  TimeStep,   // ssm_dt.bias: softplus gives 0.001 .. 0.1
};

struct SynthTensor {
  std::string name;
  DType dtype;
  std::vector<uint64_t> dims;  // dims[0] is contiguous
  SynthFill fill;
  float scale;
  int layer;  // -1: none

  uint64_t n_rows() const;
  uint64_t n_elements() const { return dims[0] * n_rows(); }
  uint64_t n_bytes() const { return row_bytes(dtype, dims[0]) * n_rows(); }
};

// Whether the stock quantiser gives layer `il` of `n_layer` more bits.
bool gets_more_bits(int il, int n_layer);

std::vector<SynthTensor> synth_tensors(const SynthOptions& options);
void set_synth_metadata(const SynthOptions& options, GgufWriter& writer);

}  // namespace thermo
