// Steps before the first request. A GPU loads kernels when they are first launched, and the system gives
// memory when it is first touched: a first token would wait for that.
#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/engine_impl.h"
#include "engine/prefix_cache.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kStepSeconds = 1.0, kGpuStepSeconds = 3.0;  // of steps, at most; a GPU has more kinds
constexpr double kMemorySeconds = 3.0;                       // of taking memory, at most
constexpr int kTextTokens = 1024;                            // of a first text that memory is taken for
constexpr int kLeftTokens = 8;                               // of the context, beside each text
constexpr int kLeastTokens = 2;                              // of a text

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class WarmUp {
 public:
  WarmUp(Engine& engine, bool is_gpu, int max_draft_rows)
      : engine_(engine), is_gpu_(is_gpu), max_draft_rows_(max_draft_rows) {}

  double prompt_rate() const { return prompt_rate_; }

  Status run(PrefixCache& cache) {
    if (engine_.n_ctx() < kLeftTokens + kLeastTokens) return {};
    std::vector<Session> sessions;
    while (sessions.size() < (is_gpu_ ? size_t{256} : size_t{2})) {
      Result<Session> session = engine_.open_session();
      if (!session) break;
      sessions.push_back(std::move(*session));
    }
    for (const auto& part : std::initializer_list<std::function<Status()>>{
             [&] { return read_prompts(sessions.front()); }, [&] { return write_answers(sessions); },
             [&] { return verify_draft(sessions.front()); },
             [&] { return keep_and_load(sessions.front(), cache); }}) {
      for (Session& session : sessions) session.clear();
      if (is_late()) {
        log_info("engine", "the warm-up ends early: steps take too long");
        break;
      }
      // A pool of few pages refuses what is long.
      if (Status status = part(); !status && status.error().code == ErrorCode::DeviceFault) return status;
    }
    return {};
  }

 private:
  // Spread over the vocabulary, and so over the experts.
  std::vector<TokenId> tokens(int n) const {
    std::vector<TokenId> ids(static_cast<size_t>(std::min(n, engine_.n_ctx() - kLeftTokens)));
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<TokenId>((i + 1) * 7919 % static_cast<size_t>(engine_.config().n_vocab));
    return ids;
  }
  bool is_late() const { return seconds_since(begin_) > (is_gpu_ ? kGpuStepSeconds : kStepSeconds); }

  // Chunks of all sizes: other kernels serve other numbers of rows. The last one once more, to see how long
  // it takes when everything is there.
  Status read_prompts(Session& session) {
    const int most = std::min(is_gpu_ ? engine_.n_batch() : 4, engine_.n_ctx() - kLeftTokens);
    for (int n = 1;; n = std::min(2 * n, most)) {
      for (int i = 0; i < (n == most ? 2 : 1); ++i) {
        session.clear();
        const Clock::time_point begin = Clock::now();
        if (Status status = session.append(tokens(n)); !status) return status;
        if (i == 1) prompt_rate_ = n / seconds_since(begin);
        if (is_late()) return {};
      }
      if (n == most) return {};
    }
  }

  // Rows of several sequences, beside a prompt that takes more than one step, and each way to choose from
  // logits.
  Status write_answers(std::vector<Session>& sessions) const {
    RequestLoop loop(engine_);
    for (size_t i = 0; i < sessions.size(); ++i) {
      const int n_prompt = is_gpu_ && i == 0 ? engine_.n_batch() + engine_.n_batch() / 4 : 2;
      GenerateOptions options;
      options.max_tokens = 2;
      options.sampling.temperature = i % 3 == 0 ? 0.0f : 1.0f;
      if (i % 3 == 2) options.sampling.n_probs = 1;
      if (const auto request = loop.add(sessions[i], tokens(n_prompt), options); !request)
        return request.error();
    }
    while (!loop.empty())
      for (const RequestEvent& event : loop.step())
        if (const auto* error = std::get_if<Error>(&event.what)) return *error;
    return {};
  }

  Status verify_draft(Session& session) const {
    if (max_draft_rows_ < 2) return {};
    const std::vector<TokenId> ids = tokens(2);
    const Row rows[] = {{.token = ids[0], .parent = -1, .want_logits = true},
                        {.token = ids[1], .parent = 0, .want_logits = true}};
    const SequenceRows group{
        .sequence = session.sequence(), .rows = rows, .uncommitted = true, .need = LogitsNeed::Top};
    if (const auto output = engine_.step({.groups = {&group, 1}}); !output) return output.error();
    const int32_t path[] = {0, 1};
    return engine_.commit(session.sequence(), path);
  }

  // A checkpoint, and more than a block of keys and values.
  Status keep_and_load(Session& session, PrefixCache& cache) const {
    const std::vector<TokenId> ids = tokens(is_gpu_ ? PrefixCache::kBlockTokens + 8 : 2);
    session.use_cache(&cache, false);
    Status status = session.append(ids);
    if (status && session.checkpoint()) {
      cache.copy(UINT64_MAX);
      session.clear();
      if (session.hold(ids)) status = session.append(tokens(1));
    }
    session.use_cache(nullptr, false);
    return status;
  }

  Engine& engine_;
  const bool is_gpu_;
  const int max_draft_rows_;
  const Clock::time_point begin_ = Clock::now();
  double prompt_rate_ = 0.0;  // rows a second
};

}  // namespace

double Engine::warm_up(PrefixCache& cache) {
  Impl& e = *impl_;
  const Clock::time_point start = Clock::now();
  std::optional<HeatMap> heat;
  if (e.backend->heat() != nullptr) heat = *e.backend->heat();
  set_drafting(false);  // a drafter learns from every step
  WarmUp steps(*this, e.backend->is_gpu(), e.max_draft_rows);
  const Status status = steps.run(cache);
  set_drafting(true);
  if (!status) throw ThermoError(ExitCode::DeviceFault, status.error().message);
  reset_experts();
  if (heat) e.backend->set_heat(*heat);
  e.take_warm_up_counts();
  const double step_seconds = seconds_since(start);
  cache.clear();
  const Clock::time_point taking = Clock::now();
  cache.prepare(e.n_sequences, std::min(kTextTokens, n_ctx()),
                [&] { return seconds_since(taking) > kMemorySeconds; });
  log_info("engine", "warmed up: {:.2f} s of steps, {} of memory for texts in {:.2f} s", step_seconds,
           format_bytes(cache.state().spare_bytes), seconds_since(taking));
  return steps.prompt_rate();
}

}  // namespace thermo
