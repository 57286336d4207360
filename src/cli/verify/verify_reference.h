// Reference outputs to verify against, and how far two sets of outputs are apart.
//
// A reference file is a GGUF file with the tensors `ids` (i32), `logits` [n_tokens, n_vocab] and, optionally,
// `hidden.0` .. `hidden.L` [n_tokens, n_embd]: 0 is the embedding, k the output of layer k, the last one
// comes after the final norm.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "model/step.h"

namespace thermo {

class GgufFile;

// What a model computes for a prompt.
struct Outputs {
  std::vector<float> logits;               // [n_tokens][n_vocab]
  std::vector<std::vector<float>> hidden;  // [n_layer + 1] of [n_tokens][n_embd]; empty: not recorded
};

struct Reference {
  std::vector<TokenId> ids;
  Outputs outputs;
};

// Throws LoadError: a tensor is missing, or does not fit the model.
Reference read_reference(const GgufFile& file, const ModelConfig& config);

// Tensors of such a file, each checked. Throw LoadError.
std::vector<int32_t> read_reference_numbers(const GgufFile& file, const std::string& name);
std::vector<TokenId> read_reference_ids(const GgufFile& file, const std::string& name,
                                        const ModelConfig& config);
std::vector<float> read_reference_rows(const GgufFile& file, const std::string& name, int row_size,
                                       size_t n_rows);

struct TensorError {
  double largest = 0.0;   // largest |ours - reference|; infinite when ours is no number somewhere
  double relative = 0.0;  // that, over the standard deviation of the reference, or its size if it is constant
  int row = 0;            // token where it is
  double rms = 0.0;  // root mean square of the error, over that deviation: small when few tokens are off, as
                     // after a router's near tie went the other way
};
TensorError compare_tensor(std::span<const float> ours, std::span<const float> reference, int row_size);

// Rows whose largest element is the same one.
int count_equal_argmax(std::span<const float> ours, std::span<const float> reference, int row_size);

}  // namespace thermo
