// Brings the cold experts that the next layer will probably want from main memory into the cores' caches
// while the processor has nothing to compute: the device is at attention, which is a third of a layer's time
// and more.
//
// The waiting threads of the pool first apply the next router (ExpertForecast), sixteen experts to a piece,
// then each loads the part of the guessed experts that it would compute itself (ffn_share), likeliest
// first. Nobody waits for any of it: when the layer's real experts are known, end() stops it wherever it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "experts/catalog.h"
#include "experts/forecast.h"

namespace thermo {

class ThreadPool;

class ReadAhead {
 public:
  // The cold expert in main memory, or nullptr: not cold, or not there. Called by any thread between begin()
  // and end().
  using AddressFn = std::function<const std::byte*(int layer, int expert)>;

  // All must outlive it; `forecast` is used by this alone.
  ReadAhead(const ExpertCatalog& catalog, ExpertForecast& forecast, ThreadPool& pool, AddressFn cold_address);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The next region of the pool computes the experts of `layer` from row 0 of x; threads that leave it go for
  // those of the layer behind. `x`, with the forecast's form of the row, stays as it is until end(). Does
  // nothing where they cannot be guessed.
  void begin(int layer, const ActBuffer& x) noexcept;
  // From here on nobody touches anything. Before `x` or the placement changes.
  void end() noexcept;
  // By the calling thread, which is thread 0 of the pool, until over() or until nothing is left: false when
  // there was nothing.
  bool help(const std::function<bool()>& over) noexcept { return active_ && work(0, over); }

  void add_format(ActFormats& formats) const { forecast_.add_format(formats); }

  // Whether the guess of the last begin() is there; loading comes behind it.
  bool guessed() const noexcept { return n_guesses_.load(std::memory_order_acquire) >= 0; }
  // Bytes loaded since the last begin(). Between end() and begin().
  uint64_t n_bytes() const noexcept;
  // Of the experts, how many were guessed for this layer by the last begin(). Between end() and begin().
  int n_foreseen(int layer, std::span<const int32_t> experts) const noexcept;

 private:
  static constexpr int kMaxGuesses = 32;
  // A thread's place in what it loads.
  struct alignas(128) Cursor {
    const std::byte *begin = nullptr, *at = nullptr, *end = nullptr;  // of the part
    uint64_t done = 0;                                                // bytes of the parts before
    int next = 0;                                                     // part: gate, up and down of each guess
  };

  bool work(int thread, const std::function<bool()>& over) noexcept;
  bool score() noexcept;
  void choose() noexcept;
  void next_part(int thread, Cursor& cursor) const noexcept;

  const ExpertCatalog& catalog_;
  ExpertForecast& forecast_;
  ThreadPool& pool_;
  AddressFn cold_address_;
  int n_threads_;
  int max_guesses_;

  bool active_ = false;
  int layer_ = -1;  // that is guessed
  const ActBuffer* x_ = nullptr;
  std::vector<float> scores_;
  Ffn guesses_[kMaxGuesses];
  int32_t guessed_[kMaxGuesses];
  std::vector<Cursor> cursors_;
  alignas(64) std::atomic<int> next_panel_{0};
  alignas(64) std::atomic<int> panels_left_{0};
  alignas(64) std::atomic<int> n_guesses_{0};  // -1: not chosen yet
};

}  // namespace thermo
