// How fast a model will be here, before it is loaded: `plan` and `inspect`.
#pragma once

#include <optional>
#include <string>

#include "base/json.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/speed_model.h"
#include "gguf/gguf_file.h"

namespace thermo {

// From what was measured on this machine. That is kept in the user's cache folder for each processor,
// instruction set and number of threads; what is missing there is measured now, which takes a second or two,
// and `Again` measures once more: the best counts. nullopt: nothing can be said (the stand-in; experts in the
// file, where the disk decides; too little memory to measure with; nothing kept, where nothing is measured).
enum class Measuring { Never, Missing, Again };
std::optional<SpeedEstimate> expected_speed(const GgufFile& file, ModelConfig config,
                                            const EngineOptions& options, const MemoryPlan& plan,
                                            Measuring measuring);

// "prefill 180, decode 58 tokens/s".
std::string describe(const SpeedEstimate& speed);
// null where nothing can be said.
Json speed_json(const std::optional<SpeedEstimate>& speed);

}  // namespace thermo
