// What ends early: the server, and work for a client that is gone.
#include <atomic>
#include <climits>

#include "server/prompt.h"
#include "server/server_state.h"
#include "server/testing/scripted_server.h"
#include "server/token_endpoints.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

// It waited for its workers for as long as they took.
TEST(Server, EndsWhileARequestIsStillBeingPrepared) {
  struct Stuck : ScriptedEngine {
    using ScriptedEngine::ScriptedEngine;
    int n_ctx() const override {
      while (held) std::this_thread::sleep_for(1ms);
      return ScriptedEngine::n_ctx();
    }
    std::atomic<bool> held = false;
  };
  // Not freed: the worker goes on with them, as when the program ends.
  auto* const service = new Stuck({.scripts = {tokens_of("x")}});
  ServerOptions options;
  options.shutdown_grace = 200ms;
  Server server(Running::with_free_port(options));
  server.set_ready(Running::served(*service));
  service->held = true;
  Client client(server.urls().front());
  client.post("/v1/chat/completions", kAsk);
  std::this_thread::sleep_for(100ms);
  EXPECT_FALSE(server.stop());
  service->held = false;
}

// It gave them no grace, and could not end them after it.
TEST(Server, GivesRequestsThatAreBeingPreparedTheGraceToo) {
  struct Slow : ScriptedEngine {
    using ScriptedEngine::ScriptedEngine;
    int n_ctx() const override {
      is_asked = true;
      while (held) std::this_thread::sleep_for(1ms);
      return ScriptedEngine::n_ctx();
    }
    mutable std::atomic<bool> is_asked = false;
    std::atomic<bool> held = true;
  };
  for (const bool in_time : {true, false}) {
    Slow service({.scripts = {tokens_of("x")}});
    ServerOptions options;
    options.shutdown_grace = in_time ? 60s : 1s;
    Server server(Running::with_free_port(options));
    server.set_ready(Running::served(service));
    Client client(server.urls().front());
    client.post("/v1/messages/count_tokens", kAsk);
    Running::expect_soon([&] { return service.is_asked.load(); });
    std::thread end([&] {
      server.shut_down();
      service.held = false;
    });
    if (in_time) {
      std::this_thread::sleep_for(100ms);
      service.held = false;
    }
    const std::string reply = client.read_until("");
    EXPECT_NE(reply.find(in_time ? "\"input_tokens\"" : "the server is shutting down"), std::string::npos)
        << reply;
    end.join();
    EXPECT_TRUE(server.stop());
  }
}

// A client that had gone away kept a worker busy to the end of its text.
TEST(Server, StopsReadingATextThatNobodyWaitsFor) {
  struct Enough {};
  ScriptedEngine service({.scripts = {tokens_of("x")}, .n_ctx = 1 << 24});
  VocabData data = *read_vocab(plankton().file());
  for (const char* text : {"<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"}) {
    data.tokens.emplace_back(text);
    data.types.push_back(static_cast<int32_t>(TokenType::Control));
  }
  const Tokenizer words(std::move(data));
  ServerState state{ServerOptions{}};
  state.model = std::make_unique<ServedModel>(Running::served(service, &words));
  const Json text = std::string(1 << 20, ' '), few = "a";
  const Json turns = {{{"role", "user"}, {"content", "a"}}, {{"role", "user"}, {"content", text}}};
  const Json bias = {{"messages", {{{"role", "user"}, {"content", few}}}},
                     {"logit_bias", {{text.get<std::string>(), 1}}}};
  struct Case {
    Endpoint endpoint;
    Dialect dialect;
    Json body;
  };
  const Case cases[] = {
      {Endpoint::Chat, Dialect::Chat, {{"messages", turns}}},
      {Endpoint::Chat, Dialect::Chat, bias},
      {Endpoint::Completions, Dialect::Completions, {{"prompt", text}}},
      {Endpoint::Completions, Dialect::Completions, {{"prompt", text}, {"suffix", few}}},
      {Endpoint::Completions, Dialect::Completions, {{"prompt", few}, {"suffix", text}}},
      {Endpoint::Tokenize, Dialect::Native, {{"content", text}}},
      {Endpoint::Tokenize, Dialect::Native, {{"messages", turns}}},
      {Endpoint::ApplyTemplate, Dialect::Native, {{"messages", turns}}},
      {Endpoint::CountTokens, Dialect::Messages, {{"messages", turns}, {"max_tokens", 1}}},
      {Endpoint::ChatTokens, Dialect::Chat, {{"messages", turns}}},
      {Endpoint::ResponsesTokens, Dialect::Responses, {{"input", text}}},
  };
  for (const Case& one : cases) {
    int n_looks = 0, last = INT_MAX;
    const std::function<void()> look = [&] {
      if (++n_looks == last) throw Enough{};
    };
    const auto read = [&] {
      n_looks = 0;
      if (one.endpoint != Endpoint::Chat && one.endpoint != Endpoint::Completions) {
        token_reply(one.endpoint, one.body, state, "", look);
        return;
      }
      prepare(read_request(one.dialect, one.body, state, look), *state.model, state.options,
              {*state.turns, ""}, look);
    };
    read();
    EXPECT_GT(n_looks, 8) << one.body.dump().substr(0, 60);
    last = n_looks / 2;  // within the text
    EXPECT_THROW(read(), Enough) << one.body.dump().substr(0, 60);
    EXPECT_EQ(n_looks, last);
  }
}

TEST(Server, LetsRunningRequestsFinishAndRefusesOthers) {
  Running running(
      {.scripts = {tokens_of("one two three four five six seven eight")}, .tokens_per_second = 20.0});
  Client client(running.url());
  client.post("/v1/chat/completions", kStream);
  client.read_until("\"content\":\"o");
  std::thread end([&] { running.server.shut_down(); });
  EXPECT_NE(client.read_until("[DONE]").find(R"("finish_reason":"stop")"), std::string::npos);
  end.join();
  running.expect_idle();
}

}  // namespace
}  // namespace thermo
