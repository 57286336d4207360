// States of an expert in the cache, all under one mutex; only its address can be read without it.
//
//   Absent --want, acquire--> Queued --a reader, once a slot is free--> Reading --> Present --evicted-->
//   Absent
//
// A reader's job is one matrix, so that several readers work on an expert that a thread waits for; the last
// one makes it Present. An expert leaves only while Present and not held, the longest unused first. A thread
// that waits for an expert already holds it, so the expert cannot leave between its arrival and the waiter's
// turn.
#include "experts/host_tier.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/error.h"
#include "base/file_reader.h"
#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "experts/trace.h"
#include "kernels/quant_matmul/pack.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

// Experts of the same size share slots.
struct SizeClass {
  uint64_t bytes = 0;
  int n_experts = 0;
  int largest_layer = 0;  // its number of experts

  int min_slots() const { return std::min(n_experts, largest_layer + HostTier::kSpareSlots); }
};

std::vector<SizeClass> size_classes(const ExpertCatalog& catalog) {
  std::map<uint64_t, SizeClass> by_size;
  for (const ExpertLayer& layer : catalog.layers) {
    if (layer.experts.empty()) continue;
    SizeClass& c = by_size[layer.expert_bytes];
    c.bytes = layer.expert_bytes;
    c.n_experts += layer.n_expert();
    c.largest_layer = std::max(c.largest_layer, layer.n_expert());
  }
  std::vector<SizeClass> classes;
  for (const auto& [bytes, c] : by_size) classes.push_back(c);
  return classes;
}

uint64_t min_bytes_of(const std::vector<SizeClass>& classes) {
  uint64_t bytes = 0;
  for (const SizeClass& c : classes) bytes += static_cast<uint64_t>(c.min_slots()) * c.bytes;
  return bytes;
}

uint64_t largest_matrix_bytes(const ExpertCatalog& catalog) {
  uint64_t most = 0;
  for (const ExpertLayer& layer : catalog.layers)
    if (!layer.experts.empty())
      for (const Matrix* m :
           {&layer.experts.front().gate, &layer.experts.front().up, &layer.experts.front().down})
        most = std::max(most, m->n_bytes());
  return most;
}

enum class State : uint8_t { Absent, Queued, Reading, Present };

struct Entry {
  std::atomic<std::byte*> address{nullptr};  // while Present
  int layer = 0, expert = 0;
  int size_class = 0;
  int slot = -1;  // while Reading or Present
  int n_holds = 0;
  State state = State::Absent;
  bool fresh = false;      // read for a demand that was counted already
  bool passing = false;    // read while passing: the first to leave
  uint8_t parts_left = 0;  // while Queued or Reading: matrices still missing
};

constexpr int kParts = 3;  // gate, up, down
struct Job {
  int id = 0;
  int part = 0;
};

// A slot that is not held is in one list of its class: free, or by age.
struct Slot {
  std::byte* memory = nullptr;
  int entry = -1;
  int previous = -1, next = -1;
};

struct ClassSlots {
  int n_slots = 0;
  std::vector<int> free;
  int oldest = -1, newest = -1;
};

}  // namespace

struct HostTier::Impl {
  const ExpertCatalog& catalog;
  std::span<std::byte> arena;
  std::vector<std::unique_ptr<FileReader>> files;
  uint64_t buffer_bytes;
  TraceWriter* trace;

  std::vector<int> first;  // entry of each layer's first expert
  int n_entries = 0;
  std::unique_ptr<Entry[]> entries;
  bool all_fit = false;
  bool is_complete = false;  // all_fit, and loaded

  std::vector<Slot> slots;
  std::vector<ClassSlots> classes;

  mutable std::mutex mutex;
  std::condition_variable work, room, ready;
  std::vector<Job> queue;  // a ring: a matrix is in it at most once
  size_t queue_head = 0, queue_size = 0;
  bool stop = false;
  bool passing = false;
  HostTierStats stats;
  std::string fault;  // written once, before has_fault
  std::atomic<bool> has_fault{false};
  std::vector<std::thread> readers;

  Impl(const ExpertCatalog& c, const HostTierOptions& o);
  ~Impl();

  Entry& entry(int layer, int expert) const noexcept {
    return entries[static_cast<size_t>(first[static_cast<size_t>(layer)] + expert)];
  }
  void lay_out_all();
  void lay_out_cache(const std::vector<SizeClass>& sizes);
  void start_readers(int n);

