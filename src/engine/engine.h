// The narrow boundary of the engine: token ids in, token ids and logits out. No text, no sockets, no files
// but the model's.
//
// One thread at a time may call an Engine and its Sessions.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "experts/budget.h"
#include "experts/expert_place.h"
#include "model/load_progress.h"
#include "model/rope_override.h"
#include "model/step.h"
#include "sampling/logprobs.h"
#include "sampling/sampling_params.h"
#include "speculative/oracle_options.h"
#include "speculative/telemetry.h"

namespace thermo {

class DiskCache;
class GgufFile;
class HeatMap;
class PrefixCache;
class TokenConstraint;
enum class Isa;
enum class KvType : uint8_t;
struct ExpertTelemetry;
struct KvPoolState;
struct MemoryPlan;
struct ModelConfig;

// Where a model runs.
struct DeviceChoice {
  enum class Kind : uint8_t {
    Auto,  // a GPU where there is one, else the processor
    Cpu,
    StandIn,  // the processor, and a stand-in for a GPU: for tests and experiments
    Gpu,
  };
  Kind kind = Kind::Auto;
  int gpu = 0;  // which one

  bool operator==(const DeviceChoice&) const = default;
};

// Who guesses the tokens to come, so that one step can verify several; see docs/speculative.md. It changes
// how fast a text is written and never the text, except with float weights on a GPU.
struct DraftOptions {
  enum class Kind : uint8_t {
    None,
    Auto,    // the file where one is given, else the model's next-token block, else lookup
    Lookup,  // in the context
    Mtp,     // the model's own next-token block
    File,    // a drafter that was made for the model
  };
  Kind kind = Kind::None;
  const GgufFile* file = nullptr;  // must outlive the engine
  int budget = 0;                  // tokens drafted in a round, 1 to 63; 0: planned round by round
  int max_depth = 0;               // of them, one after the other; 0: what the drafter can do
  int min_depth = 0;               // shorter guesses are not verified
  float min_probability = 0.0f;    // less likely ones are not drafted
  int max_candidates = 0;          // of a position; 1: chains, 0: as many as are of use
  std::optional<KvType> k_type;    // of the drafter's own cache; nullopt: f16
  std::optional<KvType> v_type;
  std::optional<OracleOptions> oracle;  // for measurements: how often the drafter is right
};

struct EngineOptions {
  // Behaviour.
  int n_ctx = 0;                 // tokens per sequence; 0: what fits of the training length
  bool fit = true;               // false: n_ctx = 0 is the training length, whether it fits or not
  int min_ctx = 8192;            // a context that is chosen to fit is not shorter
  int n_sequences = 1;           // sequences held at once
  int n_pages = 0;               // of keys and values for all of them, 256 tokens each; 0: what fits
  uint64_t cache_bytes = 0;      // main memory that is planned for a prefix cache
  int max_draft_rows = 0;        // rows of an uncommitted step (speculation), at most 64
  std::optional<KvType> k_type;  // nullopt: f16
  std::optional<KvType> v_type;
  RopeOverride rope;  // of the model; a drafter's own file has its own
  DeviceChoice device;
  std::vector<int> taps;  // hidden states that steps can give, see insert_taps(); empty: none
  DraftOptions draft;     // excludes taps

