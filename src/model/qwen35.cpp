// qwen35moe and qwen35: Gated DeltaNet layers with full attention every fourth, experts or a dense FFN in
// each.
#include "model/forward.h"

namespace thermo {

void forward_qwen35(Forward& pass, const RopeTables& rope, float* hidden) noexcept {
  const ModelConfig& config = pass.config();
  const Weights& weights = pass.weights();
  const size_t layer_floats = static_cast<size_t>(pass.n_rows()) * static_cast<size_t>(config.n_embd);

  pass.angles(rope.full, pass.act().rope_full);
  pass.embed(weights.token_embd);
  for (int il = 0; il < config.n_layer; ++il) {
    if (hidden) pass.capture(hidden + static_cast<size_t>(il) * layer_floats);
    if (config.layers[static_cast<size_t>(il)].recurrent)
      pass.delta_net(il);
    else
      pass.attention(il, rope.full, pass.act().rope_full);
    pass.feed_forward(il);
  }
  pass.final_norm(weights.output_norm, weights.output);
}

}  // namespace thermo
