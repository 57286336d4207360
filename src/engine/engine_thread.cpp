#include <fmt/format.h>

#include "engine/engine_thread_impl.h"
#include "experts/telemetry.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kStallShare = 0.8;   // of what streams may wait, for the step itself
constexpr int kFirstPromptRows = 64;  // before a step was measured
// A client hears of tokens at most that often, but of the first and the last at once: telling each of a few
// thousand tokens a second wakes a thread each time, which takes a core from the step.
constexpr std::chrono::milliseconds kTellInterval{1};

}  // namespace

EngineThread::EngineThread(Engine& engine, const EngineThreadOptions& options)
    : impl_(std::make_unique<Impl>(engine, options)) {
  if (options.warm_up)
    if (const double rate = engine.warm_up(*impl_->cache); rate > 0.0) impl_->prompt_row_rate.add(rate, 1.0);
  for (;;) {
    Result<Session> session = engine.open_session();
    if (!session) break;
    if (options.cache_bytes > 0) session->use_cache(impl_->cache.get(), false);
    impl_->slots.push_back({.session = std::move(*session)});
  }
  THERMO_CHECK(!impl_->slots.empty(), "an engine without a free sequence");
  impl_->show();
  impl_->thread = std::thread([this] { impl_->run(); });
}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->leaving = true;
  }
  impl_->wake.notify_one();
  impl_->thread.join();
}

int EngineThread::n_ctx() const {
  return impl_->engine.n_ctx();
}
int EngineThread::n_slots() const {
  return static_cast<int>(impl_->slots.size());
}

Status EngineThread::Impl::check(const TokenRequest& request) const {
  const int n_vocab = engine.config().n_vocab;
  const auto invalid = [](std::string message) {
    return Error{ErrorCode::InvalidArgument, std::move(message)};
  };
  if (request.prompt.empty()) return invalid("the prompt is empty");
  if (request.prompt.size() >= static_cast<size_t>(engine.n_ctx()))
    return Error{ErrorCode::ContextFull,
                 fmt::format("the prompt has {} tokens and the context holds {}", request.prompt.size(),
                             engine.n_ctx()),
                 Remedy::LargerContext};
  for (const TokenId token : request.prompt)
    if (token < 0 || token >= n_vocab)
      return invalid(fmt::format("token {} is outside the vocabulary of {}", token, n_vocab));
  return validate(request.options.sampling, n_vocab);
}

Result<RequestHandle> EngineThread::submit(TokenRequest request) {
  Impl& m = *impl_;
  if (const Status status = m.check(request); !status) return status.error();
  const std::lock_guard lock(m.mutex);
  if (m.leaving) return Error{ErrorCode::Cancelled, "the engine is shutting down"};
  if (!m.shown.fault.empty()) return Error{ErrorCode::DeviceFault, m.shown.fault};
  const int n_free = static_cast<int>(m.slots.size()) - m.shown.n_running;
  const auto n_tokens = static_cast<int64_t>(request.prompt.size());
  const bool too_many = m.queue.size() - n_free >= m.options.max_waiting;
  const bool too_long = m.options.max_waiting_tokens > 0 && !m.queue.empty() &&
                        m.queue.n_tokens() + n_tokens > m.options.max_waiting_tokens;
  if (!request.admitted && (too_many || too_long))
    return Error{ErrorCode::Busy, fmt::format("{} requests are already waiting", m.queue.size())};
  const RequestHandle handle{++m.last_epoch};
  m.queue.push({handle, std::move(request), Clock::now()});
  m.has_news = true;
  m.wake.notify_one();
  return handle;
}

void EngineThread::cancel(RequestHandle request) {
  std::optional<WaitingRequest> waiting;
  {
    const std::lock_guard lock(impl_->mutex);
    // One that has not begun ends here: a step may take half a second.
    waiting = impl_->queue.remove(request);
    const bool is_parked = waiting && !waiting->request.on_event;
    if (is_parked) waiting.reset();
    if (!waiting) impl_->to_cancel.push_back(request);
    impl_->has_news = true;
    impl_->wake.notify_one();
  }
  if (waiting) impl_->end_waiting(std::move(*waiting), FinishReason::Cancelled, std::nullopt);
}

