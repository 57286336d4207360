// The server over real sockets, with an engine that plays tokens: what depends on time and on who goes first.
#include <sys/resource.h>

#include <atomic>

#include "server/testing/scripted_server.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

TEST(Server, AnswersWithWhatTheEngineSays) {
  Running running({.scripts = {tokens_of("Hello there")}});
  Client client(running.url());
  client.post("/v1/chat/completions", kAsk);
  EXPECT_NE(client.read_until("").find(R"("content":"Hello there")"), std::string::npos);
}

// One that fails where nobody expects it: when the text that ends an answer was found, and when it is asked
// for heat again after the two times that the server asks by itself.
class FailingEngine : public ScriptedEngine {
 public:
  using ScriptedEngine::ScriptedEngine;
  void cancel(RequestHandle request) override {
    if (!std::exchange(failed_, true)) throw std::runtime_error("no reason");
    ScriptedEngine::cancel(request);
  }
  std::shared_ptr<const ExpertHeat> expert_heat() override {
    if (++n_heats_ > 2) throw std::runtime_error("no reason");
    return nullptr;
  }
  int n_heats() const { return n_heats_; }

 private:
  bool failed_ = false;
  std::atomic<int> n_heats_ = 0;
};

// The reply with the error stood in the middle of the stream, with a head of its own.
TEST(Server, EndsAStreamThatFailsInsideWithAnError) {
  Server server(Running::with_free_port({}));
  FailingEngine service({.scripts = {tokens_of("Hello there, you")}});
  server.set_ready(Running::served(service));
  Client client(server.urls().front());
  client.post("/v1/chat/completions", R"({"stop": "there", )" + kStream.substr(1));
  const std::string seen = client.read_until("");
  EXPECT_EQ(seen.find("HTTP/1.1", 1), std::string::npos) << seen;
  EXPECT_NE(seen.find(R"("code":"internal_error")"), std::string::npos) << seen;
  EXPECT_NE(seen.find("data: [DONE]\n\n"), std::string::npos) << seen;
  server.stop();
}

