// Plankton's vocabulary and template for a synthetic model, so that `run` and `serve` can use it.
#pragma once

#include "gguf/gguf_writer.h"

namespace thermo {

// Tokens after Plankton's last one are words that no text is cut into. Throws ConfigError: fewer tokens than
// Plankton has.
void set_synth_vocabulary(int n_vocab, GgufWriter& writer);

}  // namespace thermo
