#include "experts/sim_experts.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/thread_pool.h"

namespace thermo {
namespace {

// An eighth of the budget is lent to prompts, in whole slots of any expert: enough to stream, and none when
// the budget holds everything or next to nothing.
uint64_t guest_bytes(const ExpertCatalog& catalog, uint64_t budget) {
  constexpr uint64_t kMaxGuests = 64;
  const uint64_t slot = catalog.max_expert_bytes();
  if (slot == 0 || budget >= catalog.total_bytes()) return 0;
  return std::min(budget / 8 / slot, kMaxGuests) * slot;
}

// Without routers there is nothing to guess.
bool carries(const SimExpertsOptions& options) {
  return options.split.read_ahead && options.split.fetch && !options.routers.empty();
}

}  // namespace

SimExperts::SimExperts(ExpertCatalog catalog, HeatMap heat, const SimExpertsOptions& options,
                       ThreadPool& pool, const ExpertCore::Progress& progress)
    : core_(std::move(catalog), std::move(heat), options.split, options.isa, pool, progress),
      catalog_(core_.catalog()),
      host_(core_.host()),
      counts_(core_.counts()),
      options_(options),
      guest_bytes_(guest_bytes(catalog_, options.split.budget_bytes)),
      placement_(place_by_heat(catalog_, core_.heat(), options.split, guest_bytes_)),
      slots_(ExpertStore::slot_bytes(catalog_, placement_)),
      guest_(guest_bytes_),
      parcels_(carries(options) ? Courier::places_bytes(catalog_) : 0),
      device_(catalog_, options.split.trace, options.split.link_limit),
      ffns_(static_cast<size_t>(catalog_.n_expert)),
      seen_(catalog_.layers.size()),
      fetch_of_(kMaxFetchTable + 1),
      lane_pool_({.n_threads = options.lane_threads, .pin = false, .spin_us = 0}) {
  for (std::vector<FfnGroup>* groups : {&hot_, &streamed_, &cold_})
    groups->reserve(static_cast<size_t>(catalog_.n_expert) + 1);
  streamed_experts_.reserve(static_cast<size_t>(catalog_.n_expert));
  mailbox_.pairs.reserve(static_cast<size_t>(options.n_batch) * static_cast<size_t>(catalog_.n_active));
  mailbox_.x =
      HostBuffer(static_cast<size_t>(options.n_batch) * static_cast<size_t>(catalog_.n_embd) * sizeof(float));
  const auto cold_address = [this](int layer, int expert) {
    // The other thread writes the table between steps, and waits for our answer within one.
    return host_.complete() && device_.address(layer, expert) == nullptr ? host_.address(layer, expert)
                                                                         : nullptr;
  };
  core_.attach({.slots = device_,
                .slot_memory = {slots_.data(), ExpertStore::slot_bytes(catalog_, placement_)},
                .lent_memory = {guest_.data(), guest_bytes_},
                .link = carries(options) ? &device_ : nullptr,
                .parcel_memory = parcels_.data()},
               placement_,
               {.route = options.route,
                .routers = options.split.read_ahead ? options.routers : std::vector<RouterView>{},
                .pool = &lane_pool_,
                .cold_address = cold_address},
               {});
  lane_ = std::make_unique<CpuLane>(
      catalog_, host_, lane_pool_,
      CpuLaneOptions{
          .max_rows = options.n_batch, .max_pairs = 0, .isa = options.isa, .ahead = core_.ahead()});
  lane_thread_ = std::thread([this] { lane_loop(); });
}

SimExperts::~SimExperts() {
  stop_.store(true);
  mailbox_.post.fetch_add(1);
  mailbox_.post.notify_all();
  lane_thread_.join();
  lane_.reset();
  core_.detach();
}

void SimExperts::begin_step(int n_rows) noexcept {
  prompt_ = n_rows > options_.decode_rows;
  ticket_ = core_.begin_step(n_rows, prompt_);
  core_.deal(fetch_of_, n_rows, !prompt_);
  device_.begin_step();
}

void SimExperts::end_step() noexcept {
  device_.end_step();
  for (size_t l = 0; l < seen_.size(); ++l) {
    const Seen seen = std::exchange(seen_[l], {});
    core_.settle(static_cast<int>(l), seen.came, seen.carried);
  }
  core_.end_step();
}

bool SimExperts::reset() {
  core_.reset();
  return true;
}

void SimExperts::make_hot(const FfnGroup& group, int layer, int expert, const std::byte* address) noexcept {
  Ffn& ffn = ffns_[static_cast<size_t>(expert)];
  ffn = catalog_.packed_at(layer, expert, address);
  hot_.push_back({&ffn, group.pair_begin, group.n_pairs});
}

// Which experts of the layer are hot, came as parcels, are streamed, or are cold.
void SimExperts::sort_out(const RoutedLayer& routed) noexcept {
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(routed.layer)].expert_bytes;
  Seen& seen = seen_[static_cast<size_t>(routed.layer)];
  for (int i = 0; i < kMaxParcels; ++i) {
    const uint64_t word = device_.announced(routed.layer, i);
    const bool ours = parcel_ticket(word) == layer_ticket(ticket_, routed.layer);
    came_[i] = ours ? word : 0;
    seen.came |= static_cast<uint32_t>(ours) << i;
  }
  hot_.clear();
  streamed_.clear();
  streamed_experts_.clear();
  cold_.clear();
  const bool may_stream = prompt_ && guest_bytes_ > 0;
  for (const FfnGroup& group : routed.args.groups.first(static_cast<size_t>(routed.n_routed))) {
    const int expert = routed.expert_of(group);
    const auto n_pairs = static_cast<uint64_t>(group.n_pairs);
    const std::byte* const address = device_.address(routed.layer, expert);
    core_.count_pairs(routed.layer, n_pairs, address != nullptr ? n_pairs : 0);
    if (address != nullptr) {
      make_hot(group, routed.layer, expert, address);
      counts_.hot_bytes += bytes;
    } else if (const std::byte* parcel = take_parcel(routed.layer, expert)) {
      make_hot(group, routed.layer, expert, parcel);
      counts_.fetched_pairs += n_pairs;
      ++counts_.parcels_used;
    } else if (may_stream && group.n_pairs >= options_.stream_min_pairs) {
      streamed_.push_back(group);
      streamed_experts_.push_back(expert);
      counts_.fetched_pairs += n_pairs;
      counts_.streamed_bytes += bytes;
    } else {
      cold_.push_back(group);
    }
  }
}