  Status read_matrix(const Matrix& view, std::span<std::byte> buffer, std::byte* to) const;
  Status read_part(const Entry& e, int part, std::span<std::byte> buffer, std::byte* expert) const;
  void fail(const std::string& why);

  // With the mutex held.
  void unlink(int slot) noexcept;
  void put_oldest(int slot) noexcept;
  void put_newest(int slot) noexcept;
  void enqueue(int id) noexcept;
  int take_slot(int size_class) noexcept;  // -1: all are held
  void hold(Entry& e) noexcept;

  void read_loop() noexcept;
};

HostTier::Impl::Impl(const ExpertCatalog& c, const HostTierOptions& o)
    : catalog(c),
      arena(o.arena),
      buffer_bytes(align_up<uint64_t>(FileReader::buffer_bytes(largest_matrix_bytes(c)), FileReader::kAlign)),
      trace(o.trace) {
  for (const MappedFile* file : o.files) files.push_back(std::make_unique<FileReader>(*file));
  const std::vector<SizeClass> sizes = size_classes(c);
  for (const ExpertLayer& layer : c.layers) {
    first.push_back(n_entries);
    n_entries += layer.n_expert();
  }
  entries = std::make_unique<Entry[]>(static_cast<size_t>(n_entries));
  queue.resize(static_cast<size_t>(n_entries) * kParts);
  for (size_t l = 0; l < c.layers.size(); ++l)
    for (int i = 0; i < c.layers[l].n_expert(); ++i) {
      Entry& e = entry(static_cast<int>(l), i);
      e.layer = static_cast<int>(l);
      e.expert = i;
      while (sizes[static_cast<size_t>(e.size_class)].bytes != c.layers[l].expert_bytes) ++e.size_class;
    }
  all_fit = c.total_bytes() <= arena.size();
  if (!all_fit && min_bytes_of(sizes) > arena.size())
    throw MemoryError(
        fmt::format("{} of main memory for experts hold too few of them for one layer: {} is the least, all "
                    "of them take {}; give them more of it",
                    format_bytes(arena.size()), format_bytes(min_bytes_of(sizes)),
                    format_bytes(c.total_bytes())),
        Remedy::MoreExpertMemory);
  if (all_fit) {
    lay_out_all();
  } else {
    lay_out_cache(sizes);
    start_readers(std::max(1, o.n_readers));
  }
}

HostTier::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  work.notify_all();
  room.notify_all();
  for (std::thread& reader : readers) reader.join();
}

// Every expert has a slot of its own.
void HostTier::Impl::lay_out_all() {
  uint64_t at = 0;
  slots.resize(static_cast<size_t>(n_entries));
  for (int id = 0; id < n_entries; ++id) {
    Entry& e = entries[static_cast<size_t>(id)];
    e.slot = id;
    slots[static_cast<size_t>(id)] = {.memory = arena.data() + at, .entry = id};
    at += catalog.layers[static_cast<size_t>(e.layer)].expert_bytes;
  }
}

// Every class gets the minimum it needs; the rest is divided by what each still lacks.
void HostTier::Impl::lay_out_cache(const std::vector<SizeClass>& sizes) {
  const uint64_t rest = arena.size() - min_bytes_of(sizes);
  const uint64_t lacking = catalog.total_bytes() - min_bytes_of(sizes);
  std::byte* at = arena.data();
  for (const SizeClass& size : sizes) {
    const double lack = static_cast<double>(size.n_experts - size.min_slots()) *
                        static_cast<double>(size.bytes) / static_cast<double>(lacking);
    const int more = static_cast<int>(lack * static_cast<double>(rest) / static_cast<double>(size.bytes));
    ClassSlots& slots_of = classes.emplace_back();
    for (int i = std::min(size.min_slots() + more, size.n_experts); i > 0; --i) {
      slots_of.free.push_back(static_cast<int>(slots.size()));
      slots.push_back({.memory = at});
      at += size.bytes;
    }
    std::reverse(slots_of.free.begin(), slots_of.free.end());
    slots_of.n_slots = static_cast<int>(slots_of.free.size());
  }
  THERMO_CHECK(at <= arena.data() + arena.size(), "slots beyond the arena");
}

void HostTier::Impl::start_readers(int n) {
  for (int i = 0; i < n; ++i) readers.emplace_back([this] { read_loop(); });
}