void EngineThread::pause(RequestHandle request, bool paused) {
  const std::lock_guard lock(impl_->mutex);
  impl_->to_pause.emplace_back(request, paused);
  impl_->has_news = true;
  impl_->wake.notify_one();
}

void EngineThread::look_up(std::vector<TokenId> prompt, std::function<void(int n_cached)> on_found) {
  {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->leaving) {
      impl_->to_look_up.push_back({std::move(prompt), std::move(on_found)});
      impl_->has_news = true;
      impl_->wake.notify_one();
      return;
    }
  }
  on_found(0);
}

std::shared_ptr<const ExpertHeat> EngineThread::expert_heat() {
  const std::lock_guard lock(impl_->mutex);
  impl_->wake.notify_one();
  return impl_->watch.heat();
}

void EngineThread::order(HeatOrder order, const std::string& name) {
  const std::lock_guard lock(impl_->mutex);
  impl_->watch.order(order, name);
  impl_->wake.notify_one();
}

TokenServiceState EngineThread::state() const {
  const std::lock_guard lock(impl_->mutex);
  TokenServiceState state = impl_->shown;
  state.n_waiting = impl_->queue.size();
  state.waiting_tokens = impl_->queue.n_tokens();
  if (!impl_->queue.empty())
    state.oldest_wait_seconds = Impl::seconds(Clock::now() - impl_->queue.oldest().since);
  return state;
}

void EngineThread::Impl::run() {
  for (;;) {
    if (loop.idle()) {  // else while the next step runs
      show();
      tell_written(Clock::time_point::max());
    }
    {
      std::unique_lock lock(mutex);
      const auto has_work = [this] {
        return leaving || has_news || can_start() || !loop.idle() || cache->has_uncopied() || watch.wanted();
      };
      if (watch.due() == Clock::time_point::max())
        wake.wait(lock, has_work);
      else
        wake.wait_until(lock, watch.due(), has_work);
      has_news = false;
      closing = leaving;
      if (leaving) break;
      take_orders(lock);
      take_text(lock);
      count_waiting();
      share_slots(lock);
      fill_slots(lock);
    }
    const bool steps = !loop.idle();
    if (steps)
      step();
    else
      cache->copy(options.copy_bytes);
    watch.look(engine, steps);
  }
  const auto waiting = [this]() -> std::optional<WaitingRequest> {
    const std::lock_guard lock(mutex);
    if (queue.empty()) return std::nullopt;
    return queue.remove(queue.oldest().handle);
  };
  while (std::optional<WaitingRequest> next = waiting())
    if (!parked.contains(next->handle.epoch))
      end_waiting(std::move(*next), FinishReason::Cancelled, std::nullopt);
  for (const auto& [epoch, active] : parked) loop.cancel(active->id);
  for (Slot& slot : slots)
    if (slot.active) loop.cancel(slot.active->id);
  while (!loop.empty()) step();
  for (const Lookup& lookup : std::exchange(to_look_up, {})) lookup.on_found(0);  // nobody adds to them
  write_texts();
}

void EngineThread::Impl::take_orders(std::unique_lock<std::mutex>& lock) {
  const std::vector<RequestHandle> cancelled = std::exchange(to_cancel, {});
  const auto pauses = std::exchange(to_pause, {});
  const auto lookups = std::exchange(to_look_up, {});
  // First: one that goes on waits for a slot, and may be cancelled by now.
  for (const auto& [handle, paused] : pauses) pause(handle, paused);
  std::vector<WaitingRequest> gone;
  for (const RequestHandle handle : cancelled) {
    std::optional<WaitingRequest> waiting = queue.remove(handle);
    if (const auto found = parked.find(handle.epoch); found != parked.end())
      loop.cancel(found->second->id);
    else if (waiting)
      gone.push_back(std::move(*waiting));
  }
  lock.unlock();
  for (WaitingRequest& waiting : gone) end_waiting(std::move(waiting), FinishReason::Cancelled, std::nullopt);
  for (Slot& slot : slots)
    for (const RequestHandle handle : cancelled)
      if (slot.active && handle == slot.active->handle) loop.cancel(slot.active->id);
  for (const Lookup& lookup : lookups) lookup.on_found(n_cached(lookup.prompt));
  lock.lock();
}

