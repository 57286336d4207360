// Fading all counts after every token would touch thousands of numbers. Instead each use adds a unit that
// doubles every half-life, so older uses weigh less beside newer ones. Heat is the score divided by the
// current unit. Before the unit leaves the range of a float, all scores are scaled back once.
#include "experts/heat.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace thermo {
namespace {

// About 60 half-lives. Far below the largest float, so that a million uses at once still fit on top.
constexpr double kLargestUnit = 1e18;

}  // namespace

HeatMap::HeatMap(const ExpertCatalog& catalog, double half_life_tokens) {
  THERMO_CHECK(half_life_tokens > 0.0, "a half-life is positive");
  for (const ExpertLayer& layer : catalog.layers) first_.push_back(first_.back() + layer.n_expert());
  score_.assign(static_cast<size_t>(first_.back()), 0.0f);
  last_use_.assign(score_.size(), 0);
  uses_.assign(score_.size(), 0);
  growth_ = std::exp2(1.0 / half_life_tokens);
}

size_t HeatMap::index(int layer, int expert) const noexcept {
  THERMO_DCHECK(layer >= 0 && layer < n_layers() && expert >= 0 && expert < n_expert(layer),
                "an expert of the catalog");
  return static_cast<size_t>(first_[static_cast<size_t>(layer)] + expert);
}

int HeatMap::n_expert(int layer) const noexcept {
  return first_[static_cast<size_t>(layer) + 1] - first_[static_cast<size_t>(layer)];
}

void HeatMap::use(int layer, int expert, float count) noexcept {
  const size_t i = index(layer, expert);
  score_[i] += static_cast<float>(count * unit_);
  last_use_[i] = now_ + 1;
  uses_[i] += static_cast<uint64_t>(count);
  used_ = true;
}

void HeatMap::advance(int n_tokens) noexcept {
  now_ += static_cast<uint64_t>(n_tokens);
  unit_ *= std::pow(growth_, n_tokens);
  if (unit_ <= kLargestUnit) return;
  const double scale = 1.0 / unit_;  // 0 when the unit overflowed: everything has faded
  for (float& score : score_) score = static_cast<float>(score * scale);
  unit_ = 1.0;
}

float HeatMap::heat(int layer, int expert) const noexcept {
  return static_cast<float>(score_[index(layer, expert)] / unit_);
}

uint64_t HeatMap::age(int layer, int expert) const noexcept {
  return age_of(last_use_[index(layer, expert)]);
}

HeatMap::LayerView HeatMap::layer(int layer) const noexcept {
  const auto first = static_cast<size_t>(first_[static_cast<size_t>(layer)]);
  const auto n = static_cast<size_t>(n_expert(layer));
  return {{score_.data() + first, n}, {last_use_.data() + first, n}, static_cast<float>(1.0 / unit_)};
}

std::vector<float> HeatMap::values() const {
  std::vector<float> values(score_.size());
  std::transform(score_.begin(), score_.end(), values.begin(),
                 [this](float score) { return static_cast<float>(score / unit_); });
  return values;
}

void HeatMap::set(const std::vector<float>& values, uint64_t n_tokens) {
  THERMO_CHECK(values.size() == score_.size(), "one value for each expert");
  score_ = values;
  unit_ = 1.0;
  now_ = n_tokens;
  used_ = false;
  for (size_t i = 0; i < values.size(); ++i) {
    last_use_[i] = values[i] > 0.0f ? 1 : 0;
    used_ = used_ || values[i] > 0.0f;
  }
}

}  // namespace thermo
