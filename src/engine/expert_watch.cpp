#include "engine/expert_watch.h"

#include "experts/heat.h"

namespace thermo {

void ExpertWatch::look(Engine& engine) {
  const HeatMap* const heat = engine.heat();
  const HeatOrder order = order_.exchange(HeatOrder::None);
  if (order == HeatOrder::Reset) engine.reset_experts();
  if (heat == nullptr) {
    asked_ = false;
    return;
  }
  const Clock::time_point now = Clock::now();
  saved_ = heat->n_tokens() == n_tokens_saved_;
  if (order == HeatOrder::Save || (!saved_ && now >= last_save_ + save_every_)) {
    engine.save_heat();
    n_tokens_saved_ = heat->n_tokens();
    saved_ = true;
    last_save_ = now;
  }
  if (!asked_ || now < last_copy_ + kCopyEvery) return;
  asked_ = false;
  last_copy_ = now;
  auto copy = std::make_shared<ExpertHeat>();
  copy->n_tokens = heat->n_tokens();
  for (int layer = 0; layer < heat->n_layers(); ++layer) copy->n_expert.push_back(heat->n_expert(layer));
  copy->heat = heat->values();
  const std::lock_guard lock(mutex_);
  copy_ = std::move(copy);
}

std::shared_ptr<const ExpertHeat> ExpertWatch::heat() {
  asked_ = true;
  const std::lock_guard lock(mutex_);
  return copy_;
}

}  // namespace thermo
