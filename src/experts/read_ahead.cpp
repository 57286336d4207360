#include "experts/read_ahead.h"

#include <algorithm>

#include "base/cpu_info.h"
#include "base/pause.h"
#include "base/thread_pool.h"
#include "experts/courier.h"

namespace thermo {
namespace {

constexpr int kRouterParts = 2;  // of what a thread loads: its panels of both routers
constexpr int kPausesToLeave = 64;

// More guesses than a layer chooses: the next likeliest are worth the time that is left.
int guesses_worth_trying(const ExpertCatalog& catalog, int n_threads) {
  const uint64_t room = cpu_info().l2_bytes / 2 * static_cast<uint64_t>(n_threads);
  const auto by_cache = static_cast<int>(room / std::max<uint64_t>(1, catalog.max_expert_bytes()));
  return std::clamp(std::min(by_cache, catalog.n_active + catalog.n_active / 2), 1, catalog.n_expert);
}

}  // namespace

ReadAhead::ReadAhead(const ExpertCatalog& catalog, const ExpertForecast& next, ThreadPool& pool,
                     AddressFn cold_address, const Sending& sending)
    : catalog_(catalog),
      next_(next),
      pool_(pool),
      cold_address_(std::move(cold_address)),
      sending_(sending),
      n_threads_(pool.size()),
      max_guesses_(std::min(kMaxGuesses, guesses_worth_trying(catalog, pool.size()))),
      scores_(static_cast<size_t>(next.n_panels() * kPanelRows)),
      far_scores_(scores_.size()),
      cursors_(static_cast<size_t>(pool.size())) {}

ReadAhead::~ReadAhead() {
  end();
  while (!pool_.everyone_left()) pause_cpu();
}

void ReadAhead::begin(int layer, const ActBuffer& x) noexcept {
  end();
  foreseen_layer_ = -1;
  if (!everyone_left()) return;
  const auto guessed_by = [&](const ExpertForecast& forecast) {
    const int to = layer + forecast.distance();
    return forecast.has(to) ? to : -1;
  };
  layer_ = guessed_by(next_);
  far_layer_ = sending_.courier != nullptr ? guessed_by(*sending_.forecast) : -1;
  if (layer_ < 0 && far_layer_ < 0) return;
  n_guesses_.store(0, std::memory_order_relaxed);
  for (Cursor& cursor : cursors_) {
    cursor.scoring.store(kOpen, std::memory_order_relaxed);
    cursor.n_bytes.store(0, std::memory_order_relaxed);
    cursor.left = {};
    cursor.next = 0;
  }
  x_ = &x;
  active_ = true;
  chosen_ = false;
  pool_.offer(
      [](void* self, int thread, const std::function<bool()>& over) {
        return static_cast<ReadAhead*>(self)->work(thread, over);
      },
      this);
}

// They were told to leave before the pairs were sorted and the row was taken; one that is still inside after
// these pauses has no core.
bool ReadAhead::everyone_left() const noexcept {
  for (int i = 0; i < kPausesToLeave; ++i) {
    if (pool_.everyone_left()) return true;
    pause_cpu();
  }
  return false;
}

void ReadAhead::end() noexcept {
  if (!active_) return;
  active_ = false;
  pool_.withdraw();
  for (Cursor& cursor : cursors_) {
    int open = kOpen;
    if (!cursor.scoring.compare_exchange_strong(open, kScored))  // none begins any more
      while (cursor.scoring.load(std::memory_order_acquire) == kTaken) pause_cpu();
    n_bytes_ += cursor.n_bytes.load(std::memory_order_relaxed);
  }
}

PanelRange ReadAhead::router_share(int thread) const noexcept {
  const int n = next_.n_panels();
  return {n * thread / n_threads_, n * (thread + 1) / n_threads_};
}

bool ReadAhead::help(const std::function<bool()>& over) noexcept {
  if (!active_) return false;
  if (chosen_) return work(0, over);
  // A thread that the system has not scheduled has not taken its panels, and one that has taken them is done
  // soon, unless it lost its core there.
  for (int i = 0; i < n_threads_; ++i) {
    score(i);
    while (cursors_[static_cast<size_t>(i)].scoring.load(std::memory_order_acquire) != kScored) {
      if (over()) return true;
      pause_cpu();
    }
  }
  if (layer_ >= 0) choose();
  if (far_layer_ >= 0) send();
  chosen_ = true;
  return true;
}

// A thread's panels of the routers, unless they are taken already.
void ReadAhead::score(int thread) noexcept {
  std::atomic<int>& state = cursors_[static_cast<size_t>(thread)].scoring;
  int open = kOpen;
  if (state.load(std::memory_order_relaxed) != kOpen || !state.compare_exchange_strong(open, kTaken)) return;
  const PanelRange panels = router_share(thread);
  for (int p = panels.begin; p < panels.end; ++p) {
    if (layer_ >= 0) next_.score(layer_, *x_, p, scores_.data());
    if (far_layer_ >= 0) sending_.forecast->score(far_layer_, *x_, p, far_scores_.data());
  }
  state.store(kScored, std::memory_order_release);
}

int ReadAhead::likely_cold(const ExpertForecast& forecast, int layer, float* scores, int32_t* experts,
                           const std::byte** addresses) const noexcept {
  int32_t likely[kMaxGuesses];
  forecast.choose(layer, scores, {likely, static_cast<size_t>(max_guesses_)});
  int n = 0;
  for (int i = 0; i < max_guesses_; ++i) {
    addresses[n] = cold_address_(layer, likely[i]);
    if (addresses[n] != nullptr) experts[n++] = likely[i];
  }
  return n;
}

void ReadAhead::send() noexcept {
  int32_t experts[kMaxGuesses];
  const std::byte* addresses[kMaxGuesses];
  const int n = likely_cold(*sending_.forecast, far_layer_, far_scores_.data(), experts, addresses);
  const int n_sent = sending_.courier->allot(std::min(n, kMaxParcels));
  sending_.courier->send(far_layer_, {experts, static_cast<size_t>(n_sent)}, addresses);
}

void ReadAhead::choose() noexcept {
  int32_t experts[kMaxGuesses];
  const std::byte* addresses[kMaxGuesses];
  const int n_cold = likely_cold(next_, layer_, scores_.data(), experts, addresses);
  int n = 0;
  for (int i = 0; i < n_cold; ++i) {
    if (sending_.courier != nullptr && sending_.courier->sent(layer_, experts[i])) continue;
    guesses_[n] = catalog_.packed_at(layer_, experts[i], addresses[i]);
    guessed_[n++] = experts[i];
  }
  foreseen_layer_ = layer_;
  n_guesses_.store(n, std::memory_order_release);
}

bool ReadAhead::work(int thread, const std::function<bool()>& over) noexcept {
  score(thread);
  const int n_guesses = n_guesses_.load(std::memory_order_acquire);
  Cursor& cursor = cursors_[static_cast<size_t>(thread)];
  bool did = false;
  for (; !over(); did = true) {
    while (cursor.left.empty() && cursor.next < kRouterParts + 3 * n_guesses) next_part(thread, cursor);
    if (cursor.left.empty()) break;
    const uint64_t n = cursor.left.load_piece();
    cursor.n_bytes.store(cursor.n_bytes.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  return did;
}

void ReadAhead::next_part(int thread, Cursor& cursor) const noexcept {
  const int part = cursor.next++ - kRouterParts;
  if (part < 0) {  // what comes first after the next layer's region
    const ExpertForecast* const forecast = part == -1 ? &next_ : sending_.forecast;
    const int to = layer_ + (forecast != nullptr ? forecast->distance() : 0);
    const PanelRange panels = router_share(thread);
    const std::span<const std::byte> router = layer_ >= 0 && forecast != nullptr && forecast->has(to)
                                                  ? forecast->weights(to, panels.begin, panels.end)
                                                  : std::span<const std::byte>();
    cursor.left = {router.data(), router.data() + router.size()};
    return;
  }
  const Ffn& ffn = guesses_[part / 3];
  const FfnShare share = ffn_share(ffn, thread, n_threads_);
  const Matrix& w = part % 3 == 0 ? ffn.gate : part % 3 == 1 ? ffn.up : ffn.down;
  const PanelRange panels = part % 3 == 2 ? share.down : share.gate_up;
  cursor.left = panels_to_load(w, panels.begin, panels.end);
}

int ReadAhead::n_foreseen(int layer, std::span<const int32_t> experts) const noexcept {
  if (layer != foreseen_layer_) return 0;
  const int n = n_guesses_.load(std::memory_order_relaxed);
  int found = 0;
  for (const int32_t expert : experts) found += std::find(guessed_, guessed_ + n, expert) != guessed_ + n;
  return found;
}

}  // namespace thermo
