#include "server/http/access.h"

#include <gtest/gtest.h>

#include "base/error.h"
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
  // Clients may send both, and only one of them is for this server.
  EXPECT_EQ(access.caller("Bearer none", "two")->name, "bob");
  EXPECT_EQ(access.caller("Bearer one", "two")->name, "key1");
  EXPECT_FALSE(access.caller("Bearer none", "other"));
}

TEST(Access, TellsKeysFromTheirNames) {
  const auto read = [](const char* text) {
    const GivenKey given = read_key(text);
    return given.name + "|" + given.key + (given.admin ? "|admin" : "");
  };
  EXPECT_EQ(read("secret"), "|secret");
  EXPECT_EQ(read("bob:secret"), "bob|secret");
  EXPECT_EQ(read("bob: secret"), "bob|secret");
  EXPECT_EQ(read("admin:secret"), "|secret|admin");
  EXPECT_EQ(read("admin:bob:secret"), "bob|secret|admin");
  EXPECT_EQ(read("bob:admin:secret"), "bob|secret|admin");
  EXPECT_EQ(read("sk:abc:def"), "sk|abc:def");
  EXPECT_EQ(read("admin:bob:a:b"), "bob|a:b|admin");
}

TEST(Access, HasNoEmptyKeys) {
  for (const char* text : {"", "admin:", "name:", "admin:name:", "name:admin:", "name: "}) {
    EXPECT_THROW(read_key(text), ConfigError) << text;
    EXPECT_THROW(Access({.keys = {"good", text}}), ConfigError) << text;
  }
  const Access access({.keys = {"one"}});
  for (const char* header : {"", "Bearer", "Bearer ", "Basic x"})
    EXPECT_FALSE(access.caller(header, "")) << header;
}

TEST(Access, TrustsUnixSocketsWhenTold) {
  EXPECT_FALSE(Access({.keys = {"one"}}).caller("", "", true));
  const Access access({.keys = {"one", "admin:two"}, .trusts_unix_sockets = true});
  EXPECT_FALSE(access.caller("", "", false));
  EXPECT_TRUE(access.caller("", "", true)->admin);
  EXPECT_EQ(access.caller("Bearer one", "", true)->name, "key1");  // who has a key is who it says
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

TEST(Access, LetsNoForeignPageWrite) {
  const Access access({.origins = "localhost, https://a.example"});
  const std::string host = "box.lan:8080";
  for (const char* origin :
       {"", "http://localhost:3000", "https://a.example", "http://box.lan:8080", "http://BOX.lan:8080"})
    EXPECT_TRUE(access.page_may_write(origin, "", host)) << origin;
  for (const char* origin :
       {"https://evil.example", "null", "http://box.lan", "http://box.lan:8080.evil.example", "file://"})
    EXPECT_FALSE(access.page_may_write(origin, "", host)) << origin;
  EXPECT_FALSE(access.page_may_write("", "cross-site", host));
  EXPECT_TRUE(access.page_may_write("", "same-origin", host));
  EXPECT_TRUE(access.page_may_write("https://a.example", "cross-site", host));
  EXPECT_TRUE(Access({.origins = "*"}).page_may_write("https://evil.example", "cross-site", host));
}

TEST(Access, TellsPagesWhatTheyMayDo) {
  using Headers = Access::Headers;
  const std::string page = "http://localhost:3000", stranger = "http://evil.example";
  const Access plain({});
  EXPECT_EQ(plain.origin_headers(page), (Headers{{"Access-Control-Allow-Origin", page}, {"Vary", "Origin"}}));
  EXPECT_EQ(plain.origin_headers(stranger), (Headers{{"Vary", "Origin"}}));
  EXPECT_EQ(plain.origin_headers(""), Headers{});
  EXPECT_EQ(plain.preflight_headers(page, "x-a, x-b"),
            (Headers{{"Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS"},
                     {"Access-Control-Allow-Headers", "x-a, x-b"},
                     {"Access-Control-Max-Age", "600"}}));
  EXPECT_EQ(plain.preflight_headers(stranger, "x-a"), Headers{});

  const Access set({.methods = "GET", .headers = "Authorization", .credentials = true});
  EXPECT_EQ(set.origin_headers(page), (Headers{{"Access-Control-Allow-Origin", page},
                                               {"Access-Control-Allow-Credentials", "true"},
                                               {"Vary", "Origin"}}));
  EXPECT_EQ(set.origin_headers(stranger), (Headers{{"Vary", "Origin"}}));
  EXPECT_EQ(set.preflight_headers(page, "x-a"), (Headers{{"Access-Control-Allow-Methods", "GET"},
                                                         {"Access-Control-Allow-Headers", "Authorization"},
                                                         {"Access-Control-Max-Age", "600"}}));
  // Anybody's page must not use what a browser knows of its user.
  EXPECT_EQ(Access({.origins = "*", .credentials = true}).origin_headers(stranger),
            (Headers{{"Access-Control-Allow-Origin", "*"}, {"Vary", "Origin"}}));
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
