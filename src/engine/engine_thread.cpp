#include "engine/engine_thread.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "engine/expert_watch.h"
#include "engine/prefix_cache.h"
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
  // A request from when it gets a slot for the first time.
  struct Active {
    RequestHandle handle = {};
    RequestId id = 0;
    TokenRequest request = {};
    TokenUsage usage = {};
    int n_done = 0, n_written = 0;  // tokens of the prompt; of the answer
    int n_slice = 0;                // of the answer, in this slot
    bool paused = false;
    Clock::time_point submitted = {}, started = {}, first_token = {};
    std::vector<GeneratedToken> written = {};  // by the step that runs
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
  int n_step_prompt = 0, n_step_written = 0;  // tokens, by the step that runs
  bool closing = false;
  Rate prompt_rate, decode_rate, prompt_row_rate;

  mutable std::mutex mutex;  // for all below
  std::condition_variable wake;
  RequestQueue queue;  // of parked ones only the keys
  std::vector<RequestHandle> to_cancel;
  std::vector<std::pair<RequestHandle, bool>> to_pause;
  uint64_t last_epoch = 0;
  bool leaving = false, has_news = false;
  TokenServiceState shown;
  std::thread thread;

  Impl(Engine& e, const EngineThreadOptions& o)
      : engine(e),
        options(o),
        loop(e),
        cache(e.make_prefix_cache(o.cache_bytes)),
        watch(o.save_heat_every) {
    loop.on_shortage([this] { return give_back(); });
  }

  Status check(const TokenRequest& request) const;
  bool has_free_slot() const {
    return std::any_of(slots.begin(), slots.end(), [](const Slot& s) { return s.active == nullptr; });
  }
  void run();
  void take_orders(std::unique_lock<std::mutex>& lock);
  void pause(RequestHandle handle, bool paused);
  void share_slots(std::unique_lock<std::mutex>& lock);
  bool park(Slot& slot);
  void queue_parked(const Active& active);
  void fill_slots(std::unique_lock<std::mutex>& lock);
  bool can_start() const;  // under the lock
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
  void take_event(const RequestEvent& event);
  void end(Active& active, FinishReason reason, std::optional<Error> error);
  void end_waiting(WaitingRequest waiting, FinishReason reason, std::optional<Error> error);
  static SlotState state_of(const Slot& slot);
  void show();
};

EngineThread::EngineThread(Engine& engine, const EngineThreadOptions& options)
    : impl_(std::make_unique<Impl>(engine, options)) {
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
  if (too_many || too_long)
    return Error{ErrorCode::Busy, fmt::format("{} requests are waiting already", m.queue.size())};
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
        return leaving || has_news || can_start() || !loop.idle() || watch.wanted();
      };
      if (watch.due() == Clock::time_point::max())
        wake.wait(lock, has_work);
      else
        wake.wait_until(lock, watch.due(), has_work);
      has_news = false;
      closing = leaving;
      if (leaving) break;
      take_orders(lock);
      share_slots(lock);
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
    if (!parked.contains(next->handle.epoch))
      end_waiting(std::move(*next), FinishReason::Cancelled, std::nullopt);
  for (const auto& [epoch, active] : parked) loop.cancel(active->id);
  for (Slot& slot : slots)
    if (slot.active) loop.cancel(slot.active->id);
  while (!loop.empty()) step();
}