TEST(Server, EndsALiveViewThatFailsInside) {
  Server server(Running::with_free_port({}));
  FailingEngine service({.scripts = {tokens_of("x")}});
  server.set_ready(Running::served(service));
  Running::expect_soon([&] { return service.n_heats() == 2; });
  Client client(server.urls().front());
  client.send("GET /thermo/live?heat=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  const std::string seen = client.read_until("");
  EXPECT_NE(seen.find("event: hello"), std::string::npos) << seen;
  EXPECT_EQ(seen.find("HTTP/1.1", 1), std::string::npos) << seen;
  server.stop();
}

// What was taken for a request without a body was followed by that body, taken for the next request.
TEST(Server, RefusesHeadsThatCanBeReadInTwoWays) {
  const Running running({.scripts = {tokens_of("x")}});
  const auto reply_to = [&](const std::string& head, const std::string& body) {
    Client client(running.url());
    client.send("POST /tokenize" + head + "\r\n" + body);
    return client.read_until("");
  };
  const std::string smuggled = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  const std::string host = " HTTP/1.1\r\nHost: localhost\r\n";
  for (const char* encoding : {"xchunked", "identity", "gzip", "chunked, identity", "gzip, chunked", ""}) {
    const std::string reply = reply_to(host + "Transfer-Encoding: " + encoding + "\r\n", smuggled);
    EXPECT_TRUE(reply.starts_with("HTTP/1.1 400 ")) << encoding << ": " << reply;
    EXPECT_EQ(reply.find("HTTP/1.1 200"), std::string::npos) << encoding;
  }
  const std::string chunked = "Transfer-Encoding: chunked\r\n",
                    text = "10\r\n{\"content\": \"x\"}\r\n0\r\n\r\n";
  for (const std::string& head :
       {" HTTP/1.0\r\nHost: localhost\r\n" + chunked, " HTTP/1.1\r\n" + chunked,
        host + "Host: localhost\r\n" + chunked, host + chunked + "Content-Length: 26\r\n"}) {
    const std::string reply = reply_to(head, text);
    EXPECT_TRUE(reply.starts_with("HTTP/1.1 400 ")) << head << reply;
  }
  EXPECT_TRUE(reply_to(host + "Connection: close\r\n" + chunked, text).starts_with("HTTP/1.1 200 "));
}

TEST(Server, JudgesTheHostOfAWholeTarget) {
  const Running running({.scripts = {tokens_of("x")}});
  const auto status_for = [&](const std::string& target, const std::string& host) {
    Client client(running.url());
    client.send("GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n");
    return client.read_until("").substr(9, 3);
  };
  EXPECT_EQ(status_for("http://evil.example/health", "localhost"), "403");
  EXPECT_EQ(status_for("http://localhost/health", "evil.example"), "200");
}

TEST(Server, RefusesMoreTurnsThanTokensBeforeItRendersThem) {
  const Running running({.scripts = {tokens_of("x")}, .n_ctx = 64});
  std::string body = R"({"messages": [)";
  for (int i = 0; i < 65; ++i) body += std::string(i == 0 ? "" : ",") + R"({"role": "user", "content": ""})";
  Client client(running.url());
  client.post("/v1/chat/completions", body + "]}");
  const std::string reply = client.read_until("");
  EXPECT_NE(reply.find("context_length_exceeded"), std::string::npos) << reply;
  EXPECT_NE(reply.find("resulted in 65 tokens"), std::string::npos) << reply;
}

TEST(Server, SkipsEmptyLinesBeforeARequest) {
  const Running running({.scripts = {tokens_of("x")}});
  Client client(running.url());
  client.send("\r\n");
  client.send("\r\n\nGET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(client.read_until("").starts_with("HTTP/1.1 200 "));
}

// Refused, or (with a short queue) given up half way, although they can wait.
TEST(Server, AnswersMorePromptsThanItHasSlots) {
  Running running({.scripts = {tokens_of("Hello")}, .n_slots = 2, .max_waiting = 0});
  for (const char* prompts :
       {R"("n": 2, "prompt": ["a", "b", "c"])", R"("prompt": ["a", "b", "c", "d", "e", "f"])"}) {
    Client client(running.url());
    client.post("/v1/completions", std::string("{") + prompts + "}");
    const std::string seen = client.read_until("");
    EXPECT_NE(seen.find("HTTP/1.1 200"), std::string::npos) << seen;
    for (int i = 0; i < 6; ++i)
      EXPECT_NE(seen.find("{\"text\":\"Hello\",\"index\":" + std::to_string(i)), std::string::npos) << seen;
    running.expect_idle();
  }
}

TEST(Server, SaysThatTheModelIsLoading) {
  Server server(Running::with_free_port({}));
  server.set_progress("experts", 0.25);
  Client client(server.urls().front());
  client.post("/v1/chat/completions", kAsk);
  const std::string reply = client.read_until("");
  EXPECT_NE(reply.find("503"), std::string::npos);
  EXPECT_NE(reply.find("model_loading"), std::string::npos);
  EXPECT_NE(reply.find("Retry-After: 1"), std::string::npos);
}

TEST(Server, TellsClientsThatNoDescriptorIsLeft) {
  Running running({.scripts = {tokens_of("Hello")}});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(before.rlim_cur, before.rlim_max) << "it is raised at the start";
  std::vector<int> taken = {dup(0)};
  rlimit limit = before;
  limit.rlim_cur = static_cast<rlim_t>(taken.front()) + 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  for (int fd = dup(0); fd >= 0; fd = dup(0)) taken.push_back(fd);
  for (int i = 0; i < 2; ++i) {  // the spare one comes back
    ::close(taken.back());       // for the client
    taken.pop_back();
    Client client(running.url());
    client.send("GET /live HTTP/1.0\r\n\r\n");
    EXPECT_NE(client.read_until("").find("503"), std::string::npos);
    client.close();
    taken.push_back(dup(0));
  }
  for (const int fd : taken) ::close(fd);
  setrlimit(RLIMIT_NOFILE, &before);
  Client client(running.url());
  client.send("GET /live HTTP/1.0\r\n\r\n");
  EXPECT_NE(client.read_until("").find("200 OK"), std::string::npos);
}

TEST(Server, SaysThatAnEngineWithAQueueIsWell) {
  std::vector<TokenId> endless(4000, tokens_of("a").front());
  Running running({.scripts = {endless}, .n_slots = 1, .max_waiting = 1, .tokens_per_second = 100.0});
  const auto deep = [&running] {
    Client client(running.url());
    client.send("GET /health?deep=1 HTTP/1.0\r\n\r\n");
    return client.read_until("");
  };
  Client first(running.url()), second(running.url());
  first.post("/v1/chat/completions", kStream);
  first.read_until("\"content\":\"a");
  EXPECT_NE(deep().find("200 OK"), std::string::npos) << "others are before it";
  second.post("/v1/chat/completions", kStream);
  Running::expect_soon([&] { return running.service.state().n_waiting == 1; });
  EXPECT_NE(deep().find("200 OK"), std::string::npos) << "there is no room for it";
}

TEST(Server, StopsWorkWhenTheClientGoesAway) {
  std::vector<TokenId> endless(4000, tokens_of("a").front());
  Running running({.scripts = {endless}, .n_slots = 1, .tokens_per_second = 100.0});
  Client first(running.url()), waiting(running.url());
  first.post("/v1/chat/completions", kStream);
  first.read_until("\"content\":\"a");
  waiting.post("/v1/messages", kAsk);
  while (running.service.state().n_waiting == 0) std::this_thread::sleep_for(1ms);
  waiting.close();  // in the queue
  Running::expect_soon([&] { return running.service.state().n_waiting == 0; });
  EXPECT_EQ(running.service.state().n_running, 1);
  first.close();  // while it is written
  running.expect_idle();
}

TEST(Server, GivesSignsOfLife) {
  ServerOptions options;
  options.ping_interval = 30ms;
  Running running({.scripts = {tokens_of("a")}}, options);
  running.service.hold(true);  // until there was one
  Client chat(running.url()), messages(running.url()), responses(running.url());
  chat.post("/v1/chat/completions", kStream);
  messages.post("/v1/messages", kStream);
  responses.post("/v1/responses", R"({"stream": true, "input": "x"})");
  chat.read_until(": ping\n\n");
  const std::string ping = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
  messages.read_until(ping, 2);  // the first one is part of the beginning
  responses.read_until("event: response.in_progress", 2);
  running.service.hold(false);
  EXPECT_NE(chat.read_until("[DONE]").find("[DONE]"), std::string::npos);
  EXPECT_NE(messages.read_until("message_stop").find("message_stop"), std::string::npos);
  EXPECT_NE(responses.read_until("response.completed").find("response.completed"), std::string::npos);
}

TEST(Server, PutsTokensIntoOneEventWhenTheyMayWait) {
  std::string numbers;
  for (int i = 0; i < 40; ++i) numbers += std::to_string(i) + " ";
  const std::vector<TokenId> tokens = tokens_of(numbers);
  const auto stream = [&](std::chrono::milliseconds wait, const std::string& path) {
    ServerOptions options;
    options.stream_coalesce = wait;
    Running running({.scripts = {tokens}, .tokens_per_second = 400.0}, options);
    Client client(running.url());
    client.post(path, kStream);
    return client.read_until(path == "/v1/messages" ? "message_stop" : "[DONE]");
  };
  const auto texts = [](const std::string& reply, const std::string& key) {
    std::pair<int, std::string> out;  // events, and their text
    for (size_t at = reply.find(key); at != std::string::npos; at = reply.find(key, at + 1)) {
      const size_t begin = at + key.size(), end = reply.find('"', begin);
      if (end > begin) ++out.first;
      out.second += reply.substr(begin, end - begin);
    }
    return out;
  };
  const auto [n_plain, plain] = texts(stream(0ms, "/v1/chat/completions"), "\"content\":\"");
  const auto [n_paced, paced] = texts(stream(60ms, "/v1/chat/completions"), "\"content\":\"");
  EXPECT_EQ(paced, plain);
  EXPECT_GT(n_plain, 20);
  EXPECT_LT(n_paced, n_plain / 3);
  EXPECT_EQ(texts(stream(10s, "/v1/messages"), "\"text\":\"").second, plain) << "the end waits for nothing";

  // They wait for their time to be over and not for the end.
  ServerOptions options;
  options.stream_coalesce = 60ms;
  Running running(
      {.scripts = {std::vector<TokenId>(8000, tokens_of("a").front())}, .tokens_per_second = 100.0}, options);
  Client client(running.url());
  client.post("/v1/chat/completions", kStream);
  EXPECT_EQ(client.read_until("\"content\":\"a", 4).find("[DONE]"), std::string::npos);
}

TEST(Server, FillsInTheMiddleWhereTheVocabularyCan) {
  const std::string body = R"({"prompt": "ab", "suffix": "<|im_end|>", "max_tokens": 4})";
  Running plain({.scripts = {tokens_of("x")}});
  Client refused(plain.url());
  refused.post("/v1/completions", body);
  const std::string reply = refused.read_until("");
  EXPECT_NE(reply.find("HTTP/1.1 400"), std::string::npos);
  EXPECT_NE(reply.find("suffix: this model has no tokens for filling in the middle"), std::string::npos);

  VocabData data = *read_vocab(plankton().file());
  for (const char* text : {"<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"}) {
    data.tokens.emplace_back(text);
    data.types.push_back(static_cast<int32_t>(TokenType::Control));
  }
  const Tokenizer words(std::move(data));
  std::vector<TokenId> script = words.encode("cd");
  script.push_back(*words.vocab().find_special("<|fim_pad|>"));  // ends it
  for (const TokenId id : words.encode("ef")) script.push_back(id);
  Running filling({.scripts = {script}}, {}, &words);
  Client client(filling.url());
  client.post("/v1/completions", body);
  const std::string filled = client.read_until("");
  EXPECT_NE(filled.find(R"("text":"cd")"), std::string::npos) << filled;
  const size_t n_prompt =
      3 + words.encode("ab").size() + words.encode("<|im_end|>", {.parse_special = false}).size();
  EXPECT_NE(filled.find("\"prompt_tokens\":" + std::to_string(n_prompt) + ","), std::string::npos) << filled;
}

TEST(Server, PausesAReaderThatDoesNotRead) {
  // Log probabilities make long events, so that a megabyte is soon written.
  std::vector<TokenId> endless(16000, tokens_of("a").front());
  Running running({.scripts = {endless}, .n_ctx = 1 << 20, .n_slots = 2, .tokens_per_second = 4000.0});
  Client lazy(running.url());
  lazy.post(
      "/v1/chat/completions",
      R"({"stream": true, "logprobs": true, "messages": [{"role": "user", "content": "x"}], "max_tokens": 200000,)"
      R"( "chat_template_kwargs": {"enable_thinking": false}})");
  const auto end = std::chrono::steady_clock::now() + 120s;
  while (running.service.state().n_paused == 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(5ms);
  EXPECT_EQ(running.service.state().n_paused, 1);
  Client other(running.url());  // nobody else feels it
  other.post("/v1/chat/completions", R"({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})");
  EXPECT_NE(other.read_until("").find("200 OK"), std::string::npos);
  EXPECT_NE(lazy.read_until("[DONE]").find("[DONE]"), std::string::npos) << "it goes on when it is read";
}

TEST(Server, TellsEveryoneThatTheEngineFailed) {
  std::vector<TokenId> endless(4000, tokens_of("a").front());
  Running running({.scripts = {endless}, .tokens_per_second = 100.0});
  Client stream(running.url()), whole(running.url());
  stream.post("/v1/chat/completions", kStream);
  whole.post("/v1/messages", kAsk);
  stream.read_until("\"content\":\"a");
  running.service.break_down("the device is gone");
  EXPECT_NE(stream.read_until("[DONE]").find("engine_failed"), std::string::npos);
  const std::string reply = whole.read_until("");
  EXPECT_NE(reply.find("503"), std::string::npos);
  EXPECT_NE(reply.find("x-should-retry: false"), std::string::npos);
  EXPECT_EQ(running.server.fault(), "the device is gone");
  Client health(running.url()), ready(running.url());
  health.send("GET /health HTTP/1.0\r\n\r\n");
  EXPECT_NE(health.read_until("").find("\"failed\""), std::string::npos);
  ready.send("GET /ready HTTP/1.0\r\n\r\n");
  EXPECT_NE(ready.read_until("").find("x-should-retry: false"), std::string::npos);
}

TEST(Server, ServesManyAtOnce) {
  Running running({.scripts = {tokens_of("one two three four five six")},
                   .n_slots = 64,
                   .max_waiting = 200,
                   .tokens_per_second = 200.0});
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 128; ++i) {
    clients.push_back(std::make_unique<Client>(running.url()));
    clients.back()->post("/v1/chat/completions", i % 2 == 0 ? kStream : kAsk);
  }
  // Streams may cut words.
  for (size_t i = 0; i < clients.size(); ++i)
    EXPECT_NE(clients[i]->read_until("").find(i % 2 == 0 ? "[DONE]" : "five six"), std::string::npos);
  running.expect_idle();
}

}  // namespace
}  // namespace thermo