  // Performance.
  int n_threads = 0;  // 0: one for each physical core
  bool pin_threads = true;
  bool spread_threads = false;  // over the memory nodes in turn
  // How long threads without work spin before they sleep; nullopt: 50 ms, less where others need the cores.
  std::optional<uint32_t> spin_us;
  std::optional<Isa> isa;      // nullopt: the best this machine has
  bool check_tensors = false;  // look for numbers that no model can have
  bool repack = true;          // false: multiply from the file mapping, packing panels as they are used
  int n_batch = 0;             // rows of a prefill chunk; 0: 512, on a GPU 2048
  uint64_t gpu_memory = 0;     // bytes of the card that may be taken, everything counted; 0: what is free
  uint64_t gpu_reserve = uint64_t{1} << 30;  // of them, left to the driver and other programs
  // Hot and cold experts; see docs/experts.md.
  ExpertBudget expert_cache;  // device memory for experts; auto: what fits
  ExpertBudget expert_ram;    // main memory for experts, likewise; the rest stays in the file
  int pin_layers = 0;         // the first layers' experts are hot whatever their heat
  bool expert_swaps = true;   // move experts while running
  uint64_t link_limit = 0;    // bytes a second to the device, to measure slower links; 0: what it can
  std::string heat_file;      // read at load when it exists, written when the engine ends; empty: none
  std::string trace_file;     // Chrome trace of every step; empty: none
  LoadProgressFn progress;    // called on the loading thread, any number of times; may be empty
};

struct EngineInfo {
  std::string device;  // "cpu", "sim", or the GPU's name
  std::string bus_id;  // of the GPU, as PCI has it; empty: there is none
  Isa isa{};
  int n_threads = 1;
  bool repacked = true;
  uint64_t n_params = 0;
  uint64_t file_bytes = 0;       // tensor bytes in the file
  uint64_t bytes_per_token = 0;  // weights that a decode step of one row reads
  double load_seconds = 0.0;
  // What the system says was taken at load; nullopt: that is not known.
  std::optional<uint64_t> host_taken_bytes = {}, device_taken_bytes = {};
  KvType k_type{}, v_type{};
};

class Session;

class Engine {
 public:
  // `file` must outlive the engine. Throws LoadError, ConfigError, MemoryError.
  Engine(const GgufFile& file, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // What the constructor would take with these options; loads nothing. Throws as the constructor does.
  static MemoryPlan plan_for(const GgufFile& file, const EngineOptions& options);

  const ModelConfig& config() const;
  const EngineInfo& info() const;
  const MemoryPlan& plan() const;
  int n_ctx() const;
  int n_batch() const;
  // Steps of every kind for nobody, and memory for what the cache will be asked to keep of the first texts,
  // so that the first request need not wait for what is made, loaded or taken when it is first used. It takes
  // a few seconds at most. Afterwards nothing is left of the steps: heat, hot experts, telemetry and what the
  // cache keeps are as before. Returns how many rows of a prompt it read in a second; 0: that is not known.
  // Throws ThermoError after a device fault. REQUIRES: no session is open; the cache is new.
  double warm_up(PrefixCache& cache);
  // What the expert machinery did so far; all zero where every expert is where it is computed.
  ExpertTelemetry expert_telemetry() const;
  // Between steps: heat and hot experts as they were right after loading. False: only heat, as nothing is
  // split, or what was read from the file stays in memory.
  bool reset_experts();
  const HeatMap* heat() const;  // nullptr: nobody counts
  // Between steps: where every expert that heat() counts is, layer after layer.
  std::vector<ExpertPlace> expert_places() const;
  // Of each layer so far; empty: all experts are where they are computed.
  std::vector<LayerUses> layer_uses() const;
  // Writes the heat file, if there is one, as the destructor does; `name`: NAME.json beside it instead.
  void save_heat(const std::string& name = {});
  // Between steps: counts from what the file says now; experts follow step by step. What it cannot be read as
  // is logged.
  void load_heat(const std::string& name = {});
  // What drafting did so far; without a drafter its name is empty.
  DraftTelemetry draft_telemetry() const;
  // For measurements: whether sessions that are opened from here on draft. REQUIRES: none is open.
  void set_drafting(bool on);

  // The pages of keys and values that sequences share.
  KvPoolState kv_pool() const;

  // A cache for the engine's sessions, which must go before the engine. 0 bytes: it keeps nothing.
  std::unique_ptr<PrefixCache> make_prefix_cache(uint64_t limit_bytes);
  // Texts of that cache on disk, also those of earlier runs. Throws ConfigError.
  std::unique_ptr<DiskCache> make_disk_cache(const std::string& folder, uint64_t limit_bytes);

  // A free sequence, or an error when all n_sequences are taken.
  Result<Session> open_session();

  // The step itself, for speculation, batches and verification. Sequences are 0..n_sequences-1.
  // Refused: a sequence out of range, named twice or with uncommitted rows, more rows than n_batch, a full
  // context, a parent that is no earlier row; and for now (ErrorCode::Busy) more rows than there are pages
  // for.
  Result<StepOutput> step(const StepBatch& batch);
  // All logits of rows[i] of the last step's output, also those that stayed on a GPU; empty after a device
  // fault. Valid until the next step.
  std::span<const float> fetch_logits(int i);
  // Makes the accepted ones of a sequence's uncommitted rows part of it, parents first, and forgets the rest.
  Status commit(int sequence, std::span<const int32_t> path);

 private:
  friend class Session;
  struct Impl;
  void load(const GgufFile& file, const EngineOptions& options);

  std::unique_ptr<Impl> impl_;
};

// Why a generation ended.
enum class FinishReason {
  Stop,      // a stop token
  StopText,  // GenerateOptions::ends_after
  Length,
  ContextFull,
  Cancelled
};

struct GenerateOptions {
  SamplingParams sampling;
  int max_tokens = -1;               // -1: up to the end of the context
  std::vector<TokenId> stop_tokens;  // end-of-generation tokens, which ignore_eos and min_tokens hold back
  std::vector<TokenId> more_stop_tokens = {};  // end the answer, too, and nothing holds them back
  std::vector<TokenId> script;                 // for measurements: written first, whatever is chosen
  bool prompt_logprobs = false;  // as n_probs, of the prompt's tokens, which are all computed then
  // What the answer may say; nullptr: anything. Of this request alone: it is told every token.
  std::shared_ptr<TokenConstraint> constraint;