Status HostTier::Impl::read_matrix(const Matrix& view, std::span<std::byte> buffer, std::byte* to) const {
  Matrix m = view;
  for (const std::unique_ptr<FileReader>& file : files) {
    const std::span<const std::byte> bytes = file->file().bytes();
    if (view.rows < bytes.data() || view.rows >= bytes.data() + bytes.size()) continue;
    // Some columns of each row: through the mapping, so that the other columns' parts find them in memory.
    if (view.row_stride > 0) break;
    auto got = file->read(static_cast<uint64_t>(view.rows - bytes.data()), view.n_bytes(), buffer);
    if (!got) return got.error();
    m.rows = *got;
    break;
  }
  const size_t bytes = panel_bytes(m.dtype, m.n_cols);
  for (int p = 0; p < n_panels(m.n_rows); ++p)
    pack_panel(m.dtype, m.rows, m.row_stride, m.n_rows, m.n_cols, p, to + static_cast<size_t>(p) * bytes);
  return {};
}

Status HostTier::Impl::read_part(const Entry& e, int part, std::span<std::byte> buffer,
                                 std::byte* expert) const {
  const ExpertLayer& layer = catalog.layers[static_cast<size_t>(e.layer)];
  const Ffn& view = layer.experts[static_cast<size_t>(e.expert)];
  const Matrix& m = part == 0 ? view.gate : part == 1 ? view.up : view.down;
  std::byte* const to = expert + (part == 0 ? 0 : part == 1 ? layer.up_offset : layer.down_offset);
  Status status = read_matrix(m, buffer, to);
  if (status) return status;
  std::memset(to, 0, packed_matrix_bytes(m.dtype, m.n_rows, m.n_cols));
  return Error{status.error().code,
               fmt::format("expert {} of layer {}: {}", e.expert, e.layer, status.error().message)};
}

void HostTier::Impl::fail(const std::string& why) {
  if (has_fault.load(std::memory_order_relaxed)) return;
  fault = why;
  has_fault.store(true, std::memory_order_release);
}

void HostTier::Impl::unlink(int slot) noexcept {
  Slot& s = slots[static_cast<size_t>(slot)];
  ClassSlots& c = classes[static_cast<size_t>(entries[static_cast<size_t>(s.entry)].size_class)];
  (s.previous < 0 ? c.oldest : slots[static_cast<size_t>(s.previous)].next) = s.next;
  (s.next < 0 ? c.newest : slots[static_cast<size_t>(s.next)].previous) = s.previous;
}

void HostTier::Impl::put_newest(int slot) noexcept {
  Slot& s = slots[static_cast<size_t>(slot)];
  ClassSlots& c = classes[static_cast<size_t>(entries[static_cast<size_t>(s.entry)].size_class)];
  s.previous = c.newest;
  s.next = -1;
  (c.newest < 0 ? c.oldest : slots[static_cast<size_t>(c.newest)].next) = slot;
  c.newest = slot;
}

void HostTier::Impl::put_oldest(int slot) noexcept {
  Slot& s = slots[static_cast<size_t>(slot)];
  ClassSlots& c = classes[static_cast<size_t>(entries[static_cast<size_t>(s.entry)].size_class)];
  s.previous = -1;
  s.next = c.oldest;
  (c.oldest < 0 ? c.newest : slots[static_cast<size_t>(c.oldest)].previous) = slot;
  c.oldest = slot;
}

void HostTier::Impl::enqueue(int id) noexcept {
  Entry& e = entries[static_cast<size_t>(id)];
  e.state = State::Queued;
  e.fresh = true;
  e.passing = passing;
  e.parts_left = kParts;
  for (int part = 0; part < kParts; ++part) {
    queue[(queue_head + queue_size++) % queue.size()] = {id, part};
    work.notify_one();
  }
  ++stats.misses;
}

int HostTier::Impl::take_slot(int size_class) noexcept {
  ClassSlots& c = classes[static_cast<size_t>(size_class)];
  if (!c.free.empty()) {
    const int slot = c.free.back();
    c.free.pop_back();
    return slot;
  }
  const int slot = c.oldest;
  if (slot < 0) return -1;
  unlink(slot);
  Entry& leaving = entries[static_cast<size_t>(slots[static_cast<size_t>(slot)].entry)];
  leaving.address.store(nullptr, std::memory_order_relaxed);
  leaving.state = State::Absent;
  leaving.slot = -1;
  return slot;
}

void HostTier::Impl::hold(Entry& e) noexcept {
  if (e.n_holds++ == 0 && e.state == State::Present) unlink(e.slot);
}

