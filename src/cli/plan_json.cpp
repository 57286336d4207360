#include "cli/plan_json.h"

#include "base/cpu_info.h"

namespace thermo {
namespace {

Json items_json(const std::vector<MemoryPlanItem>& items) {
  Json list = Json::array();
  for (const MemoryPlanItem& item : items)
    list.push_back({{"name", item.name}, {"bytes", item.bytes}, {"detail", item.detail}});
  return list;
}

}  // namespace

Json memory_tiers_json(const MemoryPlan& plan, const EngineInfo* loaded) {
  Json tiers = Json::array({{{"name", "host"},
                             {"total", cpu_info().memory_bytes},
                             {"free_at_start", plan.available_bytes},
                             {"planned", plan.total_bytes},
                             {"mapped", plan.mapped_bytes},
                             {"items", items_json(plan.items)}}});
  if (!plan.device_items.empty())
    tiers.push_back({{"name", plan.device_name},
                     {"free_at_start", plan.device_available_bytes},
                     {"planned", plan.device_total_bytes},
                     {"items", items_json(plan.device_items)}});
  const auto add_taken = [](Json& tier, const std::vector<MemoryPlanItem>& items,
                            const std::optional<uint64_t>& taken) {
    tier["planned_at_load"] = planned_at_load(items);
    tier["taken_at_load"] = taken ? Json(*taken) : Json(nullptr);
  };
  if (loaded != nullptr) {
    add_taken(tiers[0], plan.items, loaded->host_taken_bytes);
    if (tiers.size() > 1) add_taken(tiers[1], plan.device_items, loaded->device_taken_bytes);
  }
  return tiers;
}

}  // namespace thermo
