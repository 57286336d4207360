#include "engine/scripted_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/request_queue.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

Clock::duration time_for(double n, double per_second) {
  if (per_second <= 0.0) return Clock::duration::zero();
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(n / per_second));
}

}  // namespace

struct ScriptedEngine::Impl {
  struct Playing {
    WaitingRequest waiting;
    std::span<const TokenId> script;
    Clock::time_point started, next;  // when the prompt is read or the next token is due
    bool prompt_read = false, paused = false, cancelled = false;
    size_t n_written = 0;
  };

  const ScriptedEngineOptions options;
  mutable std::mutex mutex;
  std::condition_variable wake;
  RequestQueue queue;
  std::vector<std::unique_ptr<Playing>> playing;
  std::vector<RequestHandle> to_cancel;
  uint64_t last_epoch = 0, n_written = 0;
  size_t n_started = 0;
  bool leaving = false, held = false;
  std::string fault;
  std::thread thread;

  explicit Impl(ScriptedEngineOptions o) : options(std::move(o)) {}

  struct Told {
    std::function<void(TokenEvent)> tell;
    TokenEvent event;
  };
  void run();
  void start_waiting(std::vector<Told>& told);
  bool play(Playing& p, std::vector<Told>& told);
  static TokensEnded ended(const Playing& p, FinishReason reason);
};

ScriptedEngine::ScriptedEngine(ScriptedEngineOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {
  THERMO_CHECK(!impl_->options.scripts.empty(), "a scripted engine needs a script");
  impl_->thread = std::thread([this] { impl_->run(); });
}

ScriptedEngine::~ScriptedEngine() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->leaving = true;
  }
  impl_->wake.notify_one();
  impl_->thread.join();
}

int ScriptedEngine::n_ctx() const {
  return impl_->options.n_ctx;
}
int ScriptedEngine::n_slots() const {
  return impl_->options.n_slots;
}

Result<RequestHandle> ScriptedEngine::submit(TokenRequest request) {
  Impl& m = *impl_;
  const std::lock_guard lock(m.mutex);
  if (!m.fault.empty()) return Error{ErrorCode::DeviceFault, m.fault};
  if (request.prompt.size() >= static_cast<size_t>(m.options.n_ctx))
    return Error{ErrorCode::ContextFull, "the prompt does not fit"};
  const int n_free = m.options.n_slots - static_cast<int>(m.playing.size());
  if (!request.admitted && m.queue.size() - n_free >= m.options.max_waiting)
    return Error{ErrorCode::Busy, fmt::format("{} requests are already waiting", m.queue.size())};
  const RequestHandle handle{++m.last_epoch};
  m.queue.push({handle, std::move(request), Clock::now()});
  m.wake.notify_one();
  return handle;
}

void ScriptedEngine::cancel(RequestHandle request) {
  const std::lock_guard lock(impl_->mutex);
  impl_->to_cancel.push_back(request);
  impl_->wake.notify_one();
}

void ScriptedEngine::pause(RequestHandle request, bool paused) {
  const std::lock_guard lock(impl_->mutex);
  for (const auto& p : impl_->playing)
    if (p->waiting.handle == request) p->paused = paused;
  impl_->wake.notify_one();
}

void ScriptedEngine::hold(bool held) {
  const std::lock_guard lock(impl_->mutex);
  impl_->held = held;
  impl_->wake.notify_one();
}

void ScriptedEngine::break_down(std::string why) {
  const std::lock_guard lock(impl_->mutex);
  impl_->fault = std::move(why);
  impl_->wake.notify_one();
}

TokenServiceState ScriptedEngine::state() const {
  const Impl& m = *impl_;
  const std::lock_guard lock(m.mutex);
  TokenServiceState state;
  state.n_running = static_cast<int>(m.playing.size());
  state.n_waiting = m.queue.size();
  state.waiting_tokens = m.queue.n_tokens();
  state.n_ctx = m.options.n_ctx;
  state.n_written = m.n_written;
  state.fault = m.fault;
  state.slots.resize(static_cast<size_t>(m.options.n_slots));
  for (size_t i = 0; i < m.playing.size(); ++i) {
    const Impl::Playing& p = *m.playing[i];
    state.n_paused += p.paused ? 1 : 0;
    state.slots[i] = {.busy = true,
                      .epoch = p.waiting.handle.epoch,
                      .n_prompt = static_cast<int>(p.waiting.request.prompt.size()),
                      .n_written = static_cast<int>(p.n_written)};
  }
  return state;
}

