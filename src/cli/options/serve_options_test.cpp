// Flags of `serve` to the options of the server.
#include "cli/options/serve_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace thermo {
namespace {

using ::testing::HasSubstr;

ServerOptions parsed(std::vector<std::string> arguments) {
  ServeFlags flags;
  OptionSet set;
  add_serve_options(set, flags);
  OptionValues values(set);
  values.parse_arguments(arguments);
  values.apply();
  return server_options(flags);
}
std::string refusal(std::vector<std::string> arguments) {
  try {
    parsed(std::move(arguments));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ServeOptions, NamesOfMetricsAreThoseOfOtherServers) {
  EXPECT_FALSE(parsed({}).metrics_as_vllm);
  EXPECT_FALSE(parsed({"--metrics-compat", "llamacpp"}).metrics_as_vllm);
  const ServerOptions both = parsed({"--metrics-compat", "llamacpp, vllm"});
  EXPECT_TRUE(both.metrics_as_llamacpp && both.metrics_as_vllm);
  EXPECT_THAT(refusal({"--metrics-compat", "tgi"}), HasSubstr("'tgi'"));
  EXPECT_THAT(refusal({"--metrics-compat", "tgi"}), HasSubstr("llamacpp, vllm or both"));
}

TEST(ServeOptions, PagesMayDoWhatIsListed) {
  EXPECT_EQ(parsed({}).access.methods, "GET, POST, DELETE, OPTIONS");
  EXPECT_FALSE(parsed({}).access.credentials);
  const AccessOptions access = parsed({"--cors-methods", "GET,POST", "--cors-headers", "X-A , Authorization",
                                       "--cors-credentials", "--cors-origins", "https://a.example"})
                                   .access;
  EXPECT_EQ(access.methods, "GET, POST");
  EXPECT_EQ(access.headers, "X-A, Authorization");
  EXPECT_TRUE(access.credentials);
  EXPECT_THAT(refusal({"--cors-methods", "GET POST"}), HasSubstr("'GET POST'"));
  EXPECT_THAT(refusal({"--cors-headers", "X: y"}), HasSubstr("a list of headers"));
  EXPECT_THAT(refusal({"--cors-credentials", "--cors-origins", "*"}), HasSubstr("contradict each other"));
}

// They were taken, and then nothing was answered, or only sometimes.
TEST(ServeOptions, RefuseNumbersThatAnswerNothing) {
  for (const char* name : {"--header-timeout", "--body-timeout", "--write-stall-timeout"})
    EXPECT_THAT(refusal({name, "0"}), HasSubstr("a time above 0")) << name;
  for (const char* name : {"--timeout", "--queue-timeout", "--keepalive-timeout", "--sse-ping-interval"})
    EXPECT_EQ(refusal({name, "0"}), "accepted") << name;
  for (const char* name : {"--quantum", "--max-queue-tokens", "--checkpoint-every"})
    EXPECT_THAT(refusal({name, "-1"}), HasSubstr("from 0")) << name;
  EXPECT_THAT(refusal({"-n", "0"}), HasSubstr("a positive number or -1"));
  EXPECT_THAT(refusal({"-n", "-5"}), HasSubstr("a positive number or -1"));
  EXPECT_EQ(parsed({"-n", "7"}).default_max_tokens, 7);
  EXPECT_THAT(refusal({"--max-body-size", "0"}), HasSubstr("a size above 0"));
}

// They were read when the server listened already, and named no option.
TEST(ServeOptions, RefuseWhatIsNoNumberOfRequests) {
  for (const char* text : {"0", "257", "many", "", "4x"})
    EXPECT_THAT(refusal({"--parallel", text}), HasSubstr("--parallel: '" + std::string(text) + "'"));
  for (const char* text : {"1", "256", "auto"}) EXPECT_EQ(refusal({"--parallel", text}), "accepted");
}

TEST(ServeOptions, RefuseNamesThatAreNone) {
  for (const char* text : {"", ",", "a,,b", "a, "})
    EXPECT_THAT(refusal({"--alias", text}), HasSubstr("a name, or several")) << text;
  EXPECT_EQ(refusal({"--alias", "a, b"}), "accepted");
}

TEST(ServeOptions, RefuseTwoPlacesToListen) {
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{"--port", "1"}, {"--host", "localhost"}}) {
    std::vector<std::string> listen = {"--listen", "http://127.0.0.1:2"}, pipe = {"--stdio"};
    for (auto* arguments : {&listen, &pipe}) {
      arguments->insert(arguments->end(), more.begin(), more.end());
      EXPECT_THAT(refusal(*arguments), HasSubstr("leave out --host and --port"));
    }
  }
}

