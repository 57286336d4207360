// A memory plan for machines.
#pragma once

#include "base/json.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"

namespace thermo {

// Main memory, and the device's if there is one: what was free, what is planned, item by item. `loaded`: of
// that, what was to be taken at load and what was taken; null where that is not known.
Json memory_tiers_json(const MemoryPlan& plan, const EngineInfo* loaded = nullptr);

}  // namespace thermo