// Under the lock. A parked request that is paused does not wait for a slot.
void EngineThread::Impl::pause(RequestHandle handle, bool paused) {
  const auto set = [&](Active& active) {
    active.paused = paused;
    loop.pause(active.id, paused);
  };
  for (Slot& slot : slots)
    if (slot.active && slot.active->handle == handle) set(*slot.active);
  const auto found = parked.find(handle.epoch);
  if (found == parked.end()) return;
  set(*found->second);
  queue.remove(handle);
  if (!paused) queue_parked(*found->second);
}

int EngineThread::Impl::max_prompt_rows() const {
  const bool writing = std::any_of(slots.begin(), slots.end(),
                                   [](const Slot& s) { return s.active && s.active->n_written > 0; });
  if (!writing && options.max_prompt_step_seconds <= 0.0) return INT_MAX;
  if (prompt_row_rate.time <= 0.0) return kFirstPromptRows;
  // The rate is that of the steps before, smaller ones among them: a larger one is not slower.
  const double budget =
      writing ? options.max_decode_stall_ms * kStallShare * 1e-3 : options.max_prompt_step_seconds;
  return static_cast<int>(std::clamp(budget * prompt_row_rate.value(), 16.0, 65536.0));
}

void EngineThread::Impl::step() {
  n_step_prompt = n_step_written = 0;
  const auto n_busy =
      std::count_if(slots.begin(), slots.end(), [](const Slot& slot) { return slot.active != nullptr; });
  const bool writing = std::any_of(slots.begin(), slots.end(), [](const Slot& slot) {
    return slot.active && !slot.active->paused && slot.active->n_written > 0;
  });
  const ExpertTelemetry experts_before = engine.expert_telemetry();
  const uint64_t n_rounds = engine.draft_telemetry().n_rounds;
  const Clock::time_point begin = Clock::now();
  bool has_run = false;
  const auto meanwhile = [&] {
    has_run = true;
    show();
    tell_written(begin - kTellInterval);
    cache->copy(options.copy_bytes);
  };
  const std::span<const RequestEvent> events = loop.step(max_prompt_rows(), meanwhile);
  const double time = seconds(Clock::now() - begin);
  if (!has_run) meanwhile();  // there was nothing to compute
  for (const RequestEvent& event : events) take_event(event);
  for (Slot& slot : slots)  // a first token is waited for
    if (slot.active && slot.active->n_written == static_cast<int>(slot.active->written.size()))
      tell_written(*slot.active);
  if (n_step_prompt > 0) prompt_row_rate.add(n_step_prompt, time);
  if (n_step_prompt > 0) prompt_rate.add(n_step_prompt, time);
  if (n_step_written > 0) decode_rate.add(n_step_written, time);
  const ExpertTelemetry experts = engine.expert_telemetry() - experts_before;
  const bool verified = engine.draft_telemetry().n_rounds > n_rounds;
  const std::lock_guard lock(mutex);
  StepCounts& steps = shown.steps;
  ++(n_step_prompt > 0 ? (writing ? steps.mixed : steps.prefill) : verified ? steps.verify : steps.decode);
  if (n_step_prompt > 0) {
    prompt_uses += experts.pairs;
    prompt_hot_uses += experts.hot_pairs;
  }
  shown.n_busy_slots += static_cast<uint64_t>(n_busy);
  shown.n_prompt_computed += static_cast<uint64_t>(std::max(n_step_prompt, 0));
  shown.n_written += static_cast<uint64_t>(n_step_written);
}

