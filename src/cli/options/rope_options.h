// Options that say how positions are stretched, where it is not to be as the model file says.
#pragma once

#include "cli/options/options.h"
#include "model/rope_override.h"

namespace thermo {

// --rope-scaling --rope-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow
// --yarn-beta-fast. `from_environment`: they are read there as well.
void add_rope_options(OptionSet& set, RopeOverride& rope, bool from_environment = true);

}  // namespace thermo
