// Requests that are computed together. A request is in one of two states: it has tokens that are not computed
// yet (its prompt, or the token it wrote last), or it has logits and chooses.
//
// With a drafter, the row of the token written last comes with a tree of guesses. The sampler walks down the
// tree: the token that it chooses at a row is written, and if a child of the row has that token, the walk
// continues there. The rows of the walk are committed with the next step, so that a caller who saw the tokens
// can end the answer at any of them.
//
// Rows need pages of keys and values, from a pool that may be smaller than all contexts together. A request
// without a page waits. If none can run, the newest one that has pages gives them back (give_way()). When
// there is room again, it gets its text from the cache or reads it again, so only time is lost.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/damaged_output.h"
#include "engine/prompt_turns.h"
#include "engine/request_loop_impl.h"

namespace thermo {
constexpr size_t kMaxLogitRows = 64;  // of a prompt, where each row has logits: a row is a megabyte

RequestLoop::RequestLoop(Engine& engine) : impl_(std::make_unique<Impl>(engine)) {}
RequestLoop::~RequestLoop() {
  for (const auto& request : impl_->requests) {
    impl_->settle(*request);
    Impl::leave(*request);
  }
}

bool RequestLoop::empty() const {
  return impl_->requests.empty();
}

Result<RequestId> RequestLoop::add(Session& session, std::span<const TokenId> prompt,
                                   const GenerateOptions& options, std::span<const int> marks) {
  const auto invalid = [](std::string message) {
    return Error{ErrorCode::InvalidArgument, std::move(message)};
  };
  Session::Impl& s = *session.impl_;
  const int n_vocab = impl_->engine.config().n_vocab;
  if (s.in_request) return invalid("the session already has a request");
  if (prompt.empty() && !s.has_logits()) return invalid("nothing to continue: the prompt is empty");
  if (Status status = validate(options.sampling, n_vocab); !status) return status.error();
  if (Status status = s.check_room(prompt.size()); !status) return status.error();
  for (const TokenId token : prompt)
    if (token < 0 || token >= n_vocab)
      return invalid(fmt::format("token {} is outside the vocabulary of {}", token, n_vocab));
  Sampler sampler(options.sampling, n_vocab, options.stop_tokens);
  sampler.accept_prompt(s.tokens);
  sampler.accept_prompt(prompt);
  s.in_request = true;
  const GenerateResult result{.reason = {}, .n_generated = 0, .seed = sampler.seed(), .draft = {}};
  impl_->requests.push_back(
      std::make_unique<Impl::Request>(Impl::Request{.id = ++impl_->last_id,
                                                    .session = &s,
                                                    .sampler = {std::move(sampler), options.constraint},
                                                    .options = options,
                                                    .result = result,
                                                    .tokens = {prompt.begin(), prompt.end()},
                                                    .marks = {marks.begin(), marks.end()}}));
  impl_->requests.back()->begin_draft();
  return impl_->last_id;
}

void RequestLoop::cancel(RequestId id, int n_taken) {
  for (const auto& request : impl_->requests)
    if (request->id == id) {
      request->cancelled = true;
      request->n_taken = std::min(request->n_taken, n_taken);
    }
}

void RequestLoop::pause(RequestId id, bool paused) {
  for (const auto& request : impl_->requests)
    if (request->id == id) request->paused = paused;
}

void RequestLoop::on_shortage(std::function<bool()> give_back) {
  impl_->give_back = std::move(give_back);
}

bool RequestLoop::detach(RequestId id) {
  for (const auto& request : impl_->requests) {
    if (request->id != id) continue;
    if (request->cancelled || request->reason) return false;
    impl_->settle(*request);
    if (request->ended) return false;
    request->session->in_request = false;
    request->draft_earlier = request->draft();
    request->session = nullptr;
    return true;
  }
  return false;
}

void RequestLoop::attach(RequestId id, Session& session) {
  for (const auto& request : impl_->requests) {
    if (request->id != id) continue;
    request->session = session.impl_.get();
    request->session->in_request = true;
    request->begin_draft();
  }
}

DraftTelemetry RequestLoop::draft(RequestId id) const {
  for (const auto& request : impl_->requests)
    if (request->id == id) return request->draft();
  return {};
}

bool RequestLoop::idle() const {
  return std::all_of(impl_->requests.begin(), impl_->requests.end(), [](const auto& request) {
    return (request->paused || request->session == nullptr) && !request->cancelled;
  });
}

std::span<const RequestEvent> RequestLoop::step(int max_prompt_rows, const std::function<void()>& meanwhile) {
  Impl& m = *impl_;
  m.events.clear();
  for (const auto& request : m.requests) {
    // Not in the step before: its first token need not wait for the copy.
    if (std::exchange(request->at_mark, false) && request->session) request->session->checkpoint();
    if (request->session == nullptr) {
      if (request->cancelled) m.end(*request, FinishReason::Cancelled);
      continue;
    }
    m.settle(*request);
    if (request->cancelled) request->paused = false;
    if (request->ended || request->paused) continue;
    // Without a prompt the first token comes from what the session has; its row waits for the next step, so
    // that a caller can cancel after every token.
    request->waits = request->n_left() == 0;
    if (request->waits)
      m.choose(*request);
    else if (request->cancelled && !request->is_writing())
      m.end(*request, FinishReason::Cancelled);
  }
  do {
    m.collect_rows(static_cast<size_t>(max_prompt_rows));
  } while (m.groups.empty() && m.give_way());
  if (!m.groups.empty()) m.run(meanwhile);
  std::erase_if(m.requests, [](const auto& request) { return request->ended; });
  return m.events;
}

std::optional<FinishReason> RequestLoop::Impl::why_ended(const Request& r) const {
  if (r.cancelled) return FinishReason::Cancelled;
  if (r.options.max_tokens >= 0 && r.result.n_generated >= r.options.max_tokens) return FinishReason::Length;
  return std::nullopt;
}

// The next token of a request that has logits, or its end.
void RequestLoop::Impl::choose(Request& r) {
  Session::Impl& s = *r.session;
  if (const auto reason = why_ended(r)) return end(r, *reason);
  if (!has_numbers(s.top, s.logits)) return fail(r, no_numbers_error(s.n_past()));
  std::optional<TokenId> token = s.choose(r.sampler);
  if (!token) return fail(r, device_fault(*s.backend));
  token = r.scripted(*token);
  if (r.options.sampling.n_probs && !s.fetch_logits()) return fail(r, device_fault(*s.backend));
  if (const auto reason = write(r, *token, s.logits)) return end(r, *reason);
  if (s.n_past() == engine.n_ctx()) return end(r, FinishReason::ContextFull);
  r.tokens.assign(1, *token);
  r.n_done = 0;
}

// Tells the token, whose logits are only looked at for log-probabilities. Why it ends the answer, if it does.
std::optional<FinishReason> RequestLoop::Impl::write(Request& r, TokenId token,
                                                     std::span<const float> logits) {
  if (r.options.ends_at(token)) return FinishReason::Stop;
  r.sampler.accept(token);
  ++r.result.n_generated;
  GeneratedToken generated{token, {}};
  if (r.options.sampling.n_probs)
    generated.logprobs = top_logprobs(logits, token, *r.options.sampling.n_probs);
  tell(r, std::move(generated));
  if (r.options.ends_after && r.options.ends_after(token)) return FinishReason::StopText;
  return std::nullopt;
}

void RequestLoop::Impl::add_group(Request& r, size_t n) {
  const size_t first = rows.size();
  r.n_now = n;
  Session::Impl::add_rows(std::span(r.tokens).subspan(r.n_done, n), n == r.n_left(), r.tells_prompt(), rows);
  groups.push_back(
      {.sequence = r.session->sequence, .rows = std::span<const Row>(rows).subspan(first), .need = r.need()});
}

// The root is the token that was written last; what the tree holds was guessed.
void RequestLoop::Impl::add_tree(Request& r) {
  const size_t first = rows.size();
  r.n_now = 1;
  rows.push_back({.token = r.tokens[r.n_done], .parent = -1, .want_logits = true});
  for (const DraftNode& node : r.session->speculation->tree(r.session->sequence))
    rows.push_back({.token = node.token, .parent = node.parent, .want_logits = true});
  groups.push_back({.sequence = r.session->sequence,
                    .rows = std::span<const Row>(rows).subspan(first),
                    .uncommitted = true,
                    .need = r.need()});
}

// What may be drafted for a request that writes, beside n - 1 others: they share the rows of one uncommitted
// step.
DraftAsk RequestLoop::Impl::draft_ask(const Request& r, int n) const {
  const int share = std::max(0, std::min(engine.n_batch(), StepTimes::kMaxRows) / n - 1);
  // The last one is computed as well: where it was guessed, that takes no step of its own.
  const int n_left = r.options.max_tokens < 0 ? share : r.options.max_tokens - r.result.n_generated;
  // A cancelled one only computes what it has written.
  const int most = r.cancelled ? 0 : std::min(share, engine.n_ctx() - r.session->n_past() - 1);
  return {.sequence = r.session->sequence,
          .root = r.tokens[r.n_done],
          .max_nodes = most,
          .max_depth = std::min(most, n_left),
          .ends = std::min(most, n_left) < std::min(share, r.session->speculation->drafter().max_depth()),
          .choice = {.temperature = r.options.sampling.temperature,
                     .seed = r.sampler.seed(),
                     .choice = r.options.sampling.choice,
                     .position = r.session->n_past() + 1}};
}

// Trees for those that write.
void RequestLoop::Impl::draft() {
  Speculation* speculation = nullptr;
  int n = 0;
  for (const auto& request : requests) {
    if (request->session == nullptr) continue;
    speculation = request->session->speculation;
    n += request->may_run() && request->is_writing() ? 1 : 0;
  }
  if (speculation == nullptr || n == 0) return;
  asks.clear();
  for (const auto& request : requests)
    if (request->may_run() && request->is_writing()) asks.push_back(draft_ask(*request, n));
  speculation->draft(asks);
}

// With others a first draft is made with theirs, in the next step.
void RequestLoop::Impl::draft_early(const Request& r) {
  const bool is_alone = std::none_of(requests.begin(), requests.end(), [&](const auto& other) {
    return other.get() != &r && other->may_run() && other->is_writing();
  });
  if (is_alone && r.session->speculation) r.session->speculation->draft_early(draft_ask(r, 1));
}

// Those that write come first, so that no stream waits for another's prompt; then prompts in their turns.
void RequestLoop::Impl::collect_rows(size_t max_prompt_rows) {
  groups.clear();
  rows.clear();
  for (const auto& request : requests) request->starved = false;
  draft();
  const auto room = [&] { return static_cast<size_t>(engine.n_batch()) - rows.size(); };
  const size_t n = requests.size();
  size_t next_turn = 0;
  for (size_t i = 0; i < n; ++i) {
    Request& request = *requests[(turn + i) % n];
    if (!request.may_run() || !request.is_writing()) continue;
    if (room() == 0) break;
    Speculation* const speculation = request.session->speculation;
    const size_t n_tree = speculation ? speculation->tree(request.session->sequence).size() : 0;
    if (n_tree > 0 && reserve(request, 1 + n_tree) == 1 + n_tree) {
      add_tree(request);
    } else {
      if (n_tree > 0) speculation->drop_tree(request.session->sequence);
      if (reserve(request, 1) == 0) continue;
      add_group(request, 1);
    }
    next_turn = (turn + i + 1) % n;
  }
  turn = next_turn;
  size_t n_prompt = std::min(room(), std::max<size_t>(max_prompt_rows, 1));
  std::vector<size_t> n_left;  // of prompts
  for (const auto& r : requests) n_left.push_back(r->may_run() && !r->is_writing() ? r->n_left() : 0);
  for (const PromptTurn& one : prompt_turns(n_left, n_prompt)) {
    Request& r = *requests[one.prompt];
    if (n_prompt == 0 || !may_resume(r)) continue;
    if (std::exchange(r.gave_way, false)) {
      r.session->hold(r.tokens, 0, r.tokens.size() - 1);
      r.n_done = static_cast<size_t>(r.session->n_past());
    }
    const size_t most = r.tells_prompt() ? std::min(one.most, kMaxLogitRows) : one.most;
    const size_t count = reserve(r, std::min({n_prompt, r.n_left(), n_to_mark(r), most}));
    if (count == 0) continue;
    add_group(r, count);
    n_prompt -= count;
  }
}

// Of n rows, those that there is room for.
size_t RequestLoop::Impl::reserve(Request& r, size_t n) {
  Backend& backend = *r.session->backend;
  const auto room = [&] { return backend.reserve(r.session->sequence, static_cast<int>(n)); };
  int got = room();
  while (got == 0 && give_back && give_back()) got = room();
  r.starved = got == 0;
  return static_cast<size_t>(got);
}

// One that gave way waits until all it reads fits, so that it does not give way again at once.
bool RequestLoop::Impl::may_resume(const Request& r) const {
  if (!r.rereads || r.n_done > 0) return true;
  const KvPoolState pool = r.session->backend->kv_pool();
  const auto n_pages = static_cast<int>(r.tokens.size()) / pool.page_tokens + 2;
  return pool.n_free >= std::min(n_pages, pool.n_pages) ||
         std::none_of(requests.begin(), requests.end(), [&](const auto& other) {
           return other.get() != &r && !other->ended && other->session && other->session->n_past() > 0;
         });
}

// No request can run, and some only lack a page. The newest one that has any gives its own back. False: there
// is nothing to wait for; those without a page have ended if nobody else has any.
bool RequestLoop::Impl::give_way() {
  Request* newest = nullptr;
  size_t n_holders = 0, n_starved = 0;
  for (const auto& request : requests) {
    if (request->ended || request->session == nullptr) continue;
    n_starved += request->starved ? 1 : 0;
    if (request->session->backend->n_pages(request->session->sequence) == 0) continue;
    ++n_holders;
    if (request->may_run()) newest = request.get();
  }
  if (n_starved == 0) return false;
  if (newest == nullptr || n_holders < 2) {
    if (n_holders > (newest == nullptr ? 0u : 1u)) return false;  // paused ones will go on
    for (const auto& request : requests)
      if (!request->ended && request->starved) fail(*request, no_pages(*request->session->backend));
    return false;
  }
  Request& r = *newest;
  std::vector<TokenId> all(r.session->tokens);
  all.insert(all.end(), r.tokens.begin() + static_cast<ptrdiff_t>(r.n_done), r.tokens.end());
  if (r.session->cache) r.session->checkpoint();
  r.gave_way = true;
  r.rereads = r.has_written();
  r.n_skip = std::max(r.n_skip, r.session->tokens.size() - std::min(r.session->tokens.size(), r.n_done));
  r.tokens = std::move(all);
  r.n_done = 0;
  r.starved = false;
  r.session->clear();
  return true;
}

// Prompt tokens before the next mark.
size_t RequestLoop::Impl::n_to_mark(Request& r) const {
  const int n_past = r.session->n_past();
  while (!r.marks.empty() && r.marks.front() <= n_past) r.marks.erase(r.marks.begin());
  return r.marks.empty() ? SIZE_MAX : static_cast<size_t>(r.marks.front() - n_past);
}

RequestLoop::Impl::Request& RequestLoop::Impl::of_sequence(int sequence) {
  return **std::find_if(requests.begin(), requests.end(),
                        [&](const auto& r) { return r->session && r->session->sequence == sequence; });
}

void RequestLoop::Impl::run(const std::function<void()>& meanwhile) {
  const Result<StepOutput> output = engine.step({.groups = groups, .meanwhile = &meanwhile});
  size_t n_logits = 0;
  Request* begun = nullptr;  // has read its prompt and written a token
  for (const SequenceRows& group : groups) {
    Request& r = of_sequence(group.sequence);
    if (!output) {
      fail(r, output.error());
      continue;
    }
    if (group.uncommitted) {
      walk(r, *output, n_logits, group.rows.size());
      n_logits += group.rows.size();
      continue;
    }
    if (r.session->speculation && r.is_writing()) {
      constexpr int32_t kRoot = 0;
      r.session->speculation->finish_round(group.sequence, {&kRoot, 1}, -1);
    }
    const bool wrote = r.has_written();
    const bool ends = r.n_now == r.n_left();
    if (r.tells_prompt()) {
      tell_prompt(r, *output, n_logits);
      n_logits += r.n_now - (ends ? 1 : 0);
    }
    r.session->took_step(std::span(r.tokens).subspan(r.n_done, r.n_now), *output,
                         ends ? std::optional(n_logits++) : std::nullopt);
    r.n_done += r.n_now;
    r.at_mark = !r.marks.empty() && r.marks.front() == r.session->n_past();
    if (!r.has_written())
      tell(r, PromptProgress{static_cast<int>(r.n_done - std::min(r.n_done, r.n_skip)),
                             static_cast<int>(r.tokens.size() - r.n_skip)});
    if (ends) r.rereads = false;
    if (ends) choose(r);
    if (ends && !wrote && !r.ended) begun = &r;
    if (ends && wrote && !r.ended && r.session->speculation)
      r.session->speculation->saw(group.sequence, r.tokens.front());
  }
  if (begun != nullptr) draft_early(*begun);
}

// What the rows of the step say of the tokens after them. One that gave way may read its prompt again.
void RequestLoop::Impl::tell_prompt(Request& r, const StepOutput& output, size_t first) {
  PromptTokens told;
  if (r.n_told == 0) told.tokens.push_back({r.tokens[r.n_told++], {}});
  for (size_t i = 0; i < r.n_now && r.n_told < r.tokens.size(); ++i) {
    if (r.n_done + i + 1 != r.n_told) continue;
    const TokenId token = r.tokens[r.n_told++];
    told.tokens.push_back(
        {token, top_logprobs(output.rows[first + i].logits, token, *r.options.sampling.n_probs)});
  }
  if (!told.tokens.empty()) tell(r, std::move(told));
}

// Goes down the tree as far as what is chosen was guessed. The last choice is the next root.
void RequestLoop::Impl::walk(Request& r, const StepOutput& output, size_t first, size_t n_rows) {
  Session::Impl& s = *r.session;
  const std::span<const DraftNode> tree = s.speculation->tree(s.sequence);
  const int n_past = s.n_past();
  r.first_logits = first;
  r.path.assign(1, 0);
  r.path_tokens.assign(1, r.tokens[r.n_done]);
  r.tokens.clear();
  r.n_done = 0;
  while (true) {
    const auto row = static_cast<size_t>(r.path.back());
    const RowLogits& logits = output.rows[first + row];
    const int n_computed = n_past + static_cast<int>(r.path.size());
    if ((r.reason = why_ended(r))) break;
    if (!has_numbers(logits.top, logits.logits)) {
      r.no_numbers = true;
      r.reason = FinishReason::Stop;
      break;
    }
    std::optional<TokenId> token;
    if (logits.top != nullptr) token = r.sampler.sample(*logits.top, n_computed);
    std::span<const float> all = logits.logits;
    if ((!token && all.empty()) || (all.empty() && r.options.sampling.n_probs))
      all = s.backend->fetch_logits(static_cast<int>(first + row));
    if (!token && all.empty()) return fail(r, device_fault(*s.backend));
    if (!token) token = r.sampler.sample(all, n_computed);
    token = r.scripted(*token);
    if ((r.reason = write(r, *token, all))) break;
    if (n_computed == engine.n_ctx()) {
      r.reason = FinishReason::ContextFull;
      break;
    }
    size_t child = row + 1;
    while (child < n_rows &&
           (tree[child - 1].parent != static_cast<int32_t>(row) || tree[child - 1].token != *token))
      ++child;
    if (child == n_rows) {
      r.tokens.assign(1, *token);
      break;
    }
    r.path.push_back(static_cast<int32_t>(child));
    r.path_tokens.push_back(*token);
  }
  s.speculation->finish_round(s.sequence, r.path, r.tokens.empty() ? -1 : r.tokens.front());
  // As without a draft: an answer that ends before anything is written, or with its text, ends in this step.
  if (r.reason == FinishReason::StopText ||
      (r.reason && r.path.size() == 1 && *r.reason != FinishReason::ContextFull))
    settle(r);
}

// Commits the walk of the last step, as far as the caller took its tokens.
void RequestLoop::Impl::settle(Request& r) {
  if (r.path.empty()) return;
  Session::Impl& s = *r.session;
  size_t n = r.path.size();
  // Tokens that the walk wrote: those of the rows after the root, and the one chosen at the last row.
  const size_t n_written = n - 1 + (r.tokens.empty() && r.reason != FinishReason::ContextFull ? 0 : 1);
  if (r.cancelled && static_cast<size_t>(r.n_taken) < n_written) {
    r.result.n_generated -= static_cast<int>(n_written) - r.n_taken;
    n = static_cast<size_t>(r.n_taken) + 1;
    s.speculation->cut_round(s.sequence, r.n_taken);
    r.tokens.clear();
    r.reason = FinishReason::Cancelled;
  } else if (r.cancelled && r.reason && *r.reason != FinishReason::ContextFull) {
    r.reason = FinishReason::Cancelled;
  }
  const size_t last = r.first_logits + static_cast<size_t>(r.path[n - 1]);
  const std::span<const int32_t> path = std::span<const int32_t>(r.path).first(n);
  if (const Status status = engine.commit(s.sequence, path); !status) fail(r, status.error());
  s.took_path(std::span<const TokenId>(r.path_tokens).first(n),
              r.reason ? std::optional(last) : std::nullopt);
  r.path.clear();
  if (!r.reason || r.ended) return;
  if (r.no_numbers) return fail(r, no_numbers_error(s.n_past()));
  end(r, *r.reason);
}

}  // namespace thermo
