// Brings the cold experts that the next layers will probably want nearer before they are asked for.
//
// All of it is done by the threads of a pool when they have left a layer's region and the device is at
// attention, which is a third of a layer's time and more. They apply the routers of the next layer and of the
// one Courier::kDistance ahead to the row (ExpertForecast), each its panels. The thread that runs the regions
// sends the likeliest cold experts of the further one to the device (Courier). Those of the next layer that
// are not on their way are loaded from main memory into the cores' caches: each thread loads what it would
// compute itself (ffn_share), likeliest first. Nobody waits for any of it: when the layer's real experts are
// known, end() stops it wherever it is, and the layer's region opens without a thread that has lost its core
// there.
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

  // The next region of the pool computes the experts of `layer` from row 0 of x; threads that leave it go for
  // those of the layers behind. `x`, with the forecast's form of the row, stays as it is until end(). Does
  // nothing where they cannot be guessed, and while a thread that has lost its core is in the one before.
  void begin(int layer, const ActBuffer& x) noexcept;
  // From here on nobody looks at `x` or at the placement. A thread that has lost its core may still load
  // experts.
  void end() noexcept;
  // By the calling thread, which is thread 0 of the pool, until over() or until nothing is left: false when
  // there was nothing. The first call behind a region chooses and sends, and returns.
  bool help(const std::function<bool()>& over) noexcept;

  void add_format(ActFormats& formats) const { next_.add_format(formats); }

  // Bytes loaded since the last call. Between end() and begin().
  uint64_t take_bytes() noexcept { return std::exchange(n_bytes_, 0); }
  // Of the experts, how many were guessed for this layer by the last begin(), and not sent. Between end() and
  // begin().
  int n_foreseen(int layer, std::span<const int32_t> experts) const noexcept;

 private:
  static constexpr int kMaxGuesses = 32;
  // What a thread does, on lines of its own.
  struct alignas(128) Cursor {
    std::atomic<int> scoring{kScored};  // its panels of the routers
    std::atomic<uint64_t> n_bytes{0};   // loaded
    LoadRange left;                     // of the part that is loaded
    int next = 0;                       // part: two of routers, then three of each guess
  };
  static constexpr int kOpen = 0, kTaken = 1, kScored = 2;

  bool everyone_left() const noexcept;
  bool work(int thread, const std::function<bool()>& over) noexcept;
  void score(int thread) noexcept;
  // The likely experts of a layer that are cold, best first; how many.
  int likely_cold(const ExpertForecast& forecast, int layer, float* scores, int32_t* experts,
                  const std::byte** addresses) const noexcept;
  void choose() noexcept;
  void send() noexcept;
  void next_part(int thread, Cursor& cursor) const noexcept;
  PanelRange router_share(int thread) const noexcept;

  const ExpertCatalog& catalog_;
  const ExpertForecast& next_;
  ThreadPool& pool_;
  AddressFn cold_address_;
  Sending sending_;
  int n_threads_, max_guesses_;
  std::vector<float> scores_, far_scores_;

  bool active_ = false;
  bool chosen_ = false;              // and sent
  int layer_ = -1, far_layer_ = -1;  // guessed; sent to. -1: none
  const ActBuffer* x_ = nullptr;
  uint64_t n_bytes_ = 0;
  int foreseen_layer_ = -1;  // what guessed_ is of
  alignas(64) std::atomic<int> n_guesses_{0};
  Ffn guesses_[kMaxGuesses];
  int32_t guessed_[kMaxGuesses];
  std::vector<Cursor> cursors_;
};

}  // namespace thermo
