// How often each expert is used: counts that fade. A use now counts 1, one `half_life` tokens ago counts 1/2.
//
// Updated after every step with what was routed; a few hundred additions for a decoded token. One thread at a
// time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "experts/catalog.h"

namespace thermo {

class HeatMap {
 public:
  HeatMap() = default;
  // REQUIRES: half_life_tokens > 0.
  explicit HeatMap(const ExpertCatalog& catalog, double half_life_tokens = 2048.0);

  int n_layers() const noexcept { return static_cast<int>(first_.size()) - 1; }
  int n_expert(int layer) const noexcept;  // 0: dense

  void use(int layer, int expert, float count = 1.0f) noexcept;
  // `n_tokens` were processed: everything before fades, and the ages grow.
  void advance(int n_tokens) noexcept;

  float heat(int layer, int expert) const noexcept;
  // The same for a whole layer: heat is score * unit, and the age comes from last_use with age_of().
  struct LayerView {
    std::span<const float> score;
    std::span<const uint64_t> last_use;
    float unit;
  };
  LayerView layer(int layer) const noexcept;
  uint64_t age_of(uint64_t last_use) const noexcept {
    return last_use == 0 ? ~uint64_t{0} : now_ + 1 - last_use;
  }
  // Tokens since the expert was last used; a very large number when never.
  uint64_t age(int layer, int expert) const noexcept;
  uint64_t n_tokens() const noexcept { return now_; }
  // Uses of every expert, layer after layer. They do not fade, and set() leaves them alone.
  const std::vector<uint64_t>& uses() const noexcept { return uses_; }
  bool empty() const noexcept { return !used_; }  // nothing was ever used

  // For the file: heat of every expert, as heat() gives it. `values`: [sum of n_expert].
  std::vector<float> values() const;
  // REQUIRES: as many values as experts, none negative. An expert with heat counts as last used before the
  // first of the `n_tokens`: a file records how hot an expert was, not when.
  void set(const std::vector<float>& values, uint64_t n_tokens);

 private:
  size_t index(int layer, int expert) const noexcept;

  std::vector<int> first_{0};       // of each layer in the arrays, and the end
  std::vector<float> score_;        // in units of `unit_`
  std::vector<uint64_t> last_use_;  // token count + 1; 0: never
  std::vector<uint64_t> uses_;
  double unit_ = 1.0;    // what a use now adds
  double growth_ = 1.0;  // of the unit per token
  uint64_t now_ = 0;
  bool used_ = false;
};

}  // namespace thermo