// What was written since clients heard of it, to those that heard nothing since `heard_until`. Telling takes
// 20 to 40 us for each stream: the device computes meanwhile.
void EngineThread::Impl::tell_written(Clock::time_point heard_until) {
  const auto tell = [&](Active& active) {
    if (active.told <= heard_until) tell_written(active);
  };
  for (Slot& slot : slots)
    if (slot.active) tell(*slot.active);
  for (const auto& [epoch, active] : parked) tell(*active);
}

void EngineThread::Impl::tell_written(Active& a) {
  if (a.written.empty()) return;
  a.told = Clock::now();
  a.request.on_event(TokensWritten{std::exchange(a.written, {})});
}

void EngineThread::Impl::take_event(const RequestEvent& event) {
  Active* active = nullptr;
  for (Slot& slot : slots)
    if (slot.active && slot.active->id == event.request) active = slot.active.get();
  for (const auto& [epoch, other] : parked)
    if (other->id == event.request) active = other.get();
  THERMO_CHECK(active != nullptr, "an event of a request that nobody has");
  Active& a = *active;
  if (const auto* progress = std::get_if<PromptProgress>(&event.what)) {
    const int n_done = a.usage.n_cached + progress->done;
    n_step_prompt += n_done - std::exchange(a.n_done, n_done);
    a.request.on_event(PromptRead{a.n_done, a.usage.n_prompt, a.usage.n_cached});
  } else if (const auto* prompt = std::get_if<PromptTokens>(&event.what)) {
    a.request.on_event(*prompt);
  } else if (const auto* token = std::get_if<GeneratedToken>(&event.what)) {
    a.last_token = Clock::now();
    if (a.n_written++ == 0) a.first_token = a.last_token;
    ++a.n_slice;
    ++n_step_written;
    a.written.push_back(*token);
  } else if (const auto* result = std::get_if<GenerateResult>(&event.what)) {
    a.usage.seed = result->seed;
    a.usage.draft = result->draft;
    a.usage.n_completion = result->n_generated + (result->reason == FinishReason::Stop ? 1 : 0);
    end(a, result->reason, std::nullopt);
  } else if (const auto* error = std::get_if<Error>(&event.what)) {
    if (error->code == ErrorCode::DeviceFault) {
      const std::lock_guard lock(mutex);
      shown.fault = error->message;
    }
    end(a, {}, *error);
  }
}

void EngineThread::Impl::end(Active& a, FinishReason reason, std::optional<Error> error) {
  tell_written(a);
  TokenUsage& usage = a.usage;
  const Clock::time_point now = Clock::now();
  if (a.n_written == 0) a.first_token = now;
  if (a.n_written == 0 || reason == FinishReason::Stop) a.last_token = now;  // the end token
  usage.first_token_seconds = seconds(a.first_token - a.submitted);
  usage.prompt_seconds = seconds(a.first_token - a.started);
  usage.predicted_seconds = seconds(a.last_token - a.first_token);
  const auto slot =
      std::find_if(slots.begin(), slots.end(), [&](const Slot& s) { return s.active.get() == &a; });
  const bool has_slot = slot != slots.end(), keep = has_slot && !error && !closing;
  std::unique_ptr<Active> active;
  if (has_slot) {
    slot->shown = state_of(*slot);
    active = std::move(slot->active);
  } else {
    cache->unpin(a.pin);
    active = std::move(parked.at(a.handle.epoch));
    parked.erase(a.handle.epoch);
  }
  {
    const std::lock_guard lock(mutex);
    shown.n_running -= has_slot ? 1 : 0;
    if (has_slot) shown.slots[static_cast<size_t>(slot - slots.begin())] = state_of(*slot);
    shown.n_prompt_cached += static_cast<uint64_t>(usage.n_cached);
  }
  a.request.on_event(TokensEnded{reason, std::move(error), usage});
  // After its client was told, and also where it was cancelled: the next turn, or another try, goes on here.
  if (keep) slot->session.checkpoint();
}

