#include "server/http/access.h"

#include <gtest/gtest.h>

#include "server/http/http_message.h"

namespace thermo {
namespace {

TEST(Access, TakesItsKeysAndNoOthers) {
  const Access open({});
  EXPECT_TRUE(open.caller("", "").has_value());
  const Access access({.keys = {"one", "bob:two", "admin:three"}});
  EXPECT_FALSE(access.caller("", ""));
  EXPECT_FALSE(access.caller("Bearer ", ""));
  EXPECT_FALSE(access.caller("Bearer bob:two", ""));
  EXPECT_EQ(access.caller("Bearer one", "")->name, "key1");
  EXPECT_EQ(access.caller("bearer two", "")->name, "bob");
  EXPECT_FALSE(access.caller("", "two")->admin);
  EXPECT_TRUE(access.caller("", "three")->admin);
  EXPECT_TRUE(Access({.keys = {"only"}}).caller("Bearer only", "")->admin);
}

TEST(Access, KnowsTheNamesOfThisMachine) {
  const Access access({.allowed_hosts = {"box.lan"}});
  for (const char* host :
       {"localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "127.9.9.9", "BOX.lan:80", ""})
    EXPECT_TRUE(access.host_allowed(host)) << host;
  for (const char* host :
       {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]", "0.0.0.0", "box"})
    EXPECT_FALSE(access.host_allowed(host)) << host;
}

TEST(Access, LetsPagesOfThisMachineIn) {
  const Access access({});
  for (const char* origin : {"http://localhost:3000", "https://127.0.0.1", "http://[::1]:5"})
    EXPECT_EQ(access.allowed_origin(origin), origin);
  for (const char* origin : {"http://evil.example", "null", "file://", "http://localhost.evil.example", ""})
    EXPECT_EQ(access.allowed_origin(origin), "") << origin;
  EXPECT_EQ(Access({.origins = "*"}).allowed_origin("http://evil.example"), "*");
  EXPECT_EQ(Access({.origins = "https://a.example, https://b.example"}).allowed_origin("https://b.example"),
            "https://b.example");
}

TEST(Access, MakesKeysThatDiffer) {
  EXPECT_NE(generate_key(), generate_key());
  EXPECT_GE(generate_key().size(), 43u);
}

TEST(HttpMessage, SplitsTargetsAndQueries) {
  HttpRequest request;
  split_target("/v1/messages/?beta=true&x", request);
  EXPECT_EQ(request.path, "/v1/messages");
  EXPECT_EQ(request.query_value("beta"), "true");
  EXPECT_EQ(request.query_value("x", "no"), "");
  EXPECT_EQ(request.query_value("y", "no"), "no");
  HttpRequest absolute;
  split_target("http://host:1/live", absolute);
  EXPECT_EQ(absolute.path, "/live");
}

TEST(HttpMessage, NeverLetsAValueBeginAHeader) {
  HttpReply reply;
  reply.headers = {{"X", "a\r\nY: b"}};
  const std::string head = reply_head(reply, {}, false);
  EXPECT_EQ(head.find("\nY:"), std::string::npos);
}

}  // namespace
}  // namespace thermo
