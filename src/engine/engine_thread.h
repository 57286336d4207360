// The thread that owns an engine: it accepts requests from any thread, gives each a slot (a session), and
// runs steps as long as a request has something to compute.
//
//     submit() -> queue -> slot whose session shares most of the prompt -> RequestLoop -> on_event
//                   ^                                                         |
//                   '------ parked: its time slice is over, others wait <-----'
//
// Requests without a slot wait. Keys take turns, then the sessions of a key; among equals the oldest request
// is first. At every mark, and when its request ends, the prefix cache stores what a session holds, so the
// next turn of a conversation computes only what is new, in any slot. The cache also stores what parked
// requests computed, and keeps it until they go on. If it has no room for that, a request keeps its slot.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "engine/token_service.h"

namespace thermo {

struct EngineThreadOptions {
  // Behaviour.
  int max_waiting = 64;            // requests without a slot; more are refused
  int64_t max_waiting_tokens = 0;  // of their prompts together; 0: any number
  int checkpoint_every = 4096;     // tokens of a long prompt between points to come back to
  std::chrono::milliseconds save_heat_every{60'000};
  uint64_t cache_bytes = uint64_t{256} << 20;  // main memory for the prefix cache; 0: none
  std::string disk_folder = {};                // where texts go that leave it, and all when the thread ends
  uint64_t disk_bytes = 0;                     // 0: nowhere
  int quantum = 0;  // tokens of an answer after which others that wait get its slot; 0: none do
  // Performance.
  // Of a step that reads a prompt while nobody writes, so that a cancelled prompt does not go on for long.
  // 0: as long as a whole chunk takes.
  double max_prompt_step_seconds = 0.5;
  int max_decode_stall_ms = 300;  // between two tokens of an answer while another one's prompt is read
  uint64_t copy_bytes = uint64_t{8} << 20;  // to the prefix cache between two steps: a millisecond or two
  bool warm_up = false;                     // before the first request; see Engine::warm_up()

  // For a program that asks one thing after the other, and remembers what its session does.
  static EngineThreadOptions for_one_user() {
    EngineThreadOptions options;
    options.checkpoint_every = 0;
    options.cache_bytes = 0;
    options.max_prompt_step_seconds = 0.0;
    return options;
  }
};

class EngineThread : public TokenService {
 public:
  // Takes every sequence of the engine, which must outlive it and which nobody else may call meanwhile.
  // Throws ThermoError after a device fault in the warm-up.
  EngineThread(Engine& engine, const EngineThreadOptions& options);
  // Ends every request (Cancelled), then the thread.
  ~EngineThread() override;

  Result<RequestHandle> submit(TokenRequest request) override;
  void cancel(RequestHandle request) override;
  void pause(RequestHandle request, bool paused) override;
  TokenServiceState state() const override;
  void look_up(std::vector<TokenId> prompt, std::function<void(int n_cached)> on_found) override;
  std::shared_ptr<const ExpertHeat> expert_heat() override;
  void order(HeatOrder order, const std::string& name) override;
  int n_ctx() const override;
  int n_slots() const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