void HostTier::Impl::read_loop() noexcept {
  const HostBuffer buffer(buffer_bytes);
  std::unique_lock lock(mutex);
  for (;;) {
    work.wait(lock, [&] { return stop || queue_size > 0; });
    if (stop) return;
    const Job job = queue[queue_head];
    queue_head = (queue_head + 1) % queue.size();
    --queue_size;
    Entry& e = entries[static_cast<size_t>(job.id)];
    room.wait(lock, [&] { return stop || e.slot >= 0 || (e.slot = take_slot(e.size_class)) >= 0; });
    if (stop) return;
    Slot& slot = slots[static_cast<size_t>(e.slot)];
    slot.entry = job.id;
    e.state = State::Reading;
    lock.unlock();
    const int64_t begin_ns = trace != nullptr ? now_ns() : 0;
    const Status status = read_part(e, job.part, {buffer.data(), buffer.size()}, slot.memory);
    if (trace != nullptr)
      trace->add({.lane = TraceLane::Disk,
                  .name = "read",
                  .category = "experts",
                  .begin_ns = begin_ns,
                  .duration_ns = now_ns() - begin_ns,
                  .args = {{{"layer", e.layer}, {"expert", e.expert}, {"part", job.part}}}});
    lock.lock();
    if (!status) fail(status.error().message);
    if (--e.parts_left > 0) continue;
    stats.bytes_read +=
        catalog.layers[static_cast<size_t>(e.layer)].experts[static_cast<size_t>(e.expert)].n_bytes();
    e.state = State::Present;
    e.address.store(slot.memory, std::memory_order_release);
    if (e.n_holds == 0) {
      put_newest(e.slot);  // wanted and not yet used: the last to leave
      room.notify_all();
    }
    ready.notify_all();
  }
}

HostTier::HostTier(const ExpertCatalog& catalog, const HostTierOptions& options)
    : impl_(std::make_unique<Impl>(catalog, options)) {}
HostTier::~HostTier() = default;

uint64_t HostTier::bytes_for_all(const ExpertCatalog& catalog) {
  return catalog.total_bytes();
}
uint64_t HostTier::min_bytes(const ExpertCatalog& catalog) {
  return min_bytes_of(size_classes(catalog));
}

void HostTier::load(ThreadPool& pool, std::span<const std::pair<int, int>> order,
                    const std::function<void(uint64_t done, uint64_t total)>& progress) {
  Impl& t = *impl_;
  // Which experts come in: the given ones, then the first expert of every layer, the second of every layer,
  // ...
  std::vector<int> ids;
  std::vector<bool> chosen(static_cast<size_t>(t.n_entries));
  uint64_t total = 0;
  const auto choose = [&](int layer, int expert) {
    const int id = t.first[static_cast<size_t>(layer)] + expert;
    Entry& e = t.entries[static_cast<size_t>(id)];
    if (chosen[static_cast<size_t>(id)] || e.state != State::Absent) return;
    if (!t.all_fit) {
      ClassSlots& c = t.classes[static_cast<size_t>(e.size_class)];
      if (c.free.empty()) return;
      e.slot = c.free.back();
      c.free.pop_back();
      t.slots[static_cast<size_t>(e.slot)].entry = id;
    }
    chosen[static_cast<size_t>(id)] = true;
    ids.push_back(id);
    total += t.catalog.layers[static_cast<size_t>(layer)].expert_bytes;
  };
  {
    const std::lock_guard lock(t.mutex);
    for (const auto& [layer, expert] : order) choose(layer, expert);
    for (int i = 0; i < t.catalog.n_expert; ++i)
      for (size_t l = 0; l < t.catalog.layers.size(); ++l)
        if (i < t.catalog.layers[l].n_expert()) choose(static_cast<int>(l), i);
  }

  // In the file's order, a few hundred at a time, to report progress.
  std::vector<int> by_place = ids;
  std::sort(by_place.begin(), by_place.end());
  const HostBuffer buffers(t.buffer_bytes * static_cast<uint64_t>(pool.size()));
  constexpr int kRound = 256;
  uint64_t done = 0;
  if (progress) progress(0, total);
  for (size_t begin = 0; begin < by_place.size(); begin += kRound) {
    const int n = static_cast<int>(std::min<size_t>(kRound, by_place.size() - begin));
    pool.run(n, [&](int i, int thread) {
      const Entry& e = t.entries[static_cast<size_t>(by_place[begin + static_cast<size_t>(i)])];
      const std::span<std::byte> buffer(buffers.data() + t.buffer_bytes * static_cast<uint64_t>(thread),
                                        t.buffer_bytes);
      for (int part = 0; part < kParts; ++part) {
        const Status status = t.read_part(e, part, buffer, t.slots[static_cast<size_t>(e.slot)].memory);
        if (status) continue;
        const std::lock_guard lock(t.mutex);
        t.fail(status.error().message);
      }
    });
    for (int i = 0; i < n; ++i)
      done += t.catalog
                  .layers[static_cast<size_t>(
                      t.entries[static_cast<size_t>(by_place[begin + static_cast<size_t>(i)])].layer)]
                  .expert_bytes;
    if (!fault().empty()) throw LoadError(std::string(fault()));
    if (progress) progress(done, total);
  }

  const std::lock_guard lock(t.mutex);
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {  // the first of `order` leaves last
    Entry& e = t.entries[static_cast<size_t>(*id)];
    e.state = State::Present;
    e.address.store(t.slots[static_cast<size_t>(e.slot)].memory, std::memory_order_release);
    if (!t.all_fit) t.put_newest(e.slot);
  }
  t.is_complete = t.all_fit;
}

