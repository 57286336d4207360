// The inside of EngineThread: orders and steps in engine_thread.cpp, slots in engine_slots.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "engine/disk_cache.h"
#include "engine/engine_thread.h"
#include "engine/expert_watch.h"
#include "engine/prefix_cache.h"
#include "engine/request_queue.h"

namespace thermo {

struct EngineThread::Impl {
  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::duration span) { return std::chrono::duration<double>(span).count(); }

  // Something per second, of late: both sums fade while time is measured.
  struct Rate {
    double amount = 0.0, time = 0.0;
    void add(double n, double s) {
      constexpr double kMemorySeconds = 10.0;
      const double keep = std::exp(-s / kMemorySeconds);
      amount = amount * keep + n;
      time = time * keep + s;
    }
    double value() const { return time > 0.0 ? amount / time : 0.0; }
  };
  // A request from when it gets a slot for the first time.
  struct Active {
    RequestHandle handle = {};
    RequestId id = 0;
    TokenRequest request = {};
    TokenUsage usage = {};
    int n_done = 0, n_written = 0;  // tokens of the prompt; of the answer
    int n_slice = 0;                // of the answer, in this slot
    bool paused = false;
    Clock::time_point submitted = {}, started = {}, first_token = {}, last_token = {};
    std::vector<GeneratedToken> written = {};  // not told yet
    Clock::time_point told = {};               // when its client last heard of tokens
    // While it is parked.
    std::vector<TokenId> held = {};
    PrefixCache::Pin pin = {};
  };
  struct Slot {
    Session session;
    std::unique_ptr<Active> active = {};  // the request that has it
    // Of the one that had it last.
    SlotState shown = {};
    uint64_t last_used = 0;
    bool side = false;
    std::string session_key = {};
  };

  Engine& engine;
  const EngineThreadOptions options;
  RequestLoop loop;
  std::unique_ptr<PrefixCache> cache;                  // slots use it
  std::vector<Slot> slots;                             // the thread's own, but for what `shown` copies
  std::map<uint64_t, std::unique_ptr<Active>> parked;  // by epoch
  uint64_t n_used = 0;
  ExpertWatch watch;
  int n_step_prompt = 0, n_step_written = 0;      // tokens, by the step that runs
  uint64_t prompt_uses = 0, prompt_hot_uses = 0;  // of experts, by steps with rows of prompts
  bool closing = false;
  Rate prompt_rate, decode_rate, prompt_row_rate;

  mutable std::mutex mutex;  // for all below
  std::condition_variable wake;
  RequestQueue queue;  // of parked ones only the keys
  std::vector<RequestHandle> to_cancel;
  std::vector<std::pair<RequestHandle, bool>> to_pause;
  struct Lookup {
    std::vector<TokenId> prompt;
    std::function<void(int n_cached)> on_found;
  };
  std::vector<Lookup> to_look_up;
  uint64_t last_epoch = 0;
  // The request whose text is read from disk, one at a time; 0: none. Others begin meanwhile.
  uint64_t reading = 0;
  bool text_arrived = false;
  std::shared_ptr<const SavedText> text_read;
  bool leaving = false, has_news = false;
  TokenServiceState shown;
  std::thread thread;
  std::unique_ptr<DiskCache> disk;  // nullptr: none; its thread calls this

  Impl(Engine& e, const EngineThreadOptions& o)
      : engine(e), options(o), loop(e), cache(e.make_prefix_cache(o.cache_bytes)), watch(o.save_heat_every) {
    loop.on_shortage([this] { return give_back(); });
    if (o.disk_bytes == 0 || o.cache_bytes == 0) return;
    disk = e.make_disk_cache(o.disk_folder, o.disk_bytes);
    cache->on_evict([this](std::span<const TokenId> text) { write_text(text); });
  }

  Status check(const TokenRequest& request) const;
  bool has_free_slot() const {
    return std::any_of(slots.begin(), slots.end(), [](const Slot& s) { return s.active == nullptr; });
  }
  void run();
  void take_orders(std::unique_lock<std::mutex>& lock);
  void pause(RequestHandle handle, bool paused);
  int n_cached(std::span<const TokenId> prompt) const;
  void share_slots(std::unique_lock<std::mutex>& lock);
  bool park(Slot& slot);
  void queue_parked(const Active& active);
  void count_waiting();
  bool seeks_text(WaitingRequest& next);
  void read_next_text();
  void take_text(std::unique_lock<std::mutex>& lock);
  void write_text(std::span<const TokenId> text);
  void write_texts();
  void fill_slots(std::unique_lock<std::mutex>& lock);
  bool can_start();  // under the lock
  bool has_room(const WaitingRequest& next) const;
  bool give_back();
  void make_room(const Slot& slot, size_t n_tokens);
  Slot& slot_for(std::span<const TokenId> tokens, const TokenRequest& request);
  void start(WaitingRequest waiting);
  bool resume(std::unique_ptr<Active> active);
  void take_slot(Slot& slot, std::unique_ptr<Active> active);
  void share_beginning(Slot& slot, std::span<const TokenId> prompt);
  std::vector<int> marks_of(const TokenRequest& request) const;
  int max_prompt_rows() const;
  void step();
  void tell_written(Clock::time_point heard_until);
  static void tell_written(Active& active);
  void take_event(const RequestEvent& event);
  void end(Active& active, FinishReason reason, std::optional<Error> error);
  void end_waiting(WaitingRequest waiting, FinishReason reason, std::optional<Error> error);
  static SlotState state_of(const Slot& slot);
  void show();
};

}  // namespace thermo
