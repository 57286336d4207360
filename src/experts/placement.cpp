#include "experts/placement.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace thermo {
namespace {

// An expert in the queue for device memory. The fields are the sort order, most important first.
struct Candidate {
  int round = 0;       // pinned layers: before 0; floors: the rank in the layer; the rest: after all floors
  double value = 0.0;  // heat per byte; higher goes first
  int rank = 0;        // in its layer, by heat
  int layer = 0;
  int expert = 0;
  uint64_t bytes = 0;
  float heat = 0.0f;

  bool operator<(const Candidate& other) const {
    if (round != other.round) return round < other.round;
    if (value != other.value) return value > other.value;
    if (rank != other.rank) return rank < other.rank;
    return layer < other.layer;
  }
};

int wanted_floor(const PlacementInputs& inputs) {
  return inputs.floor > 0 ? inputs.floor : 2 * inputs.catalog->n_active;
}

// A layer's experts, hottest first.
std::vector<int32_t> by_heat(int n_expert, const HeatMap* heat, int layer) {
  std::vector<int32_t> order(static_cast<size_t>(n_expert));
  std::iota(order.begin(), order.end(), 0);
  if (heat != nullptr) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return heat->heat(layer, a) > heat->heat(layer, b); });
  }
  return order;
}

std::vector<Candidate> queue_of(const PlacementInputs& inputs, const HeatMap* heat) {
  const int floor = wanted_floor(inputs);
  std::vector<Candidate> queue;
  for (int l = 0; l < static_cast<int>(inputs.catalog->layers.size()); ++l) {
    const ExpertLayer& layer = inputs.catalog->layers[static_cast<size_t>(l)];
    const std::vector<int32_t> order = by_heat(layer.n_expert(), heat, l);
    for (int rank = 0; rank < layer.n_expert(); ++rank) {
      Candidate c;
      c.rank = rank;
      c.layer = l;
      c.expert = order[static_cast<size_t>(rank)];
      c.bytes = layer.expert_bytes;
      c.round = std::min(rank, floor);
      if (heat != nullptr) {
        c.heat = heat->heat(l, c.expert);
        c.value = static_cast<double>(c.heat) / static_cast<double>(std::max<uint64_t>(1, c.bytes));
      }
      if (l < inputs.pin_layers) {
        c.round = l - inputs.pin_layers;  // one layer after another
        c.value = 0.0;
      }
      queue.push_back(c);
    }
  }
  std::sort(queue.begin(), queue.end());
  return queue;
}

// The floor that every layer got. A layer that is wholly hot has whatever floor was wanted.
int lowest_floor(const ExpertCatalog& catalog, const Placement& placement, int wanted) {
  int floor = wanted;
  for (size_t l = 0; l < catalog.layers.size(); ++l) {
    const int n_hot = static_cast<int>(placement.hot[l].size());
    if (n_hot < catalog.layers[l].n_expert()) floor = std::min(floor, n_hot);
  }
  return floor;
}

}  // namespace

bool Placement::is_hot(int layer, int expert) const {
  const std::vector<int32_t>& of_layer = hot[static_cast<size_t>(layer)];
  return std::find(of_layer.begin(), of_layer.end(), expert) != of_layer.end();
}

Placement place_experts(const PlacementInputs& inputs) {
  const ExpertCatalog& catalog = *inputs.catalog;
  const HeatMap* heat = inputs.heat != nullptr && !inputs.heat->empty() ? inputs.heat : nullptr;
  THERMO_CHECK(heat == nullptr || heat->n_layers() == static_cast<int>(catalog.layers.size()),
               "the heat is that of this catalog");

  const std::vector<Candidate> queue = queue_of(inputs, heat);
  Placement placement;
  placement.hot.resize(catalog.layers.size());
  double hot_heat = 0.0, all_heat = 0.0;
  bool full = false;
  for (const Candidate& c : queue) {
    all_heat += c.heat;
    full = full || c.bytes > inputs.budget_bytes - placement.bytes;
    if (full) continue;
    placement.hot[static_cast<size_t>(c.layer)].push_back(c.expert);  // by rank: hottest first
    placement.bytes += c.bytes;
    ++placement.n_hot;
    hot_heat += c.heat;
  }
  placement.floor = lowest_floor(catalog, placement, wanted_floor(inputs));
  if (all_heat > 0.0) {
    placement.expected_hit_rate = hot_heat / all_heat;
  } else if (!queue.empty()) {
    placement.expected_hit_rate = static_cast<double>(placement.n_hot) / static_cast<double>(queue.size());
  }
  return placement;
}

}  // namespace thermo
