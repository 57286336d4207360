// Which request has which slot of an EngineThread: requests begin, share slots by time, are parked and come
// back.
#include "engine/engine_thread_impl.h"
#include "model/model_config.h"

namespace thermo {

void EngineThread::Impl::queue_parked(const Active& active) {
  TokenRequest keys;
  keys.fairness_key = active.request.fairness_key;
  keys.session_key = active.request.session_key;
  queue.push({active.handle, std::move(keys), Clock::now()});
}

// Requests that had their time slice, and paused ones, make room for those that wait.
void EngineThread::Impl::share_slots(std::unique_lock<std::mutex>& lock) {
  if (options.quantum <= 0 || options.cache_bytes == 0) return;
  auto n_wanted = queue.n_ready() - std::count_if(slots.begin(), slots.end(),
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
  const std::span<const TokenId> tokens = slot.session.tokens();
  std::optional<PrefixCache::Pin> pin;
  if (slot.session.checkpoint()) pin = cache->pin(tokens);
  if (!pin) {
    loop.attach(slot.active->id, slot.session);
    return false;
  }
  slot.active->held.assign(tokens.begin(), tokens.end());
  slot.active->pin = *pin;
  return true;
}

void EngineThread::Impl::fill_slots(std::unique_lock<std::mutex>& lock) {
  while (can_start()) {
    if (seeks_text(*queue.next())) continue;
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

// Under the lock. How much of their prompts is new.
void EngineThread::Impl::count_waiting() {
  queue.for_each([this](WaitingRequest& waiting) {
    if (!std::exchange(waiting.is_counted, true)) waiting.n_to_compute -= n_cached(waiting.request.prompt);
  });
}

// Whether a disk has much more of a prompt than memory has: then it begins when that was read, and others
// begin before it.
bool EngineThread::Impl::seeks_text(WaitingRequest& next) {
  if (disk == nullptr || std::exchange(next.sought_text, true) || parked.contains(next.handle.epoch))
    return false;
  const std::vector<TokenId>& prompt = next.request.prompt;
  const int most = static_cast<int>(prompt.size()) - 1;
  next.waits_for_text = disk->match(prompt, most) >= n_cached(prompt) + PrefixCache::kBlockTokens / 2;
  if (next.waits_for_text) read_next_text();
  return next.waits_for_text;
}

// Under the lock.
void EngineThread::Impl::read_next_text() {
  if (reading != 0) return;
  const WaitingRequest* const first = queue.oldest_for_text();
  if (first == nullptr) return;
  reading = first->handle.epoch;
  const std::vector<TokenId>& prompt = first->request.prompt;
  disk->read(prompt, static_cast<int>(prompt.size()) - 1, [this](std::shared_ptr<const SavedText> text) {
    const std::lock_guard guard(mutex);
    text_read = std::move(text);
    text_arrived = has_news = true;
    wake.notify_one();
  });
}

void EngineThread::Impl::take_text(std::unique_lock<std::mutex>& lock) {
  if (!std::exchange(text_arrived, false)) return;
  const std::shared_ptr<const SavedText> text = std::exchange(text_read, nullptr);
  lock.unlock();
  if (text != nullptr) cache->put(text);
  lock.lock();
  queue.for_each([epoch = std::exchange(reading, 0)](WaitingRequest& waiting) {
    if (waiting.handle.epoch == epoch) waiting.waits_for_text = false;
  });
  read_next_text();
}

void EngineThread::Impl::write_text(std::span<const TokenId> text) {
  if (static_cast<int>(text.size()) < PrefixCache::kBlockTokens / 2 || disk->has(text)) return;
  if (std::optional<SavedText> saved = cache->save(text)) disk->write(std::move(*saved));
}

// When the thread ends: one at a time, so that there is never more than one of them in memory twice.
void EngineThread::Impl::write_texts() {
  if (disk == nullptr) return;
  for (const std::vector<TokenId>& text : cache->texts()) {
    write_text(text);
    disk->flush();
  }
}

// The next request has a slot and room for its prompt.
bool EngineThread::Impl::can_start() {
  const WaitingRequest* const next = queue.next();
  return next != nullptr && has_free_slot() && has_room(*next);
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

// Pages that wait to be copied to the cache go first. What an idle slot keeps for the next turn is worth less
// than a request that waits; the oldest goes first.
bool EngineThread::Impl::give_back() {
  if (cache->has_uncopied()) {
    cache->copy(UINT64_MAX);
    return true;
  }
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
// owner came back. The longer the owner has been away, the less likely that is.
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

// As start() would find them, in the best slot.
int EngineThread::Impl::n_cached(std::span<const TokenId> prompt) const {
  if (prompt.empty()) return 0;
  int most = cache->match(prompt, static_cast<int>(prompt.size()) - 1).n;
  for (const Slot& slot : slots)
    most = std::max(most, slot.active ? slot.session.shareable(prompt) : slot.session.reusable(prompt));
  return most;
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
  const bool reads_all = a.request.options.prompt_logprobs;
  if (!reads_all) share_beginning(slot, prompt);
  const int n_kept = slot.session.keep(reads_all ? std::span<const TokenId>{} : prompt);
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

}  // namespace thermo
