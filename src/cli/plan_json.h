// A memory plan for machines.
#pragma once

#include "base/json.h"
#include "engine/memory_plan.h"

namespace thermo {

// Main memory, and the device's if there is one: what was free, what is planned, item by item.
Json memory_tiers_json(const MemoryPlan& plan);

}  // namespace thermo
