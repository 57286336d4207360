// Steps before the first request. A GPU loads kernels when they are first launched, and the system gives
// memory when it is first touched: a first token would wait for that.
#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/log.h"
#include "engine/engine_impl.h"
#include "engine/prefix_cache.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

class WarmUp {
 public:
  WarmUp(Engine& engine, bool is_gpu, int max_draft_rows)
      : engine_(engine), is_gpu_(is_gpu), max_draft_rows_(max_draft_rows) {}

  Status run(PrefixCache& cache) {
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
      if (is_late()) break;
      // A pool of few pages refuses what is long.
      if (Status status = part(); !status && status.error().code == ErrorCode::DeviceFault) return status;
    }
    return {};
  }

 private:
  // Spread over the vocabulary, and so over the experts.
  std::vector<TokenId> tokens(int n) const {
    std::vector<TokenId> ids(static_cast<size_t>(std::min(n, engine_.n_ctx() - 8)));
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<TokenId>((i + 1) * 7919 % static_cast<size_t>(engine_.config().n_vocab));
    return ids;
  }
  bool is_late() const { return Clock::now() - begin_ > std::chrono::seconds(1); }

  // Chunks of all sizes: other kernels serve other numbers of rows.
  Status read_prompts(Session& session) const {
    const int most = is_gpu_ ? engine_.n_batch() : 4;
    for (int n = 1;; n = std::min(2 * n, most)) {
      session.clear();
      if (Status status = session.append(tokens(n)); !status) return status;
      if (n == most || is_late()) return {};
    }
  }

  // Rows of several sequences, and each way to choose from logits.
  Status write_answers(std::vector<Session>& sessions) const {
    RequestLoop loop(engine_);
    for (size_t i = 0; i < sessions.size(); ++i) {
      GenerateOptions options;
      options.max_tokens = 2;
      options.sampling.temperature = i % 3 == 0 ? 0.0f : 1.0f;
      if (i % 3 == 2) options.sampling.n_probs = 1;
      if (const auto request = loop.add(sessions[i], tokens(2), options); !request) return request.error();
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
};

}  // namespace

void Engine::warm_up(uint64_t cache_bytes) {
  Impl& e = *impl_;
  const auto start = Clock::now();
  std::optional<HeatMap> heat;
  if (e.backend->heat() != nullptr) heat = *e.backend->heat();
  set_drafting(false);  // a drafter learns from every step
  Status status;
  {
    const std::unique_ptr<PrefixCache> cache = make_prefix_cache(cache_bytes);
    status = WarmUp(*this, e.backend->is_gpu(), e.max_draft_rows).run(*cache);
  }
  set_drafting(true);
  if (!status) throw ThermoError(ExitCode::DeviceFault, status.error().message);
  reset_experts();
  if (heat) e.backend->set_heat(*heat);
  e.warm_up_telemetry = e.backend->expert_telemetry();
  log_info("engine", "warmed up in {:.2f} s", std::chrono::duration<double>(Clock::now() - start).count());
}

}  // namespace thermo