  // Told every token that is reported, on the thread that steps: whether it is the last one. Then it is no
  // part of the session, and neither is what was drafted after it. Empty: it never is.
  std::function<bool(TokenId)> ends_after = {};

  // Whether the token ends the answer. Then it is not reported.
  bool ends_at(TokenId token) const {
    const auto has = [token](const std::vector<TokenId>& list) {
      return std::find(list.begin(), list.end(), token) != list.end();
    };
    return has(stop_tokens) || has(more_stop_tokens);
  }
};

struct GeneratedToken {
  TokenId id;
  std::vector<TokenLogprob> logprobs;  // chosen first, then the most likely; empty unless asked for
};

struct GenerateResult {
  FinishReason reason{};
  int n_generated = 0;
  uint64_t seed = 0;          // the one used: given, or drawn
  DraftTelemetry draft = {};  // of this answer alone
};

// One timeline: its tokens and its memory. Returns its sequence to the engine when destroyed.
class Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  int sequence() const;
  int n_past() const;
  int n_pages() const;  // of keys and values; those that it shares count
  std::span<const TokenId> tokens() const;

  // Called between prefill chunks with (done, total); returning false stops there, with ErrorCode::Cancelled.
  using PrefillProgressFn = std::function<bool(int done, int total)>;

  // Appends tokens, in chunks of n_batch, and keeps the logits after the last one. Refused when they do not
  // fit.
  Status append(std::span<const TokenId> tokens, const PrefillProgressFn& progress = {});
  // Logits after the last appended token; empty before the first. Valid until the next call.
  std::span<const float> logits() const;
  // The most likely of them, -1 before the first. Brings no logits from a GPU.
  TokenId best() const;

  // Makes the session hold exactly `tokens`, reusing the longest common beginning that its memory can go
  // back to, and appends the rest. Returns how many tokens were reused.
  Result<int> set_tokens(std::span<const TokenId> tokens, const PrefillProgressFn& progress = {});

  // How many tokens of a prompt that begins so need not be computed again.
  int reusable(std::span<const TokenId> tokens) const;
  // Goes back to that many of them, forgetting the rest, and returns their number.
  int keep(std::span<const TokenId> tokens);
  // How many of them another session of the engine could have of this one without computing or copying them.
  int shareable(std::span<const TokenId> tokens) const;
  // Holds that many of them afterwards, in the pages of `other`, and nothing else.
  void share(const Session& other, std::span<const TokenId> tokens);

