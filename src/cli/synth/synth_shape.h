// What `synth` writes: the keys of a published model, and the tensors that follow from its description.
// Pure: no file is touched here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_writer.h"
#include "model/arch/architecture.h"
#include "tensor/dtype.h"

namespace thermo {

// A published model or drafter: its keys as the architecture gives them, and what follows from them.
struct SynthShape {
  std::string_view name;
  std::string_view arch;  // general.architecture
  bool nextn;             // files may have a next-token block
  bool drafter;
  ModelShape model;
  ModelConfig config;

  // Layers of the model; of a drafter: what the model that it drafts for must have.
  int n_layer() const;
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
  // 0: all; fewer: the first ones, with the types they have in the whole model. A drafter: for a model of
  // that many.
  int n_layer = 0;
  int n_vocab = 0;  // 0: as the model
  int n_ctx = 0;    // 0: as the model
  bool nextn = false;
  double skew = 0.0;
  double locality = 0.0;
  uint64_t seed = 1;
};

// With locality so many tokens with ids in a row are of one topic; see synth_fill.h.
inline constexpr int kTopicTokens = 64;

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