void EngineThread::Impl::take_orders(std::unique_lock<std::mutex>& lock) {
  const std::vector<RequestHandle> cancelled = std::exchange(to_cancel, {});
  const auto pauses = std::exchange(to_pause, {});
  std::vector<WaitingRequest> gone;
  for (const RequestHandle handle : cancelled) {
    std::optional<WaitingRequest> waiting = queue.remove(handle);
    if (const auto found = parked.find(handle.epoch); found != parked.end())
      loop.cancel(found->second->id);
    else if (waiting)
      gone.push_back(std::move(*waiting));
  }
  for (const auto& [handle, paused] : pauses) pause(handle, paused);
  lock.unlock();
  for (WaitingRequest& waiting : gone) end_waiting(std::move(waiting), FinishReason::Cancelled, std::nullopt);
  for (Slot& slot : slots)
    for (const RequestHandle handle : cancelled)
      if (slot.active && handle == slot.active->handle) loop.cancel(slot.active->id);
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

void EngineThread::Impl::queue_parked(const Active& active) {
  TokenRequest keys;
  keys.fairness_key = active.request.fairness_key;
  keys.session_key = active.request.session_key;
  queue.push({active.handle, std::move(keys), Clock::now()});
}

// Requests that had their time slice, and paused ones, make room for those that wait.
void EngineThread::Impl::share_slots(std::unique_lock<std::mutex>& lock) {
  if (options.quantum <= 0 || options.cache_bytes == 0) return;
  auto n_wanted = queue.size() - std::count_if(slots.begin(), slots.end(),
                                               [](const Slot& s) { return s.active == nullptr; });
  for (; n_wanted > 0; --n_wanted) {
    Slot* longest = nullptr;
    for (Slot& slot : slots) {
      if (!slot.active || (slot.active->n_slice < options.quantum && !slot.active->paused)) continue;
      if (longest == nullptr || slot.active->n_slice > longest->active->n_slice) longest = &slot;
    }
    if (longest == nullptr) return;
    lock.unlock();
    const bool is_parked = park(*longest);
    lock.lock();
    if (!is_parked) {
      longest->active->n_slice = 0;  // it has its slot for another slice
      if (longest->active->paused) return;
      continue;
    }
    std::unique_ptr<Active> active = std::move(longest->active);
    if (!active->paused) queue_parked(*active);
    parked.emplace(active->handle.epoch, std::move(active));
    --shown.n_running;
    ++shown.n_parkings;
  }
}

// Puts what the request computed into the cache, where it stays.
bool EngineThread::Impl::park(Slot& slot) {
  if (!loop.detach(slot.active->id)) return false;
  slot.session.use_cache(cache.get(), false);
  if (!slot.session.checkpoint()) {
    loop.attach(slot.active->id, slot.session);
    return false;
  }
  const std::span<const TokenId> tokens = slot.session.tokens();
  slot.active->held.assign(tokens.begin(), tokens.end());
  slot.active->pin = cache->pin(tokens);
  return true;
}

void EngineThread::Impl::fill_slots(std::unique_lock<std::mutex>& lock) {
  while (can_start()) {
    WaitingRequest next = queue.pop();
    ++shown.n_running;
    const auto found = parked.find(next.handle.epoch);
    std::unique_ptr<Active> active = found == parked.end() ? nullptr : std::move(found->second);
    if (active) parked.erase(found);
    lock.unlock();
    const bool resumes = active != nullptr, has_slot = !resumes || resume(std::move(active));
    if (!resumes) start(std::move(next));
    lock.lock();
    if (has_slot) continue;
    --shown.n_running;
    queue.push(std::move(next));
    return;
  }
}

// The next request has a slot and room for its prompt.
bool EngineThread::Impl::can_start() const {
  return !queue.empty() && has_free_slot() && has_room(queue.next());
}

// Pages of keys and values for its prompt, beside a page more for each request that runs and can grow. New
// work waits, so that running work need not.
bool EngineThread::Impl::has_room(const WaitingRequest& next) const {
  const KvPoolState pool = engine.kv_pool();
  const int most = (engine.n_ctx() + pool.page_tokens - 1) / pool.page_tokens;
  int n_free = pool.n_free, n_growing = 0;
  bool any_busy = false;
  for (const Slot& slot : slots) {
    any_busy = any_busy || slot.active;
    if (slot.active)
      n_growing += slot.session.n_pages() < most ? 1 : 0;
    else
      n_free += slot.session.n_pages();
  }
  const auto found = parked.find(next.handle.epoch);
  const size_t n_tokens = found == parked.end() ? next.request.prompt.size() : found->second->held.size();
  const int n_needed = static_cast<int>(n_tokens) / pool.page_tokens + 1;
  return !any_busy || n_free >= std::min(n_needed, most) + n_growing;
}

// What an idle slot keeps for the next turn is worth less than a request that waits; the oldest goes first.
bool EngineThread::Impl::give_back() {
  Slot* oldest = nullptr;
  for (Slot& slot : slots)
    if (!slot.active && slot.session.n_pages() > 0 &&
        (oldest == nullptr || slot.last_used < oldest->last_used))
      oldest = &slot;
  if (oldest != nullptr) oldest->session.clear();
  return oldest != nullptr;
}

// For what a slot that was taken gets from the cache.
void EngineThread::Impl::make_room(const Slot& slot, size_t n_tokens) {
  const int page_tokens = engine.kv_pool().page_tokens;
  const int n_needed = static_cast<int>(n_tokens) / page_tokens + 1 - slot.session.n_pages();
  while (engine.kv_pool().n_free < n_needed && give_back()) {
  }
}

// What taking a slot costs: tokens to compute now, and tokens that would have to be computed again if their
// owner came back. He comes back less likely the longer ago he was here.
EngineThread::Impl::Slot& EngineThread::Impl::slot_for(std::span<const TokenId> tokens,
                                                       const TokenRequest& request) {
  constexpr double kCopyCost = 0.01;  // of bringing a token from the cache, in tokens to compute
  Slot* best = nullptr;
  double best_cost = 0.0;
  for (Slot& slot : slots) {
    if (slot.active) continue;
    const std::span<const TokenId> held = slot.session.tokens();
    const auto n_same =
        std::mismatch(tokens.begin(), tokens.end(), held.begin(), held.end()).first - tokens.begin();
    const int n_reused = slot.session.reusable(tokens);
    const int n_lost =
        slot.session.n_past() - std::max(n_reused, cache->match(held, slot.session.n_past()).n);
    const bool same = !request.session_key.empty() && slot.session_key == request.session_key;
    const double age = static_cast<double>(n_used - slot.last_used);
    const double weight = (slot.side ? 0.25 : 1.0) * (request.side_request ? 4.0 : 1.0) * (same ? 0.5 : 1.0);
    const double cost = static_cast<double>(tokens.size()) - n_reused +
                        kCopyCost * static_cast<double>(std::max<std::ptrdiff_t>(0, n_reused - n_same)) +
                        weight * std::max(n_lost, 0) / (1.0 + age / 8.0);
    if (best == nullptr || cost < best_cost) best = &slot, best_cost = cost;
  }
  return *best;
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
// the same instructions. Its pages need not be copied.
void EngineThread::Impl::share_beginning(Slot& slot, std::span<const TokenId> prompt) {
  const std::span<const TokenId> held = slot.session.tokens();
  const auto n_own = static_cast<int>(
      std::mismatch(prompt.begin(), prompt.end(), held.begin(), held.end()).first - prompt.begin());
  const Slot* best = nullptr;
  int most = std::max(slot.session.reusable(prompt), n_own + 1) - 1;
  for (const Slot& other : slots)
    if (&other != &slot && other.session.shareable(prompt) > most)
      best = &other, most = other.session.shareable(prompt);
  if (best != nullptr) slot.session.share(best->session, prompt);
}

void EngineThread::Impl::take_slot(Slot& slot, std::unique_ptr<Active> active) {
  slot.active = std::move(active);
  slot.active->n_slice = 0;
  slot.last_used = ++n_used;
  slot.side = slot.active->request.side_request;
  slot.session_key = slot.active->request.session_key;
  if (options.cache_bytes > 0) slot.session.use_cache(cache.get(), slot.side);
}

void EngineThread::Impl::start(WaitingRequest waiting) {
  auto active = std::make_unique<Active>();
  Active& a = *active;
  a.handle = waiting.handle;
  a.request = std::move(waiting.request);
  a.submitted = waiting.since;
  a.started = Clock::now();
  a.usage.n_prompt = static_cast<int>(a.request.prompt.size());
  a.usage.queue_seconds = seconds(a.started - a.submitted);
  const std::span<const TokenId> prompt = a.request.prompt;
  PrefixCache::Match known = cache->match(prompt, a.usage.n_prompt - 1);
  a.usage.n_known = known.n_known;
  a.usage.known_next = std::move(known.known_next);
  Slot& slot = slot_for(prompt, a.request);
  take_slot(slot, std::move(active));
  make_room(slot, prompt.size());
  share_beginning(slot, prompt);
  const int n_kept = slot.session.keep(prompt);
  a.usage.n_cached = a.n_done = n_kept;
  const Result<RequestId> id = loop.add(slot.session, prompt.subspan(static_cast<size_t>(n_kept)),
                                        a.request.options, marks_of(a.request));
  if (!id) return end(a, {}, id.error());
  a.id = *id;
  a.request.on_event(PromptRead{n_kept, a.usage.n_prompt, n_kept});
}

// A parked request goes on where it was. False: there are no pages for it yet; it stays parked.
bool EngineThread::Impl::resume(std::unique_ptr<Active> active) {
  Active& a = *active;
  Slot& slot = slot_for(a.held, a.request);
  take_slot(slot, std::move(active));
  make_room(slot, a.held.size());
  if (!slot.session.hold(a.held)) {
    parked.emplace(a.handle.epoch, std::move(slot.active));
    return false;
  }
  cache->unpin(a.pin);
  a.held.clear();
  loop.attach(a.id, slot.session);
  return true;
}

int EngineThread::Impl::max_prompt_rows() const {
  const bool writing = std::any_of(slots.begin(), slots.end(),
                                   [](const Slot& s) { return s.active && s.active->n_written > 0; });
  if (prompt_row_rate.time <= 0.0) return kFirstPromptRows;
  const double budget = writing ? options.max_decode_stall_ms * 0.5e-3 : kMaxPromptStepSeconds;
  return static_cast<int>(std::clamp(budget * prompt_row_rate.value(), 16.0, 65536.0));
}

void EngineThread::Impl::step() {
  n_step_prompt = n_step_written = 0;
  const Clock::time_point begin = Clock::now();
  const std::span<const RequestEvent> events = loop.step(max_prompt_rows());
  const double time = seconds(Clock::now() - begin);
  for (const RequestEvent& event : events) take_event(event);
  for (Slot& slot : slots)
    if (slot.active && !slot.active->written.empty())
      slot.active->request.on_event(TokensWritten{std::exchange(slot.active->written, {})});
  if (n_step_prompt > 0) prompt_row_rate.add(n_step_prompt, time);
  if (n_step_prompt > 0) prompt_rate.add(n_step_prompt, time);
  if (n_step_written > 0) decode_rate.add(n_step_written, time);
  const std::lock_guard lock(mutex);
  ++shown.n_steps;
  shown.n_prompt_steps += n_step_prompt > 0 ? 1 : 0;
  shown.n_prompt_computed += static_cast<uint64_t>(std::max(n_step_prompt, 0));
  shown.n_written += static_cast<uint64_t>(n_step_written);
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
  } else if (const auto* token = std::get_if<GeneratedToken>(&event.what)) {
    if (a.n_written++ == 0) a.first_token = Clock::now();
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
  if (!a.written.empty()) a.request.on_event(TokensWritten{std::exchange(a.written, {})});
  TokenUsage& usage = a.usage;
  const Clock::time_point now = Clock::now();
  if (a.n_written == 0) a.first_token = now;
  usage.first_token_seconds = seconds(a.first_token - a.submitted);
  usage.prompt_seconds = seconds(a.first_token - a.started);
  usage.predicted_seconds = seconds(now - a.first_token);
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
  for (const Slot& slot : slots) {
    n_paused += slot.active && slot.active->paused ? 1 : 0;
    states.push_back(state_of(slot));
  }
  for (const auto& [epoch, active] : parked) n_paused += active->paused ? 1 : 0;
  const PrefixCacheState& kept = cache->state();
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
  shown.cache = {.limit_bytes = kept.limit_bytes,
                 .bytes = kept.bytes,
                 .n_blocks = kept.n_blocks,
                 .n_points = kept.n_points,
                 .n_tokens = kept.n_tokens,
                 .n_evicted = kept.n_evicted,
                 .n_refused = kept.n_refused};
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
