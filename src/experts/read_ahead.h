// Brings the cold experts that the next layers will probably need closer, before they are asked for.
//
// The threads of a pool do all of it, after they have left a layer's region and while the device is at
// attention, which is a third of a layer's time or more. They apply the routers of the next layer and of the
// one Courier::kDistance ahead to rows of the step (ExpertForecast), each thread its own panels. The thread
// that runs the regions sends the likeliest cold experts of the further layer to the device (Courier). Those
// of the next layer that were not sent are loaded from main memory into the cores' caches: each thread loads
// what it would compute itself (ffn_share), likeliest first. No one waits for any of this: when the layer's
// real experts are known, end() stops it wherever it is, and the layer's region opens without a thread that
// has lost its core there.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/load_line.h"
#include "experts/catalog.h"
#include "experts/forecast.h"
#include "kernels/expert_ffn/expert_ffn.h"

namespace thermo {

class Courier;
class ThreadPool;

class ReadAhead {
 public:
  // The cold expert in main memory, or nullptr: not cold, or not there. Called by any thread between begin()
  // and end().
  using AddressFn = std::function<const std::byte*(int layer, int expert)>;

  struct Sending {
    const ExpertForecast* forecast = nullptr;  // of Courier::kDistance
    Courier* courier = nullptr;
  };

  // All must outlive it. `next`: of distance 1. Without a courier nothing is sent.
  ReadAhead(const ExpertCatalog& catalog, const ExpertForecast& next, ThreadPool& pool,
            AddressFn cold_address, const Sending& sending);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The rows of a step that guesses are made from. All if they are few; else some, evenly over the sequences
  // and branches of the step: guesses need not cover all that is chosen, and scores take time.
  static constexpr int kMaxRows = 8;
  struct Rows {
    int n = 0;
    int32_t at[kMaxRows] = {};
  };
  static Rows rows_of(int n_rows) noexcept;

  // The next region of the pool computes the experts of `layer`; threads that leave it start on those of the
  // layers after it, guessed from these rows of x. `x`, with the forecast's form of the rows, stays unchanged
  // until end(). Does nothing if they cannot be guessed, or while a thread that has lost its core is still in
  // the previous one.
  void begin(int layer, const ActBuffer& x, const Rows& rows) noexcept;
  // From here on no thread reads `x` or the placement. A thread that has lost its core may still load
  // experts.
  void end() noexcept;
  // Called by the thread that is thread 0 of the pool; works until over() or until nothing is left. False
  // when there was nothing to do. The first call after a region chooses and sends, and returns.
  bool help(const std::function<bool()>& over) noexcept;

  void add_format(ActFormats& formats) const { next_.add_format(formats); }

  // Bytes loaded since the last call. Between end() and begin().
  uint64_t take_bytes() noexcept { return std::exchange(n_bytes_, 0); }
  // How many of these experts the last begin() guessed for this layer and did not send. Between end() and
  // begin().
  int n_foreseen(int layer, std::span<const int32_t> experts) const noexcept;

 private:
  static constexpr int kMaxGuesses = 32;
  // What a thread does, on cache lines of its own.
  struct alignas(128) Cursor {
    std::atomic<int> scoring{kStopped};  // its panels: 2 x rows that are scored, and 1 while one is being
    std::atomic<uint64_t> n_bytes{0};    // loaded
    LoadRange left;                      // of the part that is loaded
    int next = 0;                        // part: two of routers, then three of each guess
  };
  static constexpr int kStopped = 2 * kMaxRows;

  bool everyone_left() const noexcept;
  bool work(int thread, const std::function<bool()>& over) noexcept;
  void score(int thread, const std::function<bool()>& over) noexcept;
  bool scored(const Cursor& cursor) const noexcept {
    return cursor.scoring.load(std::memory_order_acquire) >= 2 * rows_.n;
  }
  // The likely experts of a layer, those that are cold, best first; how many.
  int likely_cold(const ExpertForecast& forecast, int layer, float* scores, int32_t* experts,
                  const std::byte** addresses) noexcept;
  void choose() noexcept;
  void send() noexcept;
  void next_part(int thread, Cursor& cursor) const noexcept;
  PanelRange router_share(int thread) const noexcept;

  const ExpertCatalog& catalog_;
  const ExpertForecast& next_;
  ThreadPool& pool_;
  AddressFn cold_address_;
  Sending sending_;
  int n_threads_;
  int max_guesses_;                         // that the caches have room for
  int row_guesses_;                         // of a row
  std::vector<float> scores_, far_scores_;  // [kMaxRows][panels of 16]
  std::vector<float> missed_;               // of each expert: the chance that no row wants it
  std::vector<int32_t> likely_;

  bool active_ = false;
  bool chosen_ = false;              // and sent
  int layer_ = -1, far_layer_ = -1;  // guessed; sent to. -1: none
  const ActBuffer* x_ = nullptr;
  Rows rows_;
  uint64_t n_bytes_ = 0;
  int foreseen_layer_ = -1;  // the layer of guessed_
  alignas(64) std::atomic<int> n_guesses_{0};
  Ffn guesses_[kMaxGuesses];
  int32_t guessed_[kMaxGuesses];
  std::vector<Cursor> cursors_;
};

}  // namespace thermo
