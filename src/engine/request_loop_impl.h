// The inside of a RequestLoop: its requests, and the step that runs.
#pragma once

#include <climits>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/session.h"
#include "sampling/constrained_sampler.h"

namespace thermo {

struct RequestLoop::Impl {
  struct Request {
    RequestId id;
    Session::Impl* session;  // nullptr: it was taken away
    ConstrainedSampler sampler;
    GenerateOptions options;
    GenerateResult result;
    std::vector<TokenId> tokens;  // to compute
    size_t n_done = 0;            // of them
    size_t n_now = 0;             // of them, in the step that runs
    std::vector<int> marks;       // lengths of the session that are ahead, ascending
    bool at_mark = false;         // the session has the length of one, and makes its checkpoint next
    bool waits = false;           // for the next step
    bool gave_way = false;        // it has no pages and waits for room
    bool rereads = false;         // what it read and wrote before it gave way
    size_t n_skip = 0;            // of the tokens, those that the session had before the request
    size_t n_told = 0;            // of the prompt, with log probabilities
    bool starved = false;         // the step that is put together has no page for it
    bool paused = false;
    bool cancelled = false;
    bool ended = false;

    // The walk of the last step, until it is committed: rows of the tree, the root first, and their tokens.
    std::vector<int32_t> path = {};
    std::vector<TokenId> path_tokens = {};
    size_t first_logits = 0;                  // of the tree's rows, in the step's output
    std::optional<FinishReason> reason = {};  // the walk ended the answer
    bool no_numbers = false;                  // where the walk ended
    int n_taken = INT_MAX;                    // when cancelled: of the tokens that the walk wrote
    DraftTelemetry draft_before = {};         // of its sequence, when it got it
    DraftTelemetry draft_earlier = {};        // of this request, on sequences that it had before

    bool may_run() const { return !ended && !waits && !paused && session != nullptr; }
    bool has_written() const { return result.n_generated > 0; }
    bool is_writing() const { return has_written() && !rereads; }
    size_t n_left() const { return tokens.size() - n_done; }
    bool tells_prompt() const {
      return options.prompt_logprobs && options.sampling.n_probs && !has_written();
    }
    // What is written where the sampler chose `token`.
    TokenId scripted(TokenId token) const {
      const auto at = static_cast<size_t>(result.n_generated);
      return at < options.script.size() ? options.script[at] : token;
    }
    LogitsNeed need() const { return options.sampling.n_probs ? LogitsNeed::Row : sampler.need(); }
    DraftTelemetry draft() const {
      if (session == nullptr || session->speculation == nullptr) return draft_earlier;
      return session->speculation->telemetry(session->sequence) - draft_before + draft_earlier;
    }
    void begin_draft() {
      if (session->speculation == nullptr) return;
      session->speculation->begin_request(session->sequence);
      draft_before = session->speculation->telemetry(session->sequence);
    }
  };

  Engine& engine;
  std::vector<std::unique_ptr<Request>> requests;  // oldest first
  std::vector<RequestEvent> events;
  std::function<bool()> give_back;  // may be empty
  RequestId last_id = 0;
  size_t turn = 0;  // whose row comes first, where there are more than fit

  // Of the step that runs.
  std::vector<SequenceRows> groups;
  std::vector<Row> rows;
  std::vector<DraftAsk> asks;

  explicit Impl(Engine& e) : engine(e) {
    rows.reserve(static_cast<size_t>(e.n_batch()));  // groups point into it
  }
  template <class What>
  void tell(const Request& request, What what) {
    RequestEvent& event = events.emplace_back();
    event.request = request.id;
    event.what = std::move(what);
  }
  void end(Request& request, FinishReason reason) {
    request.result.reason = reason;
    request.result.draft = request.draft();
    leave(request);
    tell(request, request.result);
  }
  void fail(Request& request, Error error) {
    leave(request);
    tell(request, std::move(error));
  }
  static void leave(Request& request) {
    request.ended = true;
    if (request.session != nullptr) request.session->in_request = false;
  }
  void choose(Request& request);
  std::optional<FinishReason> why_ended(const Request& request) const;
  std::optional<FinishReason> write(Request& request, TokenId token, std::span<const float> logits);
  void add_group(Request& request, size_t n);
  void add_tree(Request& request);
  DraftAsk draft_ask(const Request& request, int n) const;
  void draft();
  void draft_early(const Request& request);
  void collect_rows(size_t max_prompt_rows);
  size_t reserve(Request& request, size_t n);
  bool may_resume(const Request& request) const;
  bool give_way();
  size_t n_to_mark(Request& request) const;
  void tell_prompt(Request& request, const StepOutput& output, size_t first);
  void run(const std::function<void()>& meanwhile);
  Request& of_sequence(int sequence);
  void walk(Request& request, const StepOutput& output, size_t first, size_t n_rows);
  void settle(Request& request);
};

}  // namespace thermo
