#include "engine/engine_thread.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/expert_watch.h"
#include "engine/request_queue.h"
#include "experts/telemetry.h"
#include "model/backend.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration span) {
  return std::chrono::duration<double>(span).count();
}

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

constexpr double kMaxPromptStepSeconds = 0.5;  // so that a cancelled prompt does not go on for long
constexpr int kFirstPromptRows = 64;           // before a step was measured

}  // namespace

struct EngineThread::Impl {
  struct Slot {
    Session session;
    // Of the request that has it.
    bool busy = false;
    RequestHandle handle = {};
    RequestId id = 0;
    TokenRequest request = {};
    TokenUsage usage = {};
    int n_done = 0, n_written = 0;  // tokens of the prompt; of the answer
    bool paused = false;
    Clock::time_point submitted = {}, started = {}, first_token = {};
    std::vector<GeneratedToken> written = {};  // by the step that runs
    // Of the one that had it last.
    uint64_t last_used = 0;
    bool side = false;
  };

  Engine& engine;
  const EngineThreadOptions options;
  RequestLoop loop;
  std::vector<Slot> slots;  // the thread's own, but for what `shown` copies
  uint64_t n_used = 0;
  ExpertWatch watch;
  Rate prompt_rate, decode_rate, prompt_row_rate;

  mutable std::mutex mutex;  // for all below
  std::condition_variable wake;
  RequestQueue queue;
  std::vector<RequestHandle> to_cancel;
  std::vector<std::pair<RequestHandle, bool>> to_pause;
  uint64_t last_epoch = 0;
  bool leaving = false;
  TokenServiceState shown;
  std::thread thread;

  Impl(Engine& e, const EngineThreadOptions& o) : engine(e), options(o), loop(e), watch(o.save_heat_every) {
    loop.on_shortage([this] { return give_back(); });
  }

  Status check(const TokenRequest& request) const;
  void run();
  void take_orders(std::unique_lock<std::mutex>& lock);
  void fill_slots(std::unique_lock<std::mutex>& lock);
  bool can_start() const;  // under the lock
  bool has_room(const TokenRequest& request) const;
  bool give_back();
  Slot* slot_for(const TokenRequest& request);
  void start(Slot& slot, WaitingRequest waiting);
  void share_beginning(Slot& slot);
  std::vector<int> marks_of(const TokenRequest& request) const;
  int max_prompt_rows() const;
  void step();
  void take_event(const RequestEvent& event);
  void end(Slot& slot, FinishReason reason, std::optional<Error> error);
  void end_waiting(WaitingRequest waiting, FinishReason reason, std::optional<Error> error);
  void show();
};

