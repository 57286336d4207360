#include "server/stdio/pipe_message.h"

#include <gtest/gtest.h>

#include "server/api/reply_writer.h"

namespace thermo {
namespace {

TEST(PipeMessage, ReadsEachOperation) {
  const PipeCommand start =
      parse_command(R"({"op":"start","id":"a/1","api":"messages","body":{"max_tokens":5,"stream":false}})");
  EXPECT_EQ(start.op, PipeCommand::Op::Start);
  EXPECT_EQ(start.id, "a/1");
  EXPECT_EQ(start.dialect, Dialect::Messages);
  EXPECT_EQ(Json::parse(start.body), Json({{"max_tokens", 5}, {"stream", true}}));
  const Json chat = Json::parse(parse_command(R"({"op":"start","id":"a","body":{}})").body);
  EXPECT_EQ(chat["stream_options"]["include_usage"], true);
  const PipeCommand more = parse_command(R"({"op":"continue","id":"a","max_tokens":7,"run":3})");
  EXPECT_EQ(more.op, PipeCommand::Op::Continue);
  EXPECT_EQ(more.max_tokens, 7);
  EXPECT_EQ(more.run, 3u);
  EXPECT_EQ(parse_command(R"({"op":"cancel","id":"a"})").op, PipeCommand::Op::Cancel);
  EXPECT_EQ(parse_command(R"({"op":"list"})").id, "");
}

TEST(PipeMessage, RefusesWhatItDoesNotKnow) {
  for (const char* line :
       {"", "x", "[]", "{}", R"({"op":"jump","id":"a"})", R"({"op":"start","id":"a"})",
        R"({"op":"start","body":{}})", R"({"op":"start","id":"a b","body":{}})",
        R"({"op":"start","id":"a","api":"morse","body":{}})", R"({"op":"start","id":"a","body":[]})",
        R"({"op":"continue","id":"a","max_tokens":0})", R"({"op":"cancel","id":"a","run":-1})",
        R"({"op":"cancel","id":"a","body":{}})"})
    EXPECT_THROW(parse_command(line), ApiError) << line;
}

TEST(PipeMessage, CutsLinesWhereverTheyAreSplit) {
  const std::string text = "one\r\n\ntwo\n" + std::string(20, 'x') + "\nthree";
  for (size_t n = 1; n <= text.size(); ++n) {
    LineSplitter splitter(10);
    std::vector<std::string> lines;
    const auto take = [&](const LineSplitter::Line& line) {
      lines.push_back(line.too_long ? "LONG" : line.text);
    };
    for (size_t at = 0; at < text.size(); at += n)
      for (const auto& line : splitter.push(std::string_view(text).substr(at, n))) take(line);
    if (const auto rest = splitter.finish()) take(*rest);
    EXPECT_EQ(lines, (std::vector<std::string>{"one", "two", "LONG", "three"})) << n;
    EXPECT_FALSE(splitter.finish());
  }
}

TEST(PipeMessage, TagsTheEventsOfAStream) {
  const std::string stream = sse_data({{"a", 1}}) + ": ping\n\n" + sse_event("named", {{"b", "\n\""}}) +
                             sse_event("ping", {{"type", "ping"}}) + "data: [DONE]\n\n";
  const std::string lines = pipe_lines_of_stream("i\"d", stream);
  const size_t middle = lines.find('\n');
  EXPECT_EQ(Json::parse(lines.substr(0, middle)),
            Json({{"id", "i\"d"}, {"event", "tokens"}, {"data", {{"a", 1}}}}));
  EXPECT_EQ(Json::parse(lines.substr(middle + 1))["data"]["b"], "\n\"");
  EXPECT_EQ(pipe_line("", "list", {{"x", 1}}), "{\"event\":\"list\",\"x\":1}\n");
}

}  // namespace
}  // namespace thermo