TokensEnded ScriptedEngine::Impl::ended(const Playing& p, FinishReason reason) {
  TokenUsage usage;
  usage.n_prompt = static_cast<int>(p.waiting.request.prompt.size());
  usage.n_completion = static_cast<int>(p.n_written) + (reason == FinishReason::Stop ? 1 : 0);
  usage.queue_seconds = std::chrono::duration<double>(p.started - p.waiting.since).count();
  usage.predicted_seconds = std::chrono::duration<double>(Clock::now() - p.started).count();
  usage.seed = p.waiting.request.options.sampling.seed.value_or(0);
  return {reason, std::nullopt, usage};
}

void ScriptedEngine::Impl::start_waiting(std::vector<Told>& told) {
  while (!queue.empty() && static_cast<int>(playing.size()) < options.n_slots) {
    auto p = std::make_unique<Playing>();
    p->waiting = queue.pop();
    p->script = options.scripts[n_started++ % options.scripts.size()];
    p->started = Clock::now();
    const size_t n_prompt = p->waiting.request.prompt.size();
    p->next = p->started + time_for(static_cast<double>(n_prompt), options.prompt_tokens_per_second);
    told.push_back({p->waiting.request.on_event, PromptRead{0, static_cast<int>(n_prompt), 0}});
    playing.push_back(std::move(p));
  }
}

// What is due now; false: it has ended.
bool ScriptedEngine::Impl::play(Playing& p, std::vector<Told>& told) {
  const TokenRequest& request = p.waiting.request;
  const auto end = [&](FinishReason reason) {
    told.push_back({request.on_event, ended(p, reason)});
    return false;
  };
  if (!fault.empty()) {
    TokensEnded failed = ended(p, {});
    failed.error = Error{ErrorCode::DeviceFault, fault};
    told.push_back({request.on_event, std::move(failed)});
    return false;
  }
  if (p.cancelled) return end(FinishReason::Cancelled);
  if (held || p.paused || Clock::now() < p.next) return true;
  if (!p.prompt_read) {
    const auto n = static_cast<int>(request.prompt.size());
    told.push_back({request.on_event, PromptRead{n, n, 0}});
    p.prompt_read = true;
  }
  if (request.options.max_tokens >= 0 && p.n_written >= static_cast<size_t>(request.options.max_tokens))
    return end(FinishReason::Length);
  if (p.n_written == p.script.size() || request.options.ends_at(p.script[p.n_written]))
    return end(FinishReason::Stop);
  GeneratedToken token{p.script[p.n_written++], {}};
  if (request.options.sampling.n_probs) token.logprobs.push_back({token.id, -0.5f});
  ++n_written;
  p.next += time_for(1.0, options.tokens_per_second);
  const bool is_last = request.options.ends_after && request.options.ends_after(token.id);
  told.push_back({request.on_event, TokensWritten{{std::move(token)}}});
  return is_last ? end(FinishReason::StopText) : true;
}

void ScriptedEngine::Impl::run() {
  std::unique_lock lock(mutex);
  std::vector<Told> told;
  for (;;) {
    for (const RequestHandle handle : std::exchange(to_cancel, {})) {
      if (std::optional<WaitingRequest> gone = queue.remove(handle)) {
        Playing p{.waiting = std::move(*gone), .script = {}, .started = Clock::now(), .next = {}};
        told.push_back({p.waiting.request.on_event, ended(p, FinishReason::Cancelled)});
      }
      for (const auto& p : playing) p->cancelled |= p->waiting.handle == handle;
    }
    start_waiting(told);
    for (const auto& p : playing) p->cancelled |= leaving;
    std::erase_if(playing, [&](const auto& p) { return !play(*p, told); });
    if (!told.empty()) {
      lock.unlock();
      for (Told& one : told) one.tell(std::move(one.event));
      told.clear();
      lock.lock();
      continue;
    }
    // The lock was held since the last look, so nothing that should wake this thread can have been missed.
    if (leaving && playing.empty() && queue.empty()) return;
    Clock::time_point next = Clock::now() + std::chrono::hours(1);
    for (const auto& p : playing)
      if (!held && !p->paused) next = std::min(next, p->next);
    wake.wait_until(lock, next);
  }
}

}  // namespace thermo