EngineThread::EngineThread(Engine& engine, const EngineThreadOptions& options)
    : impl_(std::make_unique<Impl>(engine, options)) {
  for (;;) {
    Result<Session> session = engine.open_session();
    if (!session) break;
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
  if (too_many || too_long)
    return Error{ErrorCode::Busy, fmt::format("{} requests are waiting already", m.queue.size())};
  const RequestHandle handle{++m.last_epoch};
  m.queue.push({handle, std::move(request), Clock::now()});
  m.wake.notify_one();
  return handle;
}

void EngineThread::cancel(RequestHandle request) {
  std::optional<WaitingRequest> waiting;
  {
    const std::lock_guard lock(impl_->mutex);
    // One that has not begun ends here: a step may take half a second.
    waiting = impl_->queue.remove(request);
    if (!waiting) impl_->to_cancel.push_back(request);
    impl_->wake.notify_one();
  }
  if (waiting) impl_->end_waiting(std::move(*waiting), FinishReason::Cancelled, std::nullopt);
}

void EngineThread::pause(RequestHandle request, bool paused) {
  const std::lock_guard lock(impl_->mutex);
  impl_->to_pause.emplace_back(request, paused);
  impl_->wake.notify_one();
}

std::shared_ptr<const ExpertHeat> EngineThread::expert_heat() {
  const std::lock_guard lock(impl_->mutex);
  impl_->wake.notify_one();
  return impl_->watch.heat();
}

void EngineThread::order(HeatOrder order) {
  const std::lock_guard lock(impl_->mutex);
  impl_->watch.order(order);
  impl_->wake.notify_one();
}

TokenServiceState EngineThread::state() const {
  const std::lock_guard lock(impl_->mutex);
  TokenServiceState state = impl_->shown;
  state.n_waiting = impl_->queue.size();
  state.waiting_tokens = impl_->queue.n_tokens();
  if (!impl_->queue.empty()) state.oldest_wait_seconds = seconds(Clock::now() - impl_->queue.oldest().since);
  return state;
}

void EngineThread::Impl::run() {
  for (;;) {
    {
      std::unique_lock lock(mutex);
      const auto has_work = [this] {
        return leaving || can_start() || !to_cancel.empty() || !to_pause.empty() || !loop.idle() ||
               watch.wanted();
      };
      if (watch.due() == Clock::time_point::max())
        wake.wait(lock, has_work);
      else
        wake.wait_until(lock, watch.due(), has_work);
      if (leaving) break;
      take_orders(lock);
      fill_slots(lock);
    }
    if (!loop.idle()) step();
    watch.look(engine);
    show();
  }
  const auto waiting = [this]() -> std::optional<WaitingRequest> {
    const std::lock_guard lock(mutex);
    if (queue.empty()) return std::nullopt;
    return queue.pop();
  };
  while (std::optional<WaitingRequest> next = waiting())
    end_waiting(std::move(*next), FinishReason::Cancelled, std::nullopt);
  for (Slot& slot : slots)
    if (slot.busy) loop.cancel(slot.id);
  while (!loop.empty()) step();
}

void EngineThread::Impl::take_orders(std::unique_lock<std::mutex>& lock) {
  const std::vector<RequestHandle> cancelled = std::exchange(to_cancel, {});
  const auto pauses = std::exchange(to_pause, {});
  std::vector<WaitingRequest> gone;
  for (const RequestHandle handle : cancelled)
    if (std::optional<WaitingRequest> waiting = queue.remove(handle)) gone.push_back(std::move(*waiting));
  lock.unlock();
  for (WaitingRequest& waiting : gone) end_waiting(std::move(waiting), FinishReason::Cancelled, std::nullopt);
  for (Slot& slot : slots) {
    if (!slot.busy) continue;
    for (const RequestHandle handle : cancelled)
      if (handle == slot.handle) loop.cancel(slot.id);
    for (const auto& [handle, paused] : pauses) {
      if (handle != slot.handle) continue;
      slot.paused = paused;
      loop.pause(slot.id, paused);
    }
  }
  lock.lock();
}

void EngineThread::Impl::fill_slots(std::unique_lock<std::mutex>& lock) {
  while (can_start()) {
    WaitingRequest next = queue.pop();
    ++shown.n_running;
    lock.unlock();
    Slot& slot = *slot_for(next.request);
    start(slot, std::move(next));
    lock.lock();
  }
}

// The next request has a slot and room for its prompt.
bool EngineThread::Impl::can_start() const {
  return !queue.empty() && std::any_of(slots.begin(), slots.end(), [](const Slot& s) { return !s.busy; }) &&
         has_room(queue.next().request);
}

// Pages of keys and values for its prompt, beside a page more for each request that runs and can grow. New
// work waits, so that running work need not.
bool EngineThread::Impl::has_room(const TokenRequest& request) const {
  const KvPoolState pool = engine.kv_pool();
  const int most = (engine.n_ctx() + pool.page_tokens - 1) / pool.page_tokens;
  int n_free = pool.n_free, n_growing = 0;
  bool any_busy = false;
  for (const Slot& slot : slots) {
    any_busy = any_busy || slot.busy;
    if (slot.busy)
      n_growing += slot.session.n_pages() < most ? 1 : 0;
    else
      n_free += slot.session.n_pages();
  }
  const int n_needed = static_cast<int>(request.prompt.size()) / pool.page_tokens + 1;
  return !any_busy || n_free >= std::min(n_needed, most) + n_growing;
}

// What an idle slot keeps for the next turn is worth less than a request that waits; the oldest goes first.
bool EngineThread::Impl::give_back() {
  Slot* oldest = nullptr;
  for (Slot& slot : slots)
    if (!slot.busy && slot.session.n_pages() > 0 && (oldest == nullptr || slot.last_used < oldest->last_used))
      oldest = &slot;
  if (oldest != nullptr) oldest->session.clear();
  return oldest != nullptr;
}

// What taking a slot costs: tokens to compute now, and tokens that would have to be computed again if their
// owner came back. He comes back less likely the longer ago he was here.
EngineThread::Impl::Slot* EngineThread::Impl::slot_for(const TokenRequest& request) {
  Slot* best = nullptr;
  double best_cost = 0.0;
  for (Slot& slot : slots) {
    if (slot.busy) continue;
    const int n_reused = slot.session.reusable(request.prompt);
    const int n_lost = slot.session.n_past() - n_reused;
    const bool same = !request.session_key.empty() && slot.request.session_key == request.session_key;
    const double age = static_cast<double>(n_used - slot.last_used);
    const double weight = (slot.side ? 0.25 : 1.0) * (request.side_request ? 4.0 : 1.0) * (same ? 0.5 : 1.0);
    const double cost =
        static_cast<double>(request.prompt.size()) - n_reused + weight * n_lost / (1.0 + age / 8.0);
    if (best == nullptr || cost < best_cost) best = &slot, best_cost = cost;
  }
  return best;
}

std::vector<int> EngineThread::Impl::marks_of(const TokenRequest& request) const {
  std::vector<int> marks = request.marks;
  const int n = static_cast<int>(request.prompt.size());
  for (int at = options.checkpoint_every; options.checkpoint_every > 0 && at < n;
       at += options.checkpoint_every)
    marks.push_back(at);
  std::erase_if(marks, [n](int at) { return at <= 0 || at > n; });
  std::sort(marks.begin(), marks.end());
  return marks;
}

// Another slot may have more of the prompt, also while it is busy: other answers to the same one, agents with
// the same instructions.
void EngineThread::Impl::share_beginning(Slot& slot) {
  const std::vector<TokenId>& prompt = slot.request.prompt;
  const Slot* best = nullptr;
  int most = slot.session.reusable(prompt);
  for (const Slot& other : slots)
    if (&other != &slot && other.session.shareable(prompt) > most)
      best = &other, most = other.session.shareable(prompt);
  if (best != nullptr) slot.session.share(best->session, prompt);
}

void EngineThread::Impl::start(Slot& slot, WaitingRequest waiting) {
  slot.handle = waiting.handle;
  slot.request = std::move(waiting.request);
  slot.submitted = waiting.since;
  slot.started = Clock::now();
  slot.usage = {};
  slot.usage.n_prompt = static_cast<int>(slot.request.prompt.size());
  slot.usage.queue_seconds = seconds(slot.started - slot.submitted);
  slot.n_written = 0;
  slot.paused = false;
  slot.last_used = ++n_used;
  slot.side = slot.request.side_request;
  share_beginning(slot);
  const int n_kept = slot.session.keep(slot.request.prompt);
  slot.usage.n_cached = slot.n_done = n_kept;
  const Result<RequestId> id = loop.add(
      slot.session, std::span<const TokenId>(slot.request.prompt).subspan(static_cast<size_t>(n_kept)),
      slot.request.options, marks_of(slot.request));
  if (!id) {
    slot.busy = true;
    return end(slot, {}, id.error());
  }
  slot.id = *id;
  slot.busy = true;
  slot.request.on_event(PromptRead{n_kept, slot.usage.n_prompt, n_kept});
}

int EngineThread::Impl::max_prompt_rows() const {
  const bool writing =
      std::any_of(slots.begin(), slots.end(), [](const Slot& s) { return s.busy && s.n_written > 0; });
  if (prompt_row_rate.time <= 0.0) return kFirstPromptRows;
  const double budget = writing ? options.max_decode_stall_ms * 0.5e-3 : kMaxPromptStepSeconds;
  return static_cast<int>(std::clamp(budget * prompt_row_rate.value(), 16.0, 65536.0));
}

void EngineThread::Impl::step() {
  int n_before = 0, n_after = 0, n_written = 0;
  for (const Slot& slot : slots) n_before += slot.n_done, n_written -= slot.n_written;
  const Clock::time_point begin = Clock::now();
  const std::span<const RequestEvent> events = loop.step(max_prompt_rows());
  const double time = seconds(Clock::now() - begin);
  for (const RequestEvent& event : events) take_event(event);
  for (Slot& slot : slots) {
    n_after += slot.n_done;
    n_written += slot.n_written;
    if (!slot.written.empty()) slot.request.on_event(TokensWritten{std::exchange(slot.written, {})});
  }
  const int n_prompt = n_after - n_before;
  if (n_prompt > 0) prompt_row_rate.add(n_prompt, time);
  if (n_prompt > 0) prompt_rate.add(n_prompt, time);
  if (n_written > 0) decode_rate.add(n_written, time);
  const std::lock_guard lock(mutex);
  ++shown.n_steps;
  shown.n_prompt_steps += n_prompt > 0 ? 1 : 0;
  shown.n_prompt_computed += static_cast<uint64_t>(std::max(n_prompt, 0));
  shown.n_written += static_cast<uint64_t>(std::max(n_written, 0));
}

void EngineThread::Impl::take_event(const RequestEvent& event) {
  const auto found = std::find_if(slots.begin(), slots.end(),
                                  [&](const Slot& s) { return s.busy && s.id == event.request; });
  THERMO_CHECK(found != slots.end(), "an event of a request that nobody has");
  Slot& slot = *found;
  if (const auto* progress = std::get_if<PromptProgress>(&event.what)) {
    slot.n_done = slot.usage.n_cached + progress->done;
    slot.request.on_event(PromptRead{slot.n_done, slot.usage.n_prompt, slot.usage.n_cached});
  } else if (const auto* token = std::get_if<GeneratedToken>(&event.what)) {
    if (slot.n_written++ == 0) slot.first_token = Clock::now();
    slot.written.push_back(*token);
  } else if (const auto* result = std::get_if<GenerateResult>(&event.what)) {
    slot.usage.seed = result->seed;
    slot.usage.draft = result->draft;
    slot.usage.n_completion = result->n_generated + (result->reason == FinishReason::Stop ? 1 : 0);
    end(slot, result->reason, std::nullopt);
  } else if (const auto* error = std::get_if<Error>(&event.what)) {
    if (error->code == ErrorCode::DeviceFault) {
      const std::lock_guard lock(mutex);
      shown.fault = error->message;
    }
    end(slot, {}, *error);
  }
}

void EngineThread::Impl::end(Slot& slot, FinishReason reason, std::optional<Error> error) {
  if (!slot.written.empty()) slot.request.on_event(TokensWritten{std::exchange(slot.written, {})});
  TokenUsage& usage = slot.usage;
  const Clock::time_point now = Clock::now();
  if (slot.n_written == 0) slot.first_token = now;
  usage.first_token_seconds = seconds(slot.first_token - slot.submitted);
  usage.prompt_seconds = seconds(slot.first_token - slot.started);
  usage.predicted_seconds = seconds(now - slot.first_token);
  slot.busy = false;
  {
    const std::lock_guard lock(mutex);
    --shown.n_running;
    shown.n_prompt_cached += static_cast<uint64_t>(usage.n_cached);
  }
  const auto tell = std::exchange(slot.request.on_event, {});
  tell(TokensEnded{reason, std::move(error), usage});
}

void EngineThread::Impl::end_waiting(WaitingRequest waiting, FinishReason reason,
                                     std::optional<Error> error) {
  TokenUsage usage;
  usage.n_prompt = static_cast<int>(waiting.request.prompt.size());
  usage.queue_seconds = seconds(Clock::now() - waiting.since);
  waiting.request.on_event(TokensEnded{reason, std::move(error), usage});
}

void EngineThread::Impl::show() {
  std::vector<SlotState> states;
  int n_paused = 0;
  for (const Slot& slot : slots) {
    n_paused += slot.busy && slot.paused ? 1 : 0;
    states.push_back({.busy = slot.busy,
                      .epoch = slot.handle.epoch,
                      .n_prompt = slot.usage.n_prompt,
                      .n_cached = slot.usage.n_cached,
                      .n_prompt_done = slot.n_done,
                      .n_written = slot.n_written,
                      .n_held = slot.session.n_past()});
  }
  const DraftTelemetry draft = engine.draft_telemetry();
  const ExpertTelemetry experts = engine.expert_telemetry();
  const KvPoolState pool = engine.kv_pool();
  const std::lock_guard lock(mutex);
  shown.experts = {.hot_uses = experts.hot_pairs,
                   .cpu_uses = experts.cpu_pairs,
                   .fetched_uses = experts.fetched_pairs,
                   .moved = experts.moved,
                   .moved_bytes = experts.moved_bytes,
                   .stall_ns = experts.stall_ns,
                   .hot_bytes = experts.hot_expert_bytes,
                   .total_bytes = experts.total_expert_bytes};
  shown.slots = std::move(states);
  shown.n_paused = n_paused;
  shown.n_ctx = engine.n_ctx();
  shown.page_tokens = pool.page_tokens;
  shown.n_pages = pool.n_pages;
  shown.n_pages_free = pool.n_free;
  shown.prompt_rate = prompt_rate.value();
  shown.decode_rate = decode_rate.value();
  shown.draft = draft;
}

}  // namespace thermo