bool HostTier::complete() const noexcept {
  return impl_->is_complete;
}

const std::byte* HostTier::address(int layer, int expert) const noexcept {
  return impl_->entry(layer, expert).address.load(std::memory_order_acquire);
}

void HostTier::want(int layer, std::span<const int32_t> experts) noexcept {
  Impl& t = *impl_;
  if (t.is_complete) return;
  const std::lock_guard lock(t.mutex);
  for (const int32_t expert : experts) {
    Entry& e = t.entry(layer, expert);
    if (e.state == State::Absent) t.enqueue(t.first[static_cast<size_t>(layer)] + expert);
    if (e.state != State::Present || e.n_holds > 0) continue;
    t.unlink(e.slot);  // reading the others must not push it out
    t.put_newest(e.slot);
  }
}

Ffn HostTier::acquire(int layer, int expert) noexcept {
  Impl& t = *impl_;
  Entry& e = t.entry(layer, expert);
  if (!t.is_complete) {
    std::unique_lock lock(t.mutex);
    THERMO_CHECK(!t.all_fit, "an expert was asked for before load()");
    t.hold(e);
    if (e.state == State::Absent) t.enqueue(t.first[static_cast<size_t>(layer)] + expert);
    if (e.state != State::Present) {
      const auto start = std::chrono::steady_clock::now();
      t.ready.wait(lock, [&] { return e.state == State::Present; });
      t.stats.wait_ns += static_cast<uint64_t>(
          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
              .count());
    }
    if (!std::exchange(e.fresh, false)) ++t.stats.hits;
    if (!t.passing) e.passing = false;
  }
  return t.catalog.packed_at(layer, expert, e.address.load(std::memory_order_relaxed));
}

std::optional<Ffn> HostTier::try_acquire(int layer, int expert) noexcept {
  Impl& t = *impl_;
  Entry& e = t.entry(layer, expert);
  if (!t.is_complete) {
    const std::lock_guard lock(t.mutex);
    if (e.state != State::Present) return std::nullopt;
    t.hold(e);
  }
  return t.catalog.packed_at(layer, expert, e.address.load(std::memory_order_relaxed));
}

void HostTier::release(int layer, int expert) noexcept {
  Impl& t = *impl_;
  if (t.is_complete) return;
  const std::lock_guard lock(t.mutex);
  Entry& e = t.entry(layer, expert);
  THERMO_CHECK(e.n_holds > 0, "an expert was released that is not held");
  if (--e.n_holds > 0) return;
  if (e.passing)
    t.put_oldest(e.slot);
  else
    t.put_newest(e.slot);
  t.room.notify_all();
}

void HostTier::set_passing(bool passing) noexcept {
  const std::lock_guard lock(impl_->mutex);
  impl_->passing = passing;
}

int HostTier::n_slots() const noexcept {
  return static_cast<int>(impl_->slots.size());
}

int HostTier::n_slots_of_a_size() const noexcept {
  int fewest = n_slots();
  for (const ClassSlots& c : impl_->classes) fewest = std::min(fewest, c.n_slots);
  return fewest;
}

std::string_view HostTier::fault() const noexcept {
  return impl_->has_fault.load(std::memory_order_acquire) ? std::string_view(impl_->fault)
                                                          : std::string_view();
}

HostTierStats HostTier::stats() const noexcept {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

}  // namespace thermo