// The device reads some of the cold experts where they lie; the others are the processor's.
void SimExperts::fetch_some(const RoutedLayer& routed) noexcept {
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(routed.layer)].expert_bytes;
  const size_t n_fetched =
      static_cast<size_t>(fetch_of_[std::min(cold_.size(), static_cast<size_t>(kMaxFetchTable))]);
  n_fetched_ = static_cast<int>(std::min(n_fetched, cold_.size()));
  mailbox_.pairs.clear();
  for (size_t i = 0; i < cold_.size(); ++i) {
    const FfnGroup& group = cold_[i];
    const int expert = routed.expert_of(group);
    const auto n_pairs = static_cast<uint64_t>(group.n_pairs);
    if (i < static_cast<size_t>(n_fetched_)) {
      make_hot(group, routed.layer, expert, host_.address(routed.layer, expert));
      counts_.fetched_pairs += n_pairs;
      counts_.fetched_bytes += bytes;
      continue;
    }
    for (int p = group.pair_begin; p < group.pair_begin + group.n_pairs; ++p)
      mailbox_.pairs.push_back({.row = static_cast<int16_t>(routed.args.pair_rows[p]),
                                .expert = static_cast<int16_t>(expert),
                                .weight = routed.args.pair_weights[p]});
    counts_.cpu_pairs += n_pairs;
    counts_.cpu_bytes += bytes;
  }
}

