// Who may write a slot, and when:
//
//   in the table     read by steps; not written
//   taken out        publish(nullptr) holds from the next step on, and a copy starts only after the steps
//                    begun so far: the copy may be queued at the same time
//   arriving         the copy runs; no step knows the slot
//   arrived          found by begin_step(), which publishes it
//
// Looking at every expert after every step would take tens of microseconds (10240 of them in a model of 40
// layers). So each step looks at a quarter of the layers and remembers their best candidates to come in and
// to leave; only those are compared between layers.
#include "experts/expert_store.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "experts/best_candidates.h"

namespace thermo {
namespace {

constexpr int kSteps = 4;  // to look at every layer once
// Decoding 512 tokens of text on the stand-in from a cold start, 60 % of 35B-A3B: with 2, 5, 10 and 20 moves
// a step of 40 layers 65, 69, 71 and 72 % of the uses were hot.
constexpr int kLayersPerMove = 4;
// Where experts come in without a copy, copies are for those that were not guessed. On a GPU, ten copies a
// step took more of the link and of the time between steps than they gave, with parcels on the same link (60
// % hot, random ids: 291 tokens/s against 317 without any, though 66 instead of 60 % of the uses were hot).
constexpr int kLeastMoves = 2;

// Measured on models of this kind: 45 % of a token's experts are used again by the next token, 80 % within 8.
// The hits still to come of an expert last used `age` tokens ago are then about 0.9 age^-0.6 above its
// long-run rate.
constexpr int kAges = 256;
constexpr float kHorizonTokens = 64.0f;

std::array<float, kAges + 1> recency_table() {
  std::array<float, kAges + 1> table{};
  for (int age = 1; age < kAges; ++age)
    table[static_cast<size_t>(age)] = 0.9f * std::pow(static_cast<float>(age), -0.6f);
  table[0] = table[1];
  return table;  // zero beyond the table
}

const std::array<float, kAges + 1> kRecency = recency_table();

float recency(uint64_t age) noexcept {
  return kRecency[static_cast<size_t>(std::min<uint64_t>(age, kAges))];
}

struct Slot {
  std::byte* memory = nullptr;
  uint64_t bytes = 0;
  int id = -1;  // the expert in it or on its way to it
  bool guest = false;
};

struct Resident {
  int slot = -1;
  bool published = false;
  int64_t promoted_ns = 0;
};

struct Arrival {
  int id = -1;
  uint64_t ticket = 0;
};

struct LayerState {
  int n_published = 0;
  int n_slots = 0;            // published or being filled
  float rate_of_heat = 0.0f;  // uses per token that one unit of heat stands for
  BestCandidates outside, inside;
};

}  // namespace

float expert_value(float rate, uint64_t age) noexcept {
  return rate * kHorizonTokens + recency(age);
}

struct ExpertStore::Impl {
  const ExpertCatalog& catalog;
  HostTier& host;
  SlotDevice& device;
  HeatMap& heat;
  Placement placement;
  ExpertStoreOptions options;

  std::vector<int> first;  // id of each layer's first expert
  std::vector<int> layer_of;
  std::vector<Resident> residents;
  std::vector<LayerState> layers;
  std::vector<int> moe_layers;
  std::vector<Slot> slots;
  std::vector<int> free_slots;  // guests among them while guest memory is ours
  bool guest_taken = false;
  std::vector<Arrival> arriving;  // a ring in the order of their tickets
  size_t arriving_head = 0, n_arriving = 0;
  size_t next_layer = 0;  // of moe_layers, to look at
  size_t n_looked = 0;    // for this step
  int n_exchanged = 0;    // after it
  ExpertStoreStats stats;

  Impl(const ExpertCatalog& c, HostTier& h, SlotDevice& d, const Placement& p, HeatMap& m,
       const ExpertStoreOptions& o);

  int expert_of(int id) const noexcept {
    return id - first[static_cast<size_t>(layer_of[static_cast<size_t>(id)])];
  }
  uint64_t bytes_of(int id) const noexcept {
    return catalog.layers[static_cast<size_t>(layer_of[static_cast<size_t>(id)])].expert_bytes;
  }
  float value_of(int id) const noexcept {
    const int layer = layer_of[static_cast<size_t>(id)], expert = expert_of(id);
    return expert_value(heat.heat(layer, expert) * layers[static_cast<size_t>(layer)].rate_of_heat,
                        heat.age(layer, expert));
  }
  bool fits(const Slot& slot, int id) const noexcept {
    return slot.guest ? slot.bytes >= bytes_of(id) && !guest_taken : slot.bytes == bytes_of(id);
  }

