// Requests for tokens from any thread: the interface between a server and the engine. Token ids only, no
// text.
//
// Two classes implement it: EngineThread (engine_thread.h), and ScriptedEngine (scripted_engine.h), which
// plays back tokens that a test gives it.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/engine.h"

namespace thermo {

// Names a request. An epoch is given once, so that a late cancel() never meets the next owner of a slot.
struct RequestHandle {
  uint64_t epoch = 0;
  bool operator==(const RequestHandle&) const = default;
};

struct TokenUsage {
  int n_prompt = 0;
  int n_cached = 0;                  // of the prompt, found in memory
  int n_completion = 0;              // chosen tokens, the end token included
  double queue_seconds = 0.0;        // until it got a slot
  double prompt_seconds = 0.0;       // from then to the first token
  double first_token_seconds = 0.0;  // from submit()
  double predicted_seconds = 0.0;    // from the first token to the last
  uint64_t seed = 0;
  DraftTelemetry draft = {};
  // Of the prompt, what agrees with a text in the cache, and how that text goes on: a few tokens. More than
  // n_cached: there is no checkpoint where they begin to differ.
  int n_known = 0;
  std::vector<TokenId> known_next = {};
};

// It has a slot, and so much of its prompt is computed.
struct PromptRead {
  int done = 0, total = 0;
  int n_cached = 0;  // of `done`, found in memory
};
// What one step wrote.
struct TokensWritten {
  std::vector<GeneratedToken> tokens;
};
// The last event of a request.
struct TokensEnded {
  FinishReason reason{};
  std::optional<Error> error;  // then `reason` means nothing
  TokenUsage usage;
};
using TokenEvent = std::variant<PromptRead, PromptTokens, TokensWritten, TokensEnded>;

struct TokenRequest {
  std::vector<TokenId> prompt;
  GenerateOptions options;
  std::string fairness_key;  // keys take turns when requests wait
  std::string session_key;   // and so do the sessions of a key
  std::vector<int> marks;    // positions in the prompt at which another prompt may begin to differ, ascending
  bool side_request = false;  // pushes no conversation out of memory that is worth more
  bool admitted = false;      // a part of something that was taken: a full queue does not refuse it
  // Called on the engine's thread, from submit() on until TokensEnded; for one that is cancelled before it
  // began, inside cancel(). Must not block, must not call the
  // service.
  std::function<void(TokenEvent)> on_event;
};

// One slot as others may see it.
struct SlotState {
  bool busy = false;
  uint64_t epoch = 0;  // of the request that has it, or had it last
  int n_prompt = 0, n_cached = 0, n_prompt_done = 0, n_written = 0;
  int n_held = 0;                                     // tokens whose state it has
  uint64_t n_draft_rounds = 0, n_draft_accepted = 0;  // of the request: see DraftTelemetry
};

// What routed experts did, where some are elsewhere than they are computed; see experts/telemetry.h.
struct ExpertCounts {
  bool on_device = false;             // hot ones are there; otherwise in main memory, the others in the file
  uint64_t n_uses = 0, hot_uses = 0;  // of (row, expert)
  uint64_t cpu_uses = 0;              // of all, computed by the processor
  uint64_t moved = 0, moved_bytes = 0, evicted = 0;
  uint64_t stall_ns = 0, cpu_ns = 0, disk_wait_ns = 0, device_wait_ns = 0, copy_wait_ns = 0;
  uint64_t hot_bytes = 0, total_bytes = 0;
  // Of all uses, those of steps that read prompts, and how many of them were hot.
  uint64_t prompt_uses = 0, prompt_hot_uses = 0;

  // Cold ones that the device read or that were copied to it.
  uint64_t fetched_uses() const {
    return on_device && n_uses > hot_uses + cpu_uses ? n_uses - hot_uses - cpu_uses : 0;
  }
  double hot_ratio() const {
    return n_uses == 0 ? 1.0 : static_cast<double>(hot_uses) / static_cast<double>(n_uses);
  }
};

// How hot each expert is, how often it was used and where it is, as of some moment.
struct ExpertHeat {
  std::vector<int> n_expert;  // of each layer; 0: dense
  uint64_t n_tokens = 0;      // that were counted
  // Of all experts, layer after layer.
  std::vector<float> heat;
  std::shared_ptr<const std::vector<uint64_t>> uses;  // since the start, or since heat was loaded or reset
  std::vector<ExpertPlace> places;
  std::vector<LayerUses> layers;           // since the start; empty: all experts are where they are computed
  ExpertTier hot_tier = ExpertTier::Host;  // where an expert is hot

