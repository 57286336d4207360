// The inside of generate(): one request from its prompt to its last byte. What the engine is asked for is in
// generation_submit.cpp, what becomes of its events in generation_events.cpp, and the reply as a whole in
// generation.cpp.
#pragma once

#include <algorithm>
#include <list>

#include "server/event_pacer.h"
#include "server/generation.h"

namespace thermo {

class Generation {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;

  Generation(ServerState& server, HttpExchange& exchange, PreparedRequest prepared, CallerInfo caller,
             Continuation* continuation);
  ~Generation();

  // Throws ApiError when it is refused.
  void submit();
  // Throws as long as nothing was sent.
  asio::awaitable<void> answer(Headers headers);

 private:
  using Clock = std::chrono::steady_clock;

  // One of the answers.
  struct Choice {
    AnswerParser parser;
    EventPacer pacer;
    std::function<bool(TokenId)> ends_after;
    Answer answer = {};
    std::vector<GeneratedToken> tokens = {};  // all that the parser got, when log probabilities are asked for
    std::vector<TokenId> ids = {};
    int n_tokens = 0;                            // up to a stop text
    int n_cached = 0, n_read = 0;                // of its prompt
    Clock::time_point started = {}, first = {};  // reading, and the first token
    bool stopping = false, ended = false;
  };

  const GenerationRequest& request() const { return prepared_.request; }
  // The conversation that the request belongs to.
  const std::string& session() const;
  std::string phase() const;
  ApiError refusal(const Error& error, size_t n_prompt) const;

  // There are no more answers at once than slots: a prompt after those waits here until an earlier one is
  // answered, so that the queue has room for others. The answers of a prompt after its first one wait until
  // the first has read it: then they share it.
  void list();
  void add_choices();
  TokenRequest token_request(int index);
  void submit_one(int index, TokenRequest tokens);
  void submit_later(int index);
  void submit_others(int index);
  void submit_prompts();
  void go_on(Choice& choice, TokenRequest& tokens);
  void cancel_all();

  void take(int index, TokenEvent event);
  void take_tokens(int index, const std::vector<GeneratedToken>& tokens);
  void take_end(int index, const TokensEnded& ended);
  void keep_turn(int index);
  void show(int index, AnswerParser::Events events);
  void flush(int index);
  void flush_due(Clock::time_point now);
  Clock::time_point next_due() const;  // of what is held back
  AnswerStats stats_so_far(const Choice& choice) const;

  asio::awaitable<void> follow(const Headers& headers);
  void begin_reply(const Headers& headers);
  asio::awaitable<void> wait_for_answers();
  Clock::time_point time_of(std::chrono::milliseconds limit) const;  // since the request came
  Clock::time_point next_limit() const;
  void check_limits(Clock::time_point now);
  void send_sign_of_life();
  void cancelled();
  void finish_reply(const Headers& headers);
  void end_with(const ApiError& error);
  void send(const std::string& bytes);
  void check_reader();
  void record(const char* outcome);
  bool is_open() const {
    return std::any_of(choices_.begin(), choices_.end(), [](const Choice& c) { return !c.ended; });
  }

  ServerState& server_;
  const ServedModel& model_;
  HttpExchange& exchange_;
  PreparedRequest prepared_;
  CallerInfo caller_;
  Continuation* const continuation_;
  std::shared_ptr<LiveRequest> live_;
  std::unique_ptr<ReplyWriter> writer_;
  std::vector<Choice> choices_;
  int next_ = 0;  // the first answer to the first prompt that was not submitted
  ExpertCounts experts_before_;
  std::optional<ApiError> failure_;
  std::list<std::shared_ptr<LiveRequest>>::iterator listed_ = {};
  bool is_listed_ = false, streaming_ = false, first_shown_ = false;
  bool spaces_ = false;  // before a reply that is no stream, so that nothing between gives the connection up
  bool begun_ = false;   // the status was sent
  Clock::duration ping_ = {};  // between signs of life
  Clock::time_point last_sent_ = Clock::now();
};

}  // namespace thermo
