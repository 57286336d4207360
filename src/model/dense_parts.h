// A dense FFN as a layer of experts that every row takes: part p is the p-th run of gate's and up's outputs
// and of down's inputs, so the FFN is the sum of its parts. What can be done with experts can be done with
// parts: some on a device, some in main memory, each computed where it is, the sum exact wherever that is.
//
// Decided before a model is loaded, as taps are. The same network in one piece computes the same up to the
// rounding of one sum: down's products are added up part by part (docs/decisions/0014).
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