void EngineThread::Impl::end_waiting(WaitingRequest waiting, FinishReason reason,
                                     std::optional<Error> error) {
  TokenUsage usage;
  usage.n_prompt = static_cast<int>(waiting.request.prompt.size());
  usage.queue_seconds = seconds(Clock::now() - waiting.since);
  waiting.request.on_event(TokensEnded{reason, std::move(error), usage});
}

SlotState EngineThread::Impl::state_of(const Slot& slot) {
  SlotState state = slot.shown;
  state.busy = slot.active != nullptr;
  state.n_held = slot.session.n_past();
  if (!slot.active) return state;
  const Active& a = *slot.active;
  state.epoch = a.handle.epoch;
  state.n_prompt = a.usage.n_prompt;
  state.n_cached = a.usage.n_cached;
  state.n_prompt_done = a.n_done;
  state.n_written = a.n_written;
  return state;
}

void EngineThread::Impl::show() {
  std::vector<SlotState> states;
  int n_paused = 0;
  const DraftTelemetry draft = engine.draft_telemetry();
  for (const Slot& slot : slots) {
    n_paused += slot.active && slot.active->paused ? 1 : 0;
    states.push_back(state_of(slot));
    if (!slot.active || draft.drafter.empty()) continue;
    const DraftTelemetry drafts = loop.draft(slot.active->id);
    states.back().n_draft_rounds = drafts.n_rounds;
    states.back().n_draft_accepted = drafts.n_accepted;
  }
  for (const auto& [epoch, active] : parked) n_paused += active->paused ? 1 : 0;
  const PrefixCacheState kept = cache->state();
  const ExpertTelemetry experts = engine.expert_telemetry();
  const KvPoolState pool = engine.kv_pool();
  const DiskCacheState on_disk = disk ? disk->state() : DiskCacheState{};
  const std::lock_guard lock(mutex);
  shown.experts = {.on_device = engine.info().device != "cpu",
                   .n_uses = experts.pairs,
                   .hot_uses = experts.hot_pairs,
                   .cpu_uses = experts.cpu_pairs,
                   .moved = experts.moved,
                   .moved_bytes = experts.moved_bytes,
                   .evicted = experts.evicted,
                   .stall_ns = experts.stall_ns,
                   .cpu_ns = experts.cpu_ns,
                   .disk_wait_ns = experts.disk_wait_ns,
                   .device_wait_ns = experts.device_wait_ns,
                   .copy_wait_ns = experts.copy_wait_ns,
                   .hot_bytes = experts.hot_expert_bytes,
                   .total_bytes = experts.total_expert_bytes,
                   .prompt_uses = prompt_uses,
                   .prompt_hot_uses = prompt_hot_uses};
  shown.cache = {.limit_bytes = kept.limit_bytes,
                 .bytes = kept.bytes,
                 .n_blocks = kept.n_blocks,
                 .n_points = kept.n_points,
                 .n_tokens = kept.n_tokens,
                 .n_evicted = kept.n_evicted,
                 .n_refused = kept.n_refused,
                 .n_uncopied = kept.n_uncopied,
                 .most_copied = kept.most_copied,
                 .spare_bytes = kept.spare_bytes,
                 .n_taken = kept.n_taken,
                 .disk_limit_bytes = on_disk.limit_bytes,
                 .disk_bytes = on_disk.bytes,
                 .n_disk_texts = on_disk.n_texts,
                 .n_disk_read = on_disk.n_read,
                 .n_disk_written = on_disk.n_written,
                 .n_disk_evicted = on_disk.n_evicted};
  shown.slots = std::move(states);
  shown.n_paused = n_paused;
  shown.n_parked = static_cast<int>(parked.size());
  shown.n_ctx = engine.n_ctx();
  shown.page_tokens = pool.page_tokens;
  shown.n_pages = pool.n_pages;
  shown.n_pages_free = pool.n_free;
  shown.prompt_rate = prompt_rate.value();
  shown.decode_rate = decode_rate.value();
  shown.draft = draft;
}

}  // namespace thermo