TEST(ServeOptions, AUnixSocketCanBeTrusted) {
  EXPECT_FALSE(parsed({"--host", "/tmp/x.sock"}).access.trusts_unix_sockets);
  EXPECT_TRUE(parsed({"--host", "/tmp/x.sock", "--unix-trusted"}).access.trusts_unix_sockets);
  EXPECT_THAT(refusal({"--unix-trusted"}), HasSubstr("--listen unix:/path"));
}

TEST(ServeOptions, ImagesAndCallsHavePolicies) {
  EXPECT_EQ(parsed({}).images, ImagePolicy::Auto);
  EXPECT_EQ(parsed({"--image-policy", "error"}).images, ImagePolicy::Refuse);
  EXPECT_EQ(parsed({"--image-policy", "placeholder"}).images, ImagePolicy::Placeholder);
  EXPECT_THAT(refusal({"--image-policy", "ocr"}), HasSubstr("auto, error, placeholder"));
  EXPECT_EQ(parsed({}).tool_grammar, ToolGrammar::Auto);
  EXPECT_EQ(parsed({"--tool-grammar", "strict"}).tool_grammar, ToolGrammar::Strict);
  EXPECT_EQ(parsed({"--tool-grammar", "off"}).tool_grammar, ToolGrammar::Off);
  EXPECT_THAT(refusal({"--tool-grammar", "on"}), HasSubstr("auto, strict, off"));
}

TEST(ServeOptions, ReasoningHasAPlace) {
  EXPECT_EQ(parsed({}).reasoning_format, ReasoningFormat::Apart);
  EXPECT_EQ(parsed({"--reasoning-format", "none"}).reasoning_format, ReasoningFormat::InText);
  EXPECT_EQ(parsed({"--reasoning-format", "deepseek-legacy"}).reasoning_format, ReasoningFormat::Both);
  EXPECT_THAT(refusal({"--reasoning-format", "loud"}), HasSubstr("deepseek-legacy"));
}

TEST(ServeOptions, WinOverTheCardOfTheModel) {
  ModelCard card;
  card.max_tokens = 100;
  card.thinking_terminator = " Done.";
  card.reply_reserve = 5;
  card.reasoning_efforts = {{"low", 1}, {"own", 2}};
  ServeFlags flags;
  ServerOptions options = server_options(flags);
  EXPECT_EQ(options.default_max_tokens, 32768);
  apply_card(card, flags, options);
  EXPECT_EQ(options.default_max_tokens, 100);
  EXPECT_EQ(options.budget_message, " Done.");
  EXPECT_EQ(options.reply_reserve, 5);
  EXPECT_EQ(options.efforts.size(), usual_efforts().size() + 1);
  EXPECT_EQ(options.efforts.back().tokens, 2);
  flags.default_max_tokens = 7;
  flags.budget_message = "Stop.";
  options = server_options(flags);
  apply_card(card, flags, options);
  EXPECT_EQ(options.default_max_tokens, 7);
  EXPECT_EQ(options.budget_message, "Stop.");
}

TEST(ServeOptions, TokensMayWaitForOthers) {
  EXPECT_EQ(parsed({}).stream_coalesce.count(), 0);
  EXPECT_EQ(parsed({"--stream-coalesce-ms", "40"}).stream_coalesce.count(), 40);
  EXPECT_THAT(refusal({"--stream-coalesce-ms", "-1"}), HasSubstr("0 to 10000"));
}

}  // namespace
}  // namespace thermo
