#include "model/dense_parts.h"

#include <algorithm>

#include "gguf/gguf_file.h"

namespace thermo {
namespace {

// What kernels multiply at once; a smaller block is used only if this does not divide.
constexpr int kChunk = 256;
// On a GPU, few rows of a large matrix in one piece are added up in so many parts (linear_few_parts()), so
// with the same parts a row has the same bits wherever they are.
constexpr int kSameParts = 4;
// Where that is not possible: a row has a sum for each part until they are added up, so many cost
// activations, and few are hard to deal.
constexpr int kMostParts = 20;
constexpr int kLeastFloats = 16;  // of types without blocks: a panel

int block_of(DType dtype) {
  return std::max(dtype_info(dtype).block_elements, kLeastFloats);
}

// The most parts whose width is a multiple of `unit`; below 2: none.
int most_parts(int n_ff, int unit) {
  for (int n = kMostParts; n > 1; --n)
    if (n_ff % n == 0 && n_ff / n % unit == 0) return n;
  return 0;
}

}  // namespace

int dense_parts(const ModelConfig& config, const GgufFile& file) {
  if (config.route.n_expert > 0) return 0;
  int n_ff = 0, block = kLeastFloats;
  for (size_t l = 0; l < static_cast<size_t>(config.n_layer); ++l) {
    const Block* const ffn = config.network.layers[l].find(BlockKind::FeedForward);
    const TensorSpec* const down = ffn != nullptr ? ffn->find(Role::FfnDown) : nullptr;
    const GgufTensor* const tensor = down != nullptr ? file.find_tensor(down->name) : nullptr;
    if (tensor == nullptr || ffn->has(Role::SharedWeight) || (n_ff != 0 && n_ff != down->shape[0])) return 0;
    n_ff = down->shape[0];
    block = std::max(block, block_of(tensor->dtype));
  }
  if (n_ff % (kSameParts * kChunk) == 0) return kSameParts;
  const int n = most_parts(n_ff, kChunk);
  return n > 0 || block >= kChunk ? n : most_parts(n_ff, block);
}

void cut_dense(ModelConfig& config, int n_parts) {
  config.route = {.gating = Gating::Every,
                  .n_expert = n_parts,
                  .n_expert_used = n_parts,
                  .normalize = false,
                  .weights_scale = 1.0f};
  config.n_ff_expert = config.n_ff / n_parts;
  for (size_t l = 0; l < static_cast<size_t>(config.n_layer); ++l)
    for (Block& block : config.network.layers[l].blocks) {
      if (block.kind != BlockKind::FeedForward) continue;
      block.route = config.route;
      for (TensorSpec& spec : block.tensors) {
        if (spec.role != Role::FfnGate && spec.role != Role::FfnUp && spec.role != Role::FfnDown) continue;
        const bool by_outputs = spec.role != Role::FfnDown;
        spec.role = spec.role == Role::FfnGate ? Role::ExpertGate
                    : spec.role == Role::FfnUp ? Role::ExpertUp
                                               : Role::ExpertDown;
        spec.form = TensorForm::Experts;
        spec.n_parts = n_parts;
        spec.n_rows = by_outputs ? spec.shape[1] / n_parts : spec.shape[1];
      }
    }
}

}  // namespace thermo
