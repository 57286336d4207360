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

Json memory_tiers_json(const MemoryPlan& plan) {
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
  return tiers;
}

}  // namespace thermo