void SimExperts::run(const RoutedLayer& routed) noexcept {
  const std::span<const FfnGroup> groups = routed.args.groups;
  const uint64_t begin_ns = now_ns();
  sort_out(routed);
  fetch_some(routed);
  const bool any_cold = !mailbox_.pairs.empty();
  ++counts_.layer_steps;
  counts_.all_hot +=
      cold_.empty() && seen_[static_cast<size_t>(routed.layer)].carried == 0 && streamed_.empty();

  if (any_cold) post_cold(routed);
  if (!streamed_.empty()) host_.want(routed.layer, streamed_experts_);
  hot_.insert(hot_.end(), groups.begin() + routed.n_routed, groups.end());
  compute(routed, hot_, true);
  if (!streamed_.empty()) stream(routed);
  const uint64_t device_ns = now_ns();
  if (any_cold) add_answer(routed);
  for (int r = 0; r < routed.n_rows; ++r)
    routed.row_ops.add_sum(routed.args.y + r * routed.args.y_stride, routed.args.sums->row(r),
                           catalog_.n_embd);
  const uint64_t end_ns = now_ns();
  if (!prompt_ && !cold_.empty()) {
    const auto us = [&](uint64_t to) { return static_cast<float>(to - begin_ns) * 1e-3f; };
    core_.lanes().layer_took(static_cast<int>(cold_.size()), n_fetched_, us(end_ns));
    core_.lanes().gpu_took(n_fetched_, us(device_ns));
    if (any_cold) core_.lanes().cpu_took(mailbox_.n_experts, static_cast<float>(mailbox_.compute_ns) * 1e-3f);
  }
  if (TraceWriter* trace = options_.split.trace) {
    trace->add({.lane = TraceLane::Device,
                .name = "experts",
                .category = "experts",
                .begin_ns = static_cast<int64_t>(begin_ns),
                .duration_ns = static_cast<int64_t>(device_ns - begin_ns),
                .args = {{{"layer", routed.layer},
                          {"hot", static_cast<int64_t>(hot_.size())},
                          {"streamed", static_cast<int64_t>(streamed_.size())}}}});
    if (any_cold)
      trace->add({.lane = TraceLane::Device,
                  .name = "waiting for the CPU",
                  .category = "experts",
                  .begin_ns = static_cast<int64_t>(device_ns),
                  .duration_ns = static_cast<int64_t>(end_ns - device_ns),
                  .args = {{{"layer", routed.layer}}}});
  }
}

// Another part of the layer's sums.
void SimExperts::compute(const RoutedLayer& routed, std::span<const FfnGroup> groups, bool fresh) noexcept {
  ExpertFfnArgs args = routed.args;
  args.groups = groups;
  args.fresh = fresh;
  args.y = nullptr;
  expert_ffn_cpu(args, routed.scratch, routed.row_ops, routed.linear);
}

// Batch after batch through the borrowed slots: one half arrives while the other is computed.
void SimExperts::stream(const RoutedLayer& routed) noexcept {
  const uint64_t slot_bytes = catalog_.max_expert_bytes();
  const auto n_slots = static_cast<size_t>(guest_bytes_ / slot_bytes);
  const bool halves = n_slots >= 2;
  const size_t batch = halves ? n_slots / 2 : 1;
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(routed.layer)].expert_bytes;
  const auto slot_of = [&](size_t i) {
    const size_t half = halves ? i / batch % 2 : 0;
    return guest_.data() + (half * batch + i % batch) * slot_bytes;
  };
  // Starts a batch; returns its last ticket.
  const auto start = [&](size_t begin) {
    uint64_t ticket = 0;
    for (size_t i = begin; i < std::min(begin + batch, streamed_.size()); ++i) {
      const Ffn ffn = host_.acquire(routed.layer, streamed_experts_[i]);
      ticket = device_.stream(slot_of(i), ffn.gate.panels, bytes);
    }
    return ticket;
  };
  uint64_t ticket = start(0);
  for (size_t begin = 0; begin < streamed_.size(); begin += batch) {
    const size_t end = std::min(begin + batch, streamed_.size());
    const uint64_t wanted = now_ns();
    device_.wait_stream(ticket);
    counts_.copy_wait_ns += now_ns() - wanted;
    for (size_t i = begin; i < end; ++i) host_.release(routed.layer, streamed_experts_[i]);
    if (halves && end < streamed_.size()) ticket = start(end);
    for (size_t i = begin; i < end; ++i) {
      Ffn& ffn = ffns_[static_cast<size_t>(streamed_experts_[i])];
      ffn = catalog_.packed_at(routed.layer, streamed_experts_[i], slot_of(i));
      streamed_[i].ffn = &ffn;
    }
    compute(routed, std::span(streamed_).subspan(begin, end - begin), false);
    if (!halves && end < streamed_.size()) ticket = start(end);
  }
}

