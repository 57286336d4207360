// laguna: attention with a sliding window in three of four layers, a softplus gate on its output,
// sigmoid-routed experts behind a leading dense layer.
#include "model/forward.h"

namespace thermo {

void forward_laguna(Forward& pass, const RopeTables& rope, float* hidden) noexcept {
  const ModelConfig& config = pass.config();
  const Weights& weights = pass.weights();
  const size_t layer_floats = static_cast<size_t>(pass.n_rows()) * static_cast<size_t>(config.n_embd);

  pass.angles(rope.full, pass.act().rope_full);
  pass.angles(rope.window, pass.act().rope_window);
  pass.embed(weights.token_embd);
  for (int il = 0; il < config.n_layer; ++il) {
    if (hidden) pass.capture(hidden + static_cast<size_t>(il) * layer_floats);
    const bool windowed = config.layers[static_cast<size_t>(il)].window > 0;
    pass.attention(il, windowed ? rope.window : rope.full,
                   windowed ? pass.act().rope_window : pass.act().rope_full);
    pass.feed_forward(il);
  }
  pass.final_norm(weights.output_norm, weights.output);
}

}  // namespace thermo