  // Samples until a stop token, the limit, the end of the context, or until on_token returns false.
  // REQUIRES: logits() not empty.
  Result<GenerateResult> generate(const GenerateOptions& options,
                                  const std::function<bool(const GeneratedToken&)>& on_token);

  // Makes the session hold exactly `tokens`, if its memory or the cache has all of them. False: it holds
  // less, and no logits.
  bool hold(std::span<const TokenId> tokens);

  // Remembers this point, so that set_tokens() can come back to it. False: there is no memory for it.
  bool checkpoint();
  // From here on points are kept in the cache, which serves other sessions, too, and must outlive this one.
  // `side`: what is kept pushes nothing else out.
  void use_cache(PrefixCache* cache, bool side);
  void clear();

 private:
  friend class Engine;
  friend class RequestLoop;
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

using RequestId = uint64_t;  // given once

struct PromptProgress {
  int done, total;  // tokens
};
// The next tokens of the prompt with their log probabilities, which its first one has not.
struct PromptTokens {
  std::vector<GeneratedToken> tokens;
};

// What happened to a request in a step. A result or an error is its last event.
struct RequestEvent {
  RequestId request;
  std::variant<PromptProgress, PromptTokens, GeneratedToken, GenerateResult, Error> what;
};

// Requests that are computed together: each step holds the next row of every request that is writing, with
// its draft, and prompt tokens of the others in the room that is left. A request may join or leave between
// steps; each writes what it would write alone.
class RequestLoop {
 public:
  explicit RequestLoop(Engine& engine);  // which must outlive it
  ~RequestLoop();
  RequestLoop(const RequestLoop&) = delete;
  RequestLoop& operator=(const RequestLoop&) = delete;

  // Appends the prompt to the session, then generates as Session::generate() does. The session must outlive
  // the request and be left alone until its last event. Refused: a prompt that does not fit, no prompt where
  // the session has no logits, a sampling value out of range, a session that another request has. `marks`:
  // lengths of the session, ascending, at which it makes a checkpoint while it reads the prompt.
  Result<RequestId> add(Session& session, std::span<const TokenId> prompt, const GenerateOptions& options,
                        std::span<const int> marks = {});
  // The request ends in the next step. A token that was reported is computed first, so that the session holds
  // it; the rest of a prompt is not. No effect on a request that has ended. `n_taken`: with a drafter a step
  // may report several tokens of a request; those after so many of the last step's are taken back.
  void cancel(RequestId request, int n_taken = INT_MAX);
  bool empty() const;

  // A paused request takes part in no step.
  void pause(RequestId request, bool paused);
  // Called when a request needs a page of keys and values and there is none: gives some back that no request
  // needs, and says whether it did. Without one, or where it cannot, requests wait for each other: the
  // newest gives its pages back and is computed again later. What waits for nobody ends with
  // ErrorCode::Busy.
  void on_shortage(std::function<bool()> give_back);
  // Between steps: takes the request's session away, which is then free and holds what the request computed.
  // The request takes part in no step until it has a session again. False: it ends in the next step.
  bool detach(RequestId request);
  // REQUIRES: the session holds what the one that was taken away held.
  void attach(RequestId request, Session& session);
  // Whether a step would do nothing: there is no request, or all are paused or detached.
  bool idle() const;
  // What drafting did for a request so far; nothing for one that has ended.
  DraftTelemetry draft(RequestId request) const;

  // Runs one step; its events are valid until the next one. `max_prompt_rows`: so many prompt tokens at most,
  // so that those that write need not wait long for the next step. `meanwhile`: see StepBatch; not called
  // where there is nothing to compute.
  std::span<const RequestEvent> step(int max_prompt_rows = INT_MAX,
                                     const std::function<void()>& meanwhile = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