  int64_t n_in(ExpertTier tier) const {
    return std::count_if(places.begin(), places.end(), [&](const ExpertPlace& p) { return p.tier == tier; });
  }
};
enum class HeatOrder { None, Save, Load, Reset };

// The prefix cache: what it has, and what it did; see engine/prefix_cache.h.
struct CacheCounts {
  uint64_t limit_bytes = 0, bytes = 0;
  uint64_t n_blocks = 0, n_points = 0, n_tokens = 0;
  uint64_t n_evicted = 0;    // blocks and points that were pushed out
  uint64_t n_refused = 0;    // texts that there was no room for
  uint64_t n_uncopied = 0;   // tokens that are still to be copied
  uint64_t most_copied = 0;  // bytes of keys and values that were copied between two steps, at most
  uint64_t spare_bytes = 0;  // of `bytes`, those that are taken and empty
  uint64_t n_taken = 0;      // times that a text waited for the system to give memory
  // On disk; see engine/disk_cache.h.
  uint64_t disk_limit_bytes = 0, disk_bytes = 0;
  uint64_t n_disk_texts = 0, n_disk_read = 0, n_disk_written = 0, n_disk_evicted = 0;
};

// Steps by what their rows were.
struct StepCounts {
  uint64_t prefill = 0;  // of prompts
  uint64_t decode = 0;   // of answers
  uint64_t mixed = 0;    // of both
  uint64_t verify = 0;   // of answers, drafts among them

  uint64_t n() const { return prefill + decode + mixed + verify; }
};

struct TokenServiceState {
  int n_running = 0, n_waiting = 0, n_paused = 0;
  int n_parked = 0;         // of those that wait: begun, their time slice is over
  uint64_t n_parkings = 0;  // ends of time slices so far
  double oldest_wait_seconds = 0.0;
  int64_t waiting_tokens = 0;  // prompts of those that wait
  std::vector<SlotState> slots;
  int n_ctx = 0;
  int page_tokens = 0, n_pages = 0, n_pages_free = 0;  // of keys and values; 0: there is no pool
  StepCounts steps;
  uint64_t n_busy_slots = 0;                                           // of all steps together
  uint64_t n_prompt_computed = 0, n_prompt_cached = 0, n_written = 0;  // tokens
  double prompt_rate = 0.0, decode_rate = 0.0;                         // tokens per second, of late
  std::string fault;  // why no request can be served any more; empty: they can
  DraftTelemetry draft;
  ExpertCounts experts;
  CacheCounts cache;
};

class TokenService {
 public:
  virtual ~TokenService() = default;

  // Refused, with no event: a prompt that is empty or does not fit, a sampling value out of range, a queue
  // that is full (ErrorCode::Busy), a device fault.
  virtual Result<RequestHandle> submit(TokenRequest request) = 0;
  // Ends the request after the step that runs. It still gets its last event. No effect on one that has ended.
  virtual void cancel(RequestHandle request) = 0;
  // A paused request keeps its slot and writes nothing. For readers that do not keep up.
  virtual void pause(RequestHandle request, bool paused) = 0;
  virtual TokenServiceState state() const = 0;
  // How many tokens of a prompt need not be computed, as of now; changes nothing. Any thread; `on_found` is
  // called later on the engine's thread, or here, and must not block.
  virtual void look_up(std::vector<TokenId> prompt, std::function<void(int n_cached)> on_found) = 0;
  // The latest copy, at most a moment old if this is called again and again; nullptr: there is none yet.
  virtual std::shared_ptr<const ExpertHeat> expert_heat() { return nullptr; }
  // Writes the heat file or reads it (`name`: NAME.json beside it), or forgets heat and hot experts, after
  // the step that runs.
  virtual void order(HeatOrder, const std::string& /*name*/) {}
  virtual int n_ctx() const = 0;
  virtual int n_slots() const = 0;
};

}  // namespace thermo
