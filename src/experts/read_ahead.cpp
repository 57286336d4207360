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

// What the cores' caches have room for.
int guesses_that_fit(const ExpertCatalog& catalog, int n_threads) {
  const uint64_t room = cpu_info().l2_bytes / 2 * static_cast<uint64_t>(n_threads);
  const uint64_t n = room / std::max<uint64_t>(1, catalog.max_expert_bytes());
  return std::max(1, static_cast<int>(std::min(n, static_cast<uint64_t>(catalog.n_expert))));
}

// More than a row chooses: the next likeliest are worth the time that is left.
int guesses_of_a_row(const ExpertCatalog& catalog) {
  return std::clamp(catalog.n_active + catalog.n_active / 2, 1, catalog.n_expert);
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
      max_guesses_(std::min(kMaxGuesses, guesses_that_fit(catalog, pool.size()))),
      row_guesses_(std::min(max_guesses_, guesses_of_a_row(catalog))),
      scores_(static_cast<size_t>(kMaxRows * next.n_panels() * kPanelRows)),
      far_scores_(scores_.size()),
      missed_(static_cast<size_t>(next.n_expert()), 1.0f),
      cursors_(static_cast<size_t>(pool.size())) {
  likely_.reserve(missed_.size());
}

ReadAhead::~ReadAhead() {
  end();
  while (!pool_.everyone_left()) pause_cpu();
}

ReadAhead::Rows ReadAhead::rows_of(int n_rows) noexcept {
  Rows rows{.n = std::min(n_rows, kMaxRows)};
  for (int i = 0; i < rows.n; ++i) rows.at[i] = i * n_rows / rows.n;
  return rows;
}

void ReadAhead::begin(int layer, const ActBuffer& x, const Rows& rows) noexcept {
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
    cursor.scoring.store(0, std::memory_order_relaxed);
    cursor.n_bytes.store(0, std::memory_order_relaxed);
    cursor.left = {};
    cursor.next = 0;
  }
  x_ = &x;
  rows_ = rows;
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
    for (int at = cursor.scoring.load(std::memory_order_acquire); !scored(cursor);) {
      if (at % 2 == 0 && cursor.scoring.compare_exchange_weak(at, kStopped)) break;  // none begins any more
      pause_cpu();
      at = cursor.scoring.load(std::memory_order_acquire);
    }
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
  // A thread that the system has not scheduled has not begun with its panels, and one that is at a row is
  // done with it soon, unless it lost its core there.
  for (int i = 0; i < n_threads_; ++i)
    for (score(i, over); !scored(cursors_[static_cast<size_t>(i)]); score(i, over)) {
      if (over()) return true;
      pause_cpu();
    }
  if (layer_ >= 0) choose();
  if (far_layer_ >= 0) send();
  chosen_ = true;
  return true;
}

// A thread's panels of the routers, row after row until somebody else has taken one.
void ReadAhead::score(int thread, const std::function<bool()>& over) noexcept {
  std::atomic<int>& state = cursors_[static_cast<size_t>(thread)].scoring;
  const PanelRange panels = router_share(thread);
  const int stride = next_.n_panels() * kPanelRows;
  for (int at = state.load(std::memory_order_acquire); at % 2 == 0 && at < 2 * rows_.n && !over(); at += 2) {
    if (!state.compare_exchange_strong(at, at + 1)) return;
    const int i = at / 2, row = rows_.at[i];
    for (int p = panels.begin; p < panels.end; ++p) {
      if (layer_ >= 0) next_.score(layer_, *x_, row, p, scores_.data() + i * stride);
      if (far_layer_ >= 0) sending_.forecast->score(far_layer_, *x_, row, p, far_scores_.data() + i * stride);
    }
    state.store(at + 2, std::memory_order_release);
  }
}

// The union of what the rows probably choose. The further down a row's list an expert is, the likelier the
// row will not choose it; rows are taken to choose independently.
int ReadAhead::likely_cold(const ExpertForecast& forecast, int layer, float* scores, int32_t* experts,
                           const std::byte** addresses) noexcept {
  const auto missed = [&](int32_t expert) -> float& { return missed_[static_cast<size_t>(expert)]; };
  likely_.clear();
  for (int i = 0; i < rows_.n; ++i) {
    int32_t ids[kMaxGuesses];
    forecast.choose(layer, scores + i * forecast.n_panels() * kPanelRows,
                    {ids, static_cast<size_t>(row_guesses_)});
    for (int rank = 0; rank < row_guesses_; ++rank) {
      if (missed(ids[rank]) == 1.0f) likely_.push_back(ids[rank]);
      missed(ids[rank]) *= static_cast<float>(rank + 1) / static_cast<float>(row_guesses_ + 1);
    }
  }
  if (rows_.n > 1)
    std::sort(likely_.begin(), likely_.end(),
              [&](int32_t a, int32_t b) { return missed(a) != missed(b) ? missed(a) < missed(b) : a < b; });
  int n = 0;
  for (const int32_t expert : likely_) {
    missed(expert) = 1.0f;
    if (n == max_guesses_) continue;
    addresses[n] = cold_address_(layer, expert);
    if (addresses[n] != nullptr) experts[n++] = expert;
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
  score(thread, over);
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
