// Requests that are computed together. A request is in one of two states: it has tokens that are not computed
// yet (its prompt, or the token it wrote last), or it has logits and chooses.
#include <fmt/format.h>

#include <algorithm>

#include "engine/session.h"
#include "sampling/sampler.h"

namespace thermo {

struct RequestLoop::Impl {
  struct Request {
    RequestId id;
    Session::Impl* session;
    Sampler sampler;
    GenerateOptions options;
    GenerateResult result;
    std::vector<TokenId> tokens;  // to compute
    size_t n_done = 0;            // of them
    size_t n_now = 0;             // of them, in the step that runs
    bool waits = false;           // for the next step
    bool cancelled = false;
    bool ended = false;

    bool may_run() const { return !ended && !waits; }
    bool is_writing() const { return result.n_generated > 0; }
    size_t n_left() const { return tokens.size() - n_done; }
    LogitsNeed need() const { return options.sampling.n_probs ? LogitsNeed::Row : sampler.need(); }
  };

  Engine& engine;
  std::vector<std::unique_ptr<Request>> requests;  // oldest first
  std::vector<RequestEvent> events;
  RequestId last_id = 0;
  size_t turn = 0;  // whose row comes first, where there are more than fit

  // Of the step that runs.
  std::vector<SequenceRows> groups;
  std::vector<Row> rows;

  explicit Impl(Engine& e) : engine(e) {
    rows.reserve(static_cast<size_t>(e.n_batch()));  // groups point into it
  }
  template <class What>
  void tell(const Request& request, What what) {
    events.push_back({request.id, std::move(what)});
  }
  void end(Request& request, FinishReason reason) {
    request.result.reason = reason;
    leave(request);
    tell(request, request.result);
  }
  void fail(Request& request, Error error) {
    leave(request);
    tell(request, std::move(error));
  }
  static void leave(Request& request) {
    request.ended = true;
    request.session->in_request = false;
  }
  void choose(Request& request);
  void add_group(Request& request, size_t n);
  void collect_rows();
  void run();
};

RequestLoop::RequestLoop(Engine& engine) : impl_(std::make_unique<Impl>(engine)) {}
RequestLoop::~RequestLoop() {
  for (const auto& request : impl_->requests) Impl::leave(*request);
}

bool RequestLoop::empty() const {
  return impl_->requests.empty();
}

Result<RequestId> RequestLoop::add(Session& session, std::span<const TokenId> prompt,
                                   const GenerateOptions& options) {
  const auto invalid = [](std::string message) {
    return Error{ErrorCode::InvalidArgument, std::move(message)};
  };
  Session::Impl& s = *session.impl_;
  const int n_vocab = impl_->engine.config().n_vocab;
  if (s.in_request) return invalid("the session has a request already");
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
  const GenerateResult result{.reason = {}, .n_generated = 0, .seed = sampler.seed()};
  impl_->requests.push_back(
      std::make_unique<Impl::Request>(Impl::Request{.id = ++impl_->last_id,
                                                    .session = &s,
                                                    .sampler = std::move(sampler),
                                                    .options = options,
                                                    .result = result,
                                                    .tokens = {prompt.begin(), prompt.end()}}));
  return impl_->last_id;
}

void RequestLoop::cancel(RequestId id) {
  for (const auto& request : impl_->requests)
    if (request->id == id) request->cancelled = true;
}

std::span<const RequestEvent> RequestLoop::step() {
  Impl& m = *impl_;
  m.events.clear();
  for (const auto& request : m.requests) {
    // Without a prompt the first token comes from what the session has; its row waits for the next step, so
    // that a caller can cancel after every token.
    request->waits = request->n_left() == 0;
    if (request->waits)
      m.choose(*request);
    else if (request->cancelled && !request->is_writing())
      m.end(*request, FinishReason::Cancelled);
  }
  m.collect_rows();
  if (!m.groups.empty()) m.run();
  std::erase_if(m.requests, [](const auto& request) { return request->ended; });
  return m.events;
}

// The next token of a request that has logits, or its end.
void RequestLoop::Impl::choose(Request& r) {
  Session::Impl& s = *r.session;
  if (r.cancelled) return end(r, FinishReason::Cancelled);
  if (r.options.max_tokens >= 0 && r.result.n_generated >= r.options.max_tokens)
    return end(r, FinishReason::Length);
  const std::optional<TokenId> token = s.choose(r.sampler);
  if (!token) return fail(r, device_fault(*s.backend));
  const std::vector<TokenId>& stops = r.options.stop_tokens;
  if (std::find(stops.begin(), stops.end(), *token) != stops.end()) return end(r, FinishReason::Stop);
  r.sampler.accept(*token);
  ++r.result.n_generated;
  GeneratedToken generated{*token, {}};
  if (r.options.sampling.n_probs) {
    if (!s.fetch_logits()) return fail(r, device_fault(*s.backend));
    generated.logprobs = top_logprobs(s.logits, *token, *r.options.sampling.n_probs);
  }
  tell(r, std::move(generated));
  if (s.n_past() == engine.n_ctx()) return end(r, FinishReason::ContextFull);
  r.tokens.assign(1, *token);
  r.n_done = 0;
}

void RequestLoop::Impl::add_group(Request& r, size_t n) {
  const size_t first = rows.size();
  r.n_now = n;
  Session::Impl::add_rows(std::span(r.tokens).subspan(r.n_done, n), n == r.n_left(), rows);
  groups.push_back(
      {.sequence = r.session->sequence, .rows = std::span<const Row>(rows).subspan(first), .need = r.need()});
}

// Those that write come first, so that no stream waits for another's prompt; then prompts, the oldest first.
void RequestLoop::Impl::collect_rows() {
  groups.clear();
  rows.clear();
  const auto room = [&] { return static_cast<size_t>(engine.n_batch()) - rows.size(); };
  const size_t n = requests.size();
  size_t next_turn = 0;
  for (size_t i = 0; i < n; ++i) {
    Request& request = *requests[(turn + i) % n];
    if (!request.may_run() || !request.is_writing()) continue;
    if (room() == 0) break;
    add_group(request, 1);
    next_turn = (turn + i + 1) % n;
  }
  turn = next_turn;
  for (const auto& request : requests)
    if (request->may_run() && !request->is_writing() && room() > 0)
      add_group(*request, std::min(room(), request->n_left()));
}

void RequestLoop::Impl::run() {
  const Result<StepOutput> output = engine.step({.groups = groups});
  size_t n_logits = 0;
  for (const SequenceRows& group : groups) {
    Request& r = **std::find_if(requests.begin(), requests.end(), [&](const auto& request) {
      return request->session->sequence == group.sequence;
    });
    if (!output) {
      fail(r, output.error());
      continue;
    }
    const bool ends = r.n_now == r.n_left();
    r.session->took_step(std::span(r.tokens).subspan(r.n_done, r.n_now), *output,
                         ends ? std::optional(n_logits++) : std::nullopt);
    r.n_done += r.n_now;
    if (!r.is_writing())
      tell(r, PromptProgress{static_cast<int>(r.n_done), static_cast<int>(r.tokens.size())});
    if (ends) choose(r);
  }
}

}  // namespace thermo
