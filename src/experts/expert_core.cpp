#include "experts/expert_core.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "kernels/linear/prefetch_choice.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "kernels/route_topk/cold_mail.h"

namespace thermo {
namespace {

uint64_t arena_bytes(const ExpertCatalog& catalog, const SplitOptions& options) {
  const uint64_t all = HostTier::bytes_for_all(catalog);
  return options.host_bytes == 0 ? all : std::min(options.host_bytes, all);
}

// Experts that may move at the end of a prompt, and of the first step after it.
constexpr int kMovesAfterPrompt = 64;
constexpr float kNeverHotter = 1e30f;
// The most rows of steps whose times are kept together.
constexpr int kLaneRows[] = {1, 4, 16};

}  // namespace

std::vector<std::pair<int, int>> hottest_first(const ExpertCatalog& catalog, const HeatMap& heat) {
  std::vector<std::pair<float, std::pair<int, int>>> order;
  for (int l = 0; l < static_cast<int>(catalog.layers.size()); ++l)
    for (int e = 0; e < catalog.layers[static_cast<size_t>(l)].n_expert(); ++e)
      if (const float h = heat.heat(l, e); h > 0.0f) order.push_back({h, {l, e}});
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::pair<int, int>> experts;
  for (const auto& [h, expert] : order) experts.push_back(expert);
  return experts;
}

Placement place_by_heat(const ExpertCatalog& catalog, const HeatMap& heat, const SplitOptions& options,
                        uint64_t lent_bytes) {
  return place_experts({.catalog = &catalog,
                        .heat = &heat,
                        .budget_bytes = options.budget_bytes - lent_bytes,
                        .floor = 0,
                        .pin_layers = options.pin_layers});
}

ExpertCore::ExpertCore(ExpertCatalog catalog, HeatMap heat, const SplitOptions& options, Isa isa,
                       ThreadPool& pool, const Progress& progress)
    : catalog_(std::move(catalog)),
      heat_(std::move(heat)),
      first_heat_(heat_),
      options_(options),
      isa_(isa),
      arena_(arena_bytes(catalog_, options)),
      host_(catalog_,
            {.arena = {arena_.data(), arena_.size()}, .files = options.files, .trace = options.trace}),
      lanes_(std::size(kLaneRows) + 1, LaneSplit(kMaxFetchTable)) {
  host_.load(pool, hottest_first(catalog_, heat_), progress);
  choose_prefetch(in_memory(), quant_matmul_kernels(isa_), pool);
  counts_.budget_bytes = options.budget_bytes;
  counts_.total_expert_bytes = catalog_.total_bytes();
  layer_uses_.resize(catalog_.layers.size());
}
ExpertCore::~ExpertCore() = default;

std::vector<Matrix> ExpertCore::in_memory() const {
  std::vector<Matrix> matrices;
  for (int l = 0; l < static_cast<int>(catalog_.layers.size()); ++l)
    for (int e = 0; e < catalog_.layers[static_cast<size_t>(l)].n_expert(); ++e)
      if (const std::byte* const address = host_.address(l, e)) {
        const Ffn ffn = catalog_.packed_at(l, e, address);
        matrices.insert(matrices.end(), {ffn.gate, ffn.up, ffn.down});
      }
  return matrices;
}

void ExpertCore::attach(const Device& device, const Placement& placement, const Guesses& guesses,
                        const Progress& progress) {
  ExpertStoreOptions store{.slots = device.slot_memory,
                           .guest = device.lent_memory,
                           .max_in_flight = kMovesAfterPrompt,
                           .pin_layers = options_.pin_layers,
                           .frozen = !options_.swaps};
  // Where every token uses all of them none replaces another; free memory is filled again after a prompt.
  if (catalog_.n_active >= catalog_.n_expert) store.hysteresis = kNeverHotter;
  store_ = std::make_unique<ExpertStore>(catalog_, host_, device.slots, placement, heat_, store);
  store_->fill(progress);
  if (guesses.routers.empty()) return;
  forecast_ = std::make_unique<ExpertForecast>(guesses.route, guesses.routers, 1, isa_, *guesses.pool);
  if (device.link != nullptr) {
    far_forecast_ = std::make_unique<ExpertForecast>(guesses.route, guesses.routers, Courier::kDistance, isa_,
                                                     *guesses.pool);
    courier_ = std::make_unique<Courier>(
        catalog_, *device.link, device.parcel_memory,
        [this](int layer, int expert, std::byte* memory) { return store_->exchange(layer, expert, memory); });
  }
  ahead_ = std::make_unique<ReadAhead>(catalog_, *forecast_, *guesses.pool, guesses.cold_address,
                                       ReadAhead::Sending{far_forecast_.get(), courier_.get()});
}

void ExpertCore::detach() noexcept {
  ahead_.reset();
  courier_.reset();
  store_.reset();
}

uint32_t ExpertCore::begin_step(int n_rows, bool prompt) noexcept {
  host_.set_passing(prompt);
  lanes_now_ =
      static_cast<size_t>(std::lower_bound(std::begin(kLaneRows), std::end(kLaneRows), n_rows) - kLaneRows);
  prompt_ = prompt;
  after_prompt_ = false;
  // Chunks of one prompt follow each other: the memory goes back when something else comes.
  if (store_ != nullptr && prompt && !lent_) {
    store_->take_guest();
    lent_ = true;
  } else if (store_ != nullptr && !prompt && lent_) {
    store_->give_back_guest();
    lent_ = false;
    after_prompt_ = true;
  }
  if (store_ != nullptr) store_->begin_step();
  ticket_ += static_cast<uint32_t>(catalog_.layers.size()) + 1;
  if (courier_ != nullptr) courier_->begin_step(ticket_, n_rows);
  ++counts_.steps;
  counts_.tokens += static_cast<uint64_t>(n_rows);
  return ticket_;
}

void ExpertCore::deal(std::span<int32_t> fetch_of, int n_rows, bool can_read) noexcept {
  if (!can_read || !options_.fetch || !host_.complete())
    std::fill(fetch_of.begin(), fetch_of.end(), 0);
  else if (!options_.cpu)
    std::iota(fetch_of.begin(), fetch_of.end(), 0);
  else
    lanes().fill(fetch_of, courier_ != nullptr && n_rows == 1);
}

void ExpertCore::settle(int layer, uint32_t came, uint32_t carried) noexcept {
  if (courier_ != nullptr) courier_->settle(layer, came, carried);
}

void ExpertCore::end_step() noexcept {
  if (courier_ != nullptr) courier_->end_step();
  if (store_ != nullptr) store_->end_step(prompt_ || after_prompt_ ? kMovesAfterPrompt : 0);
}

void ExpertCore::reset() {
  heat_ = first_heat_;
  if (store_ != nullptr) store_->reset();
}

void ExpertCore::places(std::span<ExpertPlace> out) const noexcept {
  size_t at = 0;
  for (int layer = 0; layer < static_cast<int>(catalog_.layers.size()); ++layer)
    for (int e = 0; e < catalog_.layers[static_cast<size_t>(layer)].n_expert(); ++e) {
      ExpertPlace& place = out[at++];
      place = {.tier = host_.address(layer, e) != nullptr ? ExpertTier::Host : ExpertTier::File};
      if (store_ == nullptr) continue;
      place.promoted_ns = store_->promoted_ns(layer, e);
      if (store_->hot(layer, e))
        place.tier = ExpertTier::Device;
      else if (store_->arriving(layer, e))
        place.tier = ExpertTier::Moving;
    }
}

ExpertTelemetry ExpertCore::telemetry() const noexcept {
  ExpertTelemetry t = counts_;
  const HostTierStats disk = host_.stats();
  t.disk_bytes = disk.bytes_read;
  t.disk_wait_ns = disk.wait_ns;
  if (store_ == nullptr) {
    t.budget_bytes = options_.host_bytes;
    t.hot_expert_bytes = std::min<uint64_t>(arena_.size(), catalog_.total_bytes());
    return t;
  }
  const ExpertStoreStats moved = store_->stats();
  t.moved = moved.moved;
  t.moved_bytes = moved.moved_bytes;
  t.evicted = moved.evicted;
  t.parcels_kept = moved.exchanged;
  if (courier_ != nullptr) {
    t.parcels = courier_->n_sent();
    t.parcels_came = courier_->n_came();
    t.fetched_bytes += courier_->sent_bytes();
  }
  for (size_t l = 0; l < catalog_.layers.size(); ++l)
    t.hot_expert_bytes +=
        static_cast<uint64_t>(catalog_.layers[l].n_expert() - store_->n_cold(static_cast<int>(l))) *
        catalog_.layers[l].expert_bytes;
  return t;
}

}  // namespace thermo
