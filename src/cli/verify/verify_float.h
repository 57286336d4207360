// A quantised model evaluated in floats: the same weights, decoded, so that nothing is rounded to eight bits
// on the way. And how far apart the two may be.
#pragma once

#include <span>

#include "cli/verify/verify_reference.h"
#include "engine/engine.h"

namespace thermo {

// Whether a product of this file rounds its activations: some matrix is neither F32, F16 nor BF16.
bool is_quantised(const GgufFile& file);

struct FloatEvaluation {
  Outputs outputs;  // without logits when layers were left out
  int n_layers =
      0;  // that were computed; the rest did not fit into `max_bytes` of floats. 0: not even two fit
};
// Throws as Engine does. `options`: context, batch and threads.
FloatEvaluation evaluate_in_floats(const GgufFile& file, const ModelConfig& config,
                                   std::span<const TokenId> ids, const EngineOptions& options,
                                   uint64_t max_bytes);

// What rounding activations to eight bits may do to the output of layer `k` (0: the embedding), as the root
// mean square of the error over the spread.
//
// A block of activations is rounded in steps of amax / 127, which is off by amax / 127 / sqrt(12). Rows have
// amax of a few times their own deviation; 8 is taken here, which allows Plankton about twice what it does.
// So a product is off by 0.018 of its deviation. A layer has four such products one after the other (into and
// out of the mixer, into and out of the FFN), whose errors are independent and add up as squares. What norms
// and near ties of a router make of it is covered by the factor of two.
double rounding_bound(int k);

}  // namespace thermo
