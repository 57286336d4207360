#include "experts/read_ahead.h"

#include <algorithm>

#include "base/cpu_info.h"
#include "base/thread_pool.h"
#include "kernels/expert_ffn/expert_ffn.h"

namespace thermo {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPieceBytes = 16 * kLine;  // between two looks whether it is over: 0.1 us

// A load whose value nobody wants. Not a prefetch: those may be dropped, and are when the memory is busy,
// which is the point here (Zen 4: a prefetched expert was computed in 47 instead of 60 us, a loaded one in
// 20, as from the cache).
void load_line(const std::byte* p) noexcept {
  static_cast<void>(*reinterpret_cast<const volatile uint64_t*>(p));
}

// More guesses than a layer chooses: the next likeliest are worth the time that is left.
int guesses_worth_trying(const ExpertCatalog& catalog, int n_threads) {
  const uint64_t room = cpu_info().l2_bytes / 2 * static_cast<uint64_t>(n_threads);
  const auto by_cache = static_cast<int>(room / std::max<uint64_t>(1, catalog.max_expert_bytes()));
  return std::clamp(std::min(by_cache, catalog.n_active + catalog.n_active / 2), 1, catalog.n_expert);
}

}  // namespace

ReadAhead::ReadAhead(const ExpertCatalog& catalog, ExpertForecast& forecast, ThreadPool& pool,
                     AddressFn cold_address)
    : catalog_(catalog),
      forecast_(forecast),
      pool_(pool),
      cold_address_(std::move(cold_address)),
      n_threads_(pool.size()),
      max_guesses_(std::min(kMaxGuesses, guesses_worth_trying(catalog, pool.size()))),
      scores_(static_cast<size_t>(forecast.n_panels() * kPanelRows)),
      cursors_(static_cast<size_t>(pool.size())) {}

ReadAhead::~ReadAhead() {
  end();
}

void ReadAhead::begin(int layer, const ActBuffer& x) noexcept {
  end();
  layer_ = -1;
  std::fill(cursors_.begin(), cursors_.end(), Cursor{});
  const int next = layer + 1;
  if (next >= forecast_.n_layers() || !forecast_.has(next)) return;
  layer_ = next;
  x_ = &x;
  next_panel_.store(0, std::memory_order_relaxed);
  panels_left_.store(forecast_.n_panels(), std::memory_order_relaxed);
  n_guesses_.store(-1, std::memory_order_relaxed);
  active_ = true;
  pool_.offer(
      [](void* self, int thread, const std::function<bool()>& over) {
        return static_cast<ReadAhead*>(self)->work(thread, over);
      },
      this);
}

void ReadAhead::end() noexcept {
  if (!active_) return;
  pool_.withdraw();
  active_ = false;
}

bool ReadAhead::work(int thread, const std::function<bool()>& over) noexcept {
  const int n_guesses = n_guesses_.load(std::memory_order_acquire);
  if (n_guesses < 0) return score();
  Cursor& cursor = cursors_[static_cast<size_t>(thread)];
  bool did = false;
  for (; !over(); did = true) {
    while (cursor.at == cursor.end && cursor.next < 3 * n_guesses) next_part(thread, cursor);
    if (cursor.at == cursor.end) break;
    const std::byte* const stop = cursor.at + std::min<ptrdiff_t>(kPieceBytes, cursor.end - cursor.at);
    for (; cursor.at < stop; cursor.at += kLine) load_line(cursor.at);
  }
  return did;
}

// One panel of the router.
bool ReadAhead::score() noexcept {
  if (next_panel_.load(std::memory_order_relaxed) >= forecast_.n_panels()) return false;
  const int panel = next_panel_.fetch_add(1, std::memory_order_relaxed);
  if (panel >= forecast_.n_panels()) return false;
  forecast_.score(layer_, *x_, panel, scores_.data());
  if (panels_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) choose();
  return true;
}

void ReadAhead::choose() noexcept {
  int32_t likely[kMaxGuesses];
  forecast_.choose(layer_, scores_.data(), {likely, static_cast<size_t>(max_guesses_)});
  int n = 0;
  for (int i = 0; i < max_guesses_; ++i) {
    const std::byte* const address = cold_address_(layer_, likely[i]);
    if (address == nullptr) continue;
    guesses_[n] = catalog_.packed_at(layer_, likely[i], address);
    guessed_[n++] = likely[i];
  }
  n_guesses_.store(n, std::memory_order_release);
}

void ReadAhead::next_part(int thread, Cursor& cursor) const noexcept {
  const Ffn& ffn = guesses_[cursor.next / 3];
  const int part = cursor.next++ % 3;
  const FfnShare share = ffn_share(ffn, thread, n_threads_);
  const Matrix& w = part == 0 ? ffn.gate : part == 1 ? ffn.up : ffn.down;
  const PanelRange panels = part == 2 ? share.down : share.gate_up;
  const size_t bytes = panel_bytes(w.dtype, w.n_cols);  // a multiple of a line
  cursor.done += static_cast<uint64_t>(cursor.end - cursor.begin);
  cursor.begin = cursor.at = w.panels + static_cast<size_t>(panels.begin) * bytes;
  cursor.end = w.panels + static_cast<size_t>(panels.end) * bytes;
}

uint64_t ReadAhead::n_bytes() const noexcept {
  uint64_t bytes = 0;
  for (const Cursor& cursor : cursors_)
    bytes += cursor.done + static_cast<uint64_t>(cursor.at - cursor.begin);
  return bytes;
}

int ReadAhead::n_foreseen(int layer, std::span<const int32_t> experts) const noexcept {
  if (layer != layer_) return 0;
  const int n = std::max(0, n_guesses_.load(std::memory_order_relaxed));
  int found = 0;
  for (const int32_t expert : experts) found += std::find(guessed_, guessed_ + n, expert) != guessed_ + n;
  return found;
}

}  // namespace thermo
