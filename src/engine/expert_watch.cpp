#include "engine/expert_watch.h"

#include "experts/heat.h"

namespace thermo {

// Heat is asked for only when it is needed: a GPU counts by itself, and its counts must be fetched.
void ExpertWatch::look(Engine& engine, bool stepped) {
  std::string name;
  HeatOrder order = HeatOrder::None;
  if (order_ != HeatOrder::None) {
    const std::lock_guard lock(mutex_);
    order = order_.exchange(HeatOrder::None);
    name = name_;
  }
  if (order == HeatOrder::Reset) engine.reset_experts();
  if (order == HeatOrder::Load) engine.load_heat(name);
  if (order == HeatOrder::Save && !name.empty()) engine.save_heat(name);
  const Clock::time_point now = Clock::now();
  if (stepped) saved_ = false;
  if ((order == HeatOrder::Save && name.empty()) || (!saved_ && now >= last_save_ + save_every_)) {
    engine.save_heat();
    saved_ = true;
    last_save_ = now;
  }
  if (!asked_ || now < last_copy_ + kCopyEvery) return;
  asked_ = false;
  last_copy_ = now;
  const HeatMap* const heat = engine.heat();
  if (heat == nullptr) return;
  auto copy = std::make_shared<ExpertHeat>();
  copy->n_tokens = heat->n_tokens();
  for (int layer = 0; layer < heat->n_layers(); ++layer) copy->n_expert.push_back(heat->n_expert(layer));
  copy->heat = heat->values();
  copy->uses = std::make_shared<const std::vector<uint64_t>>(heat->uses());
  copy->places = engine.expert_places();
  copy->layers = engine.layer_uses();
  copy->hot_tier = engine.info().device == "cpu" ? ExpertTier::Host : ExpertTier::Device;
  const std::lock_guard lock(mutex_);
  copy_ = std::move(copy);
}

std::shared_ptr<const ExpertHeat> ExpertWatch::heat() {
  asked_ = true;
  const std::lock_guard lock(mutex_);
  return copy_;
}

}  // namespace thermo