const std::byte* SimExperts::take_parcel(int layer, int expert) noexcept {
  for (int i = 0; i < kMaxParcels; ++i)
    if (came_[i] != 0 && parcel_expert(came_[i]) == expert) {
      seen_[static_cast<size_t>(layer)].carried |= 1u << i;
      return device_.place(parcel_place(came_[i]));
    }
  return nullptr;
}

void SimExperts::post_cold(const RoutedLayer& routed) noexcept {
  const auto width = static_cast<size_t>(catalog_.n_embd);
  mailbox_.layer = routed.layer;
  mailbox_.n_rows = routed.n_rows;
  for (int r = 0; r < routed.n_rows; ++r)
    std::memcpy(mailbox_.x.as<float>() + static_cast<size_t>(r) * width, routed.args.x->row(r),
                width * sizeof(float));
  mailbox_.post.fetch_add(1, std::memory_order_release);
  mailbox_.post.notify_one();
}

void SimExperts::add_answer(const RoutedLayer& routed) noexcept {
  const uint32_t number = mailbox_.post.load(std::memory_order_relaxed);
  const uint64_t start = now_ns();
  for (uint32_t seen = mailbox_.answer.load(std::memory_order_acquire); seen != number;
       seen = mailbox_.answer.load(std::memory_order_acquire))
    mailbox_.answer.wait(seen, std::memory_order_acquire);
  const uint64_t stall = now_ns() - start;
  counts_.stall_ns += stall;
  counts_.max_stall_ns = std::max(counts_.max_stall_ns, stall);
  counts_.cpu_ns += mailbox_.compute_ns;
  counts_.device_wait_ns += mailbox_.wait_ns;
  counts_.cold_experts += static_cast<uint64_t>(mailbox_.n_experts);
  counts_.foreseen += static_cast<uint64_t>(mailbox_.n_foreseen);
  routed.args.sums->add(*mailbox_.sums, routed.n_rows);
}

void SimExperts::lane_loop() noexcept {
  uint64_t idle_since = 0;
  int last_layer = -1;
  for (uint32_t done = 0;;) {
    const auto posted = [&] { return mailbox_.post.load(std::memory_order_relaxed) != done; };
    while (!posted() && core_.ahead() != nullptr && core_.ahead()->help(posted)) {
    }
    mailbox_.post.wait(done, std::memory_order_acquire);
    const uint32_t number = mailbox_.post.load(std::memory_order_acquire);
    if (stop_.load()) return;
    if (number == done) continue;
    const uint64_t start = now_ns();
    // Before the first layer of a step there was none to wait for.
    mailbox_.wait_ns = mailbox_.layer > last_layer && last_layer >= 0 ? start - idle_since : 0;
    last_layer = mailbox_.layer;
    mailbox_.sums = &lane_->compute(mailbox_.layer, mailbox_.pairs, mailbox_.x.as<float>(), mailbox_.n_rows);
    mailbox_.compute_ns = now_ns() - start;
    if (core_.ahead() != nullptr)
      core_.ahead()->help([] { return false; });  // chooses and sends: with the placement of this step
    mailbox_.n_foreseen = lane_->last_foreseen();
    mailbox_.n_experts = lane_->last_experts();
    if (TraceWriter* trace = options_.split.trace)
      trace->add({.lane = TraceLane::Cpu,
                  .name = "cold experts",
                  .category = "experts",
                  .begin_ns = static_cast<int64_t>(start),
                  .duration_ns = static_cast<int64_t>(mailbox_.compute_ns),
                  .args = {{{"layer", mailbox_.layer}, {"experts", lane_->last_experts()}}}});
    done = number;
    idle_since = now_ns();
    mailbox_.answer.store(number, std::memory_order_release);
    mailbox_.answer.notify_one();
  }
}

}  // namespace thermo