  int most_in_flight(int asked) const noexcept;
  void look_at(int layer) noexcept;
  void look_on() noexcept;
  size_t looks_per_step() const noexcept { return (moe_layers.size() + kSteps - 1) / kSteps; }
  void publish(int id) noexcept;
  void take_out(int id) noexcept;
  void free_slot(int id) noexcept;
  int take_free_slot(int id) noexcept;
  bool start_copy(int id, int slot, bool may_wait) noexcept;
  void finish_first() noexcept;
  void finish_all() noexcept;
  void drop_guest_arrivals() noexcept;
  bool may_leave(int id, int newcomer) const noexcept;
  int coldest_for(int newcomer) const noexcept;
  int colder_than(int newcomer) const noexcept;
  bool move_one(int& n_reads) noexcept;
  std::vector<int> guest_choice() const;
  std::vector<bool> keep_only(const std::vector<std::vector<int32_t>>& hot);
};

ExpertStore::Impl::Impl(const ExpertCatalog& c, HostTier& h, SlotDevice& d, const Placement& p, HeatMap& m,
                        const ExpertStoreOptions& o)
    : catalog(c), host(h), device(d), heat(m), placement(p), options(o), layers(c.layers.size()) {
  int n = 0;
  for (size_t l = 0; l < c.layers.size(); ++l) {
    first.push_back(n);
    n += c.layers[l].n_expert();
    layer_of.resize(static_cast<size_t>(n), static_cast<int>(l));
    if (c.layers[l].n_expert() > 0) moe_layers.push_back(static_cast<int>(l));
  }
  if (options.max_moves == 0)
    options.max_moves = std::max(kLeastMoves, static_cast<int>(moe_layers.size()) / kLayersPerMove);
  residents.resize(static_cast<size_t>(n));
  arriving.resize(static_cast<size_t>(n));
  THERMO_CHECK(o.slots.size() >= slot_bytes(c, p), "the slots do not hold the placement");
  std::byte* at = o.slots.data();
  for (size_t l = 0; l < c.layers.size(); ++l)
    for (size_t i = 0; i < p.hot[l].size(); ++i) {
      slots.push_back({.memory = at, .bytes = c.layers[l].expert_bytes});
      at += c.layers[l].expert_bytes;
    }
  const uint64_t largest = c.max_expert_bytes();
  if (largest > 0)
    for (uint64_t begin = 0; begin + largest <= o.guest.size(); begin += largest)
      slots.push_back({.memory = o.guest.data() + begin, .bytes = largest, .id = -1, .guest = true});
  for (size_t i = slots.size(); i > 0; --i) free_slots.push_back(static_cast<int>(i) - 1);
}

// An expert on its way from a cache in main memory is held there until a step has ended; a step that waits
// for one of the cache's last slots must get it.
int ExpertStore::Impl::most_in_flight(int asked) const noexcept {
  if (!host.complete()) return std::min(options.max_in_flight, HostTier::kSpareSlots);
  return std::max(options.max_in_flight, asked);
}

// Sums the layer's heat, and remembers which experts should come in and which may leave.
void ExpertStore::Impl::look_at(int layer) noexcept {
  LayerState& state = layers[static_cast<size_t>(layer)];
  const int n = catalog.layers[static_cast<size_t>(layer)].n_expert();
  const int begin = first[static_cast<size_t>(layer)];
  const HeatMap::LayerView view = heat.layer(layer);
  const float sum = std::accumulate(view.score.begin(), view.score.end(), 0.0f) * view.unit;
  state.rate_of_heat = sum > 0.0f ? static_cast<float>(catalog.n_active) / sum : 0.0f;
  const float rate_of_score = state.rate_of_heat * view.unit;
  state.outside.n = state.inside.n = 0;
  for (int id = begin; id < begin + n; ++id) {
    const Resident& resident = residents[static_cast<size_t>(id)];
    const auto e = static_cast<size_t>(id - begin);
    const Candidate candidate{id, expert_value(view.score[e] * rate_of_score, heat.age_of(view.last_use[e]))};
    if (resident.published)
      state.inside.offer(candidate, [](const Candidate& a, const Candidate& b) { return a.value < b.value; });
    else if (resident.slot < 0 && candidate.value > 0.0f)
      state.outside.offer(candidate,
                          [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
  }
}

void ExpertStore::Impl::look_on() noexcept {
  look_at(moe_layers[next_layer]);
  next_layer = (next_layer + 1) % moe_layers.size();
  ++n_looked;
}

void ExpertStore::Impl::publish(int id) noexcept {
  Resident& resident = residents[static_cast<size_t>(id)];
  const int layer = layer_of[static_cast<size_t>(id)];
  const Slot& slot = slots[static_cast<size_t>(resident.slot)];
  resident.published = true;
  resident.promoted_ns = now_ns();
  ++layers[static_cast<size_t>(layer)].n_published;
  ++stats.n_hot;
  stats.n_guests += slot.guest;
  device.publish(layer, expert_of(id), slot.memory);
}

void ExpertStore::Impl::take_out(int id) noexcept {
  Resident& resident = residents[static_cast<size_t>(id)];
  const int layer = layer_of[static_cast<size_t>(id)];
  device.publish(layer, expert_of(id), nullptr);
  resident.published = false;
  --layers[static_cast<size_t>(layer)].n_published;
  --stats.n_hot;
  stats.n_guests -= slots[static_cast<size_t>(resident.slot)].guest;
  ++stats.evicted;
  free_slot(id);
}

void ExpertStore::Impl::free_slot(int id) noexcept {
  Resident& resident = residents[static_cast<size_t>(id)];
  slots[static_cast<size_t>(resident.slot)].id = -1;
  free_slots.push_back(resident.slot);
  resident.slot = -1;
  --layers[static_cast<size_t>(layer_of[static_cast<size_t>(id)])].n_slots;
}

// A free slot for this expert, guest memory last; -1: none.
int ExpertStore::Impl::take_free_slot(int id) noexcept {
  int found = -1;
  for (int i = static_cast<int>(free_slots.size()) - 1; i >= 0; --i) {
    const Slot& slot = slots[static_cast<size_t>(free_slots[static_cast<size_t>(i)])];
    if (!fits(slot, id)) continue;
    found = i;
    if (!slot.guest) break;
  }
  if (found < 0) return -1;
  const int slot = free_slots[static_cast<size_t>(found)];
  free_slots.erase(free_slots.begin() + found);
  return slot;
}

// False when the expert is still in the file; then the slot is not taken.
bool ExpertStore::Impl::start_copy(int id, int slot, bool may_wait) noexcept {
  const int layer = layer_of[static_cast<size_t>(id)], expert = expert_of(id);
  if (may_wait)
    host.acquire(layer, expert);
  else if (!host.try_acquire(layer, expert))
    return false;
  const uint64_t ticket =
      device.copy(slots[static_cast<size_t>(slot)].memory, host.address(layer, expert), bytes_of(id));
  slots[static_cast<size_t>(slot)].id = id;
  residents[static_cast<size_t>(id)].slot = slot;
  ++layers[static_cast<size_t>(layer)].n_slots;
  arriving[(arriving_head + n_arriving++) % arriving.size()] = {id, ticket};
  return true;
}

// The oldest copy has arrived.
void ExpertStore::Impl::finish_first() noexcept {
  const int id = arriving[arriving_head].id;
  arriving_head = (arriving_head + 1) % arriving.size();
  --n_arriving;
  host.release(layer_of[static_cast<size_t>(id)], expert_of(id));
  ++stats.moved;
  stats.moved_bytes += bytes_of(id);
  publish(id);
}

void ExpertStore::Impl::finish_all() noexcept {
  while (n_arriving > 0) {
    device.wait(arriving[arriving_head].ticket);
    finish_first();
  }
}

// The guest memory is about to be written: copies into it end, and are not published.
void ExpertStore::Impl::drop_guest_arrivals() noexcept {
  size_t kept = 0;
  for (size_t i = 0; i < n_arriving; ++i) {
    const Arrival arrival = arriving[(arriving_head + i) % arriving.size()];
    if (!slots[static_cast<size_t>(residents[static_cast<size_t>(arrival.id)].slot)].guest) {
      arriving[(arriving_head + kept++) % arriving.size()] = arrival;
      continue;
    }
    device.wait(arrival.ticket);
    host.release(layer_of[static_cast<size_t>(arrival.id)], expert_of(arrival.id));
    free_slot(arrival.id);
  }
  n_arriving = kept;
}

bool ExpertStore::Impl::may_leave(int id, int newcomer) const noexcept {
  const Resident& resident = residents[static_cast<size_t>(id)];
  if (!resident.published || !fits(slots[static_cast<size_t>(resident.slot)], newcomer)) return false;
  const int layer = layer_of[static_cast<size_t>(id)];
  return layer >= options.pin_layers && (layer == layer_of[static_cast<size_t>(newcomer)] ||
                                         layers[static_cast<size_t>(layer)].n_slots > placement.floor);
}

// Starts the best move there is. False: none is worth it. `n_reads`: experts that may still be requested from
// the file.
bool ExpertStore::Impl::move_one(int& n_reads) noexcept {
  for (;;) {
    BestCandidates* from = nullptr;
    for (const int l : moe_layers) {
      BestCandidates& outside = layers[static_cast<size_t>(l)].outside;
      while (outside.n > 0 && residents[static_cast<size_t>(outside.list[0].id)].slot >= 0) outside.remove(0);
      if (outside.n > 0 && (!from || outside.list[0].value > from->list[0].value)) from = &outside;
    }
    if (!from) return false;
    const int newcomer = from->list[0].id;
    from->remove(0);
    // Reading takes longer than a step; an expert that is worth it now will still be when it is here.
    const int layer = layer_of[static_cast<size_t>(newcomer)];
    const int32_t expert = expert_of(newcomer);
    if (!host.complete() && !host.address(layer, expert)) {
      if (n_reads-- > 0) host.want(layer, {&expert, 1});
      continue;
    }
    int slot = take_free_slot(newcomer);
    if (slot < 0) {
      const int victim = coldest_for(newcomer);
      if (victim < 0 || value_of(newcomer) <= value_of(victim) * options.hysteresis) {
        from->n = 0;  // the others of this layer are worth less and could replace the same
        continue;
      }
      slot = residents[static_cast<size_t>(victim)].slot;
      take_out(victim);
      std::erase(free_slots, slot);
    }
    if (start_copy(newcomer, slot, false)) return true;
    free_slots.push_back(slot);  // it left main memory in between
  }
}

// The expert that the newcomer would replace; -1: none may leave.
int ExpertStore::Impl::coldest_for(int newcomer) const noexcept {
  int victim = -1;
  float lowest = std::numeric_limits<float>::infinity();
  for (const int l : moe_layers) {
    const BestCandidates& inside = layers[static_cast<size_t>(l)].inside;
    for (int i = 0; i < inside.n; ++i) {
      const Candidate& candidate = inside.list[static_cast<size_t>(i)];
      if (!may_leave(candidate.id, newcomer)) continue;
      if (candidate.value < lowest) lowest = candidate.value, victim = candidate.id;
      break;
    }
  }
  return victim;
}

// An expert of the newcomer's layer that is worth less and is not in guest memory; -1: none. One layer only:
// dozens of newcomers are considered between two steps, and looking through all layers took 3 us for each.
int ExpertStore::Impl::colder_than(int newcomer) const noexcept {
  const float most = value_of(newcomer) / options.exchange_hysteresis;
  const BestCandidates& inside = layers[static_cast<size_t>(layer_of[static_cast<size_t>(newcomer)])].inside;
  for (int i = 0; i < inside.n; ++i) {
    const Candidate& candidate = inside.list[static_cast<size_t>(i)];
    if (candidate.value >= most) break;
    const Resident& resident = residents[static_cast<size_t>(candidate.id)];
    if (may_leave(candidate.id, newcomer) && !slots[static_cast<size_t>(resident.slot)].guest &&
        value_of(candidate.id) < most)
      return candidate.id;
  }
  return -1;
}

ExpertStore::ExpertStore(const ExpertCatalog& catalog, HostTier& host, SlotDevice& device,
                         const Placement& placement, HeatMap& heat, const ExpertStoreOptions& options)
    : impl_(std::make_unique<Impl>(catalog, host, device, placement, heat, options)) {}

ExpertStore::~ExpertStore() {
  // The device may still read main memory.
  Impl& s = *impl_;
  for (; s.n_arriving > 0; --s.n_arriving) {
    const Arrival arrival = s.arriving[s.arriving_head];
    s.arriving_head = (s.arriving_head + 1) % s.arriving.size();
    s.device.wait(arrival.ticket);
    s.host.release(s.layer_of[static_cast<size_t>(arrival.id)], s.expert_of(arrival.id));
  }
}

uint64_t ExpertStore::slot_bytes(const ExpertCatalog& catalog, const Placement& placement) {
  uint64_t bytes = 0;
  for (size_t l = 0; l < catalog.layers.size(); ++l)
    bytes += placement.hot[l].size() * catalog.layers[l].expert_bytes;
  return bytes;
}

// For guest memory at load: the most valuable cold experts, spread over the layers where nothing is known.
std::vector<int> ExpertStore::Impl::guest_choice() const {
  std::vector<std::pair<float, int>> order;  // by value, then by number in the layer, then by layer
  for (size_t id = 0; id < residents.size(); ++id)
    if (residents[id].slot < 0) order.emplace_back(-value_of(static_cast<int>(id)), static_cast<int>(id));
  std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : expert_of(a.second) < expert_of(b.second);
  });
  std::vector<int> ids;
  for (const auto& [value, id] : order) ids.push_back(id);
  return ids;
}

void ExpertStore::fill(const std::function<void(uint64_t done, uint64_t total)>& progress) {
  Impl& s = *impl_;
  const auto window = static_cast<size_t>(std::max(1, s.most_in_flight(0)));
  const uint64_t total = slot_bytes(s.catalog, s.placement);
  uint64_t done = 0;
  const auto copy = [&](int id) {
    if (s.residents[static_cast<size_t>(id)].slot >= 0) return;
    const int slot = s.take_free_slot(id);
    if (slot < 0) return;
    while (s.n_arriving >= window) {
      s.device.wait(s.arriving[s.arriving_head].ticket);
      s.finish_first();
    }
    s.start_copy(id, slot, true);
  };
  if (progress) progress(0, total);
  for (size_t l = 0; l < s.catalog.layers.size(); ++l) {
    for (const int32_t expert : s.placement.hot[l]) copy(s.first[l] + expert);
    done += s.placement.hot[l].size() * s.catalog.layers[l].expert_bytes;
    if (progress && s.catalog.layers[l].n_expert() > 0) progress(done, total);
  }
  s.finish_all();
  for (const int l : s.moe_layers) s.look_at(l);
  const auto room = [&] {
    return std::any_of(s.free_slots.begin(), s.free_slots.end(),
                       [&](int i) { return s.slots[static_cast<size_t>(i)].guest; });
  };
  if (!s.guest_taken && room())
    for (const int id : s.guest_choice()) {
      if (!room()) break;
      copy(id);
    }
  s.finish_all();
  s.stats.moved = s.stats.moved_bytes = 0;
  for (Resident& resident : s.residents) resident.promoted_ns = 0;
}

// All others leave, and so do the guests. Returns which ids are wanted.
std::vector<bool> ExpertStore::Impl::keep_only(const std::vector<std::vector<int32_t>>& hot) {
  finish_all();
  std::vector<bool> wanted(residents.size());
  for (size_t l = 0; l < hot.size(); ++l)
    for (const int32_t expert : hot[l]) wanted[static_cast<size_t>(first[l] + expert)] = true;
  for (size_t id = 0; id < wanted.size(); ++id)
    if (residents[id].published && (!wanted[id] || slots[static_cast<size_t>(residents[id].slot)].guest))
      take_out(static_cast<int>(id));
  return wanted;
}

void ExpertStore::reset() {
  Impl& s = *impl_;
  const uint64_t n_evicted = s.stats.evicted;
  s.keep_only(s.placement.hot);
  s.stats.evicted = n_evicted;
  const ExpertStoreStats before = s.stats;
  fill({});
  s.stats.moved = before.moved;
  s.stats.moved_bytes = before.moved_bytes;
}

void ExpertStore::begin_step() noexcept {
  Impl& s = *impl_;
  while (s.n_arriving > 0 && s.device.done(s.arriving[s.arriving_head].ticket)) s.finish_first();
}

void ExpertStore::end_step(int n_moves) noexcept {
  Impl& s = *impl_;
  if (s.options.frozen || s.moe_layers.empty()) return;
  const bool asked = n_moves > 0;
  const int n_exchanged = std::exchange(s.n_exchanged, 0);
  if (!asked)
    n_moves = std::max(std::min(kLeastMoves, s.options.max_moves), s.options.max_moves - n_exchanged);
  const int in_flight = s.most_in_flight(asked ? n_moves : 0);
  n_moves = std::min(n_moves, in_flight - static_cast<int>(s.n_arriving));
  int n_reads = n_moves;
  for (;;) {
    while (s.n_looked < (asked ? s.moe_layers.size() : s.looks_per_step())) s.look_on();
    s.n_looked = 0;
    int n = 0;
    while (n < n_moves && s.move_one(n_reads)) ++n;
    n_moves -= n;
    // Many were requested: look again when the remembered ones are used up.
    if (!asked || n == 0 || n_moves == 0) break;
  }
}

void ExpertStore::look() noexcept {
  Impl& s = *impl_;
  if (!s.options.frozen && !s.moe_layers.empty() && s.n_looked < s.looks_per_step()) s.look_on();
}

std::byte* ExpertStore::exchange(int layer, int expert, std::byte* memory) noexcept {
  Impl& s = *impl_;
  const int id = s.first[static_cast<size_t>(layer)] + expert;
  if (s.options.frozen || s.residents[static_cast<size_t>(id)].slot >= 0) return nullptr;
  const int victim = s.colder_than(id);
  if (victim < 0) return nullptr;
  const int slot = s.residents[static_cast<size_t>(victim)].slot;
  s.take_out(victim);
  std::erase(s.free_slots, slot);
  std::byte* const freed = std::exchange(s.slots[static_cast<size_t>(slot)].memory, memory);
  s.slots[static_cast<size_t>(slot)].id = id;
  s.residents[static_cast<size_t>(id)].slot = slot;
  ++s.layers[static_cast<size_t>(layer)].n_slots;
  s.publish(id);
  ++s.n_exchanged;
  ++s.stats.moved;
  ++s.stats.exchanged;
  return freed;
}

void ExpertStore::take_guest() noexcept {
  Impl& s = *impl_;
  if (s.guest_taken) return;
  s.drop_guest_arrivals();
  for (Slot& slot : s.slots)
    if (slot.guest && slot.id >= 0) s.take_out(slot.id);
  s.guest_taken = true;
}

void ExpertStore::give_back_guest() noexcept {
  impl_->guest_taken = false;
}

bool ExpertStore::hot(int layer, int expert) const noexcept {
  return impl_->residents[static_cast<size_t>(impl_->first[static_cast<size_t>(layer)] + expert)].published;
}

int ExpertStore::n_cold(int layer) const noexcept {
  return impl_->catalog.layers[static_cast<size_t>(layer)].n_expert() -
         impl_->layers[static_cast<size_t>(layer)].n_published;
}

bool ExpertStore::arriving(int layer, int expert) const noexcept {
  const Resident& resident =
      impl_->residents[static_cast<size_t>(impl_->first[static_cast<size_t>(layer)] + expert)];
  return resident.slot >= 0 && !resident.published;
}

int64_t ExpertStore::promoted_ns(int layer, int expert) const noexcept {
  return impl_->residents[static_cast<size_t>(impl_->first[static_cast<size_t>(layer)] + expert)].promoted_ns;
}

const std::byte* ExpertStore::address(int layer, int expert) const noexcept {
  const Resident& resident =
      impl_->residents[static_cast<size_t>(impl_->first[static_cast<size_t>(layer)] + expert)];
  return resident.published ? impl_->slots[static_cast<size_t>(resident.slot)].memory : nullptr;
}

ExpertStoreStats ExpertStore::stats() const noexcept {
  return impl_->stats;
}

void ExpertStore::force(const std::vector<std::vector<int32_t>>& hot) {
  Impl& s = *impl_;
  const std::vector<bool> wanted = s.keep_only(hot);
  for (size_t id = 0; id < wanted.size(); ++id) {
    if (!wanted[id] || s.residents[id].published) continue;
    const int slot = s.take_free_slot(static_cast<int>(id));
    if (slot < 0) continue;
    s.start_copy(static_cast<int>(id), slot, true);
    s.finish_all();
  }
}

}  // namespace thermo
