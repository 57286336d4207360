// A dense FFN as a layer of experts that every row uses. Part p is the p-th run of the outputs of gate and
// up, and of the inputs of down, so the FFN is the sum of its parts. Whatever can be done with experts can be
// done with parts: some are on a device and some in main memory, each is computed where it is, and the sum is
// exact.
//
// The cut is decided before a model is loaded, as taps are. The network in one piece computes the same,
// except for the rounding of one sum: in parts, the products of down are added part by part
// (docs/decisions/0014).
#pragma once

#include "model/model_config.h"

namespace thermo {

class GgufFile;

// In how many parts the FFNs of the main stack are to be cut; borders are borders of blocks in every layer.
// 0: it has experts already, or cannot be cut.
int dense_parts(const ModelConfig& config, const GgufFile& file);
// REQUIRES: n_parts is what dense_parts() said.
void cut_dense(ModelConfig& config, int n_parts);

}  // namespace thermo
