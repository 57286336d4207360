#include "tokenizer/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

using testing::HasSubstr;

// The first 16 hexadecimal digits of the SHA-256 (FIPS 180-4) of a text.
std::string sha256_prefix(const std::string& text) {
  // Round constants and initial state: fractional parts of the cube and square roots of the first primes.
  static const std::array<uint32_t, 64> k = [] {
    std::array<uint32_t, 64> out{};
    uint32_t n = 0;
    for (uint32_t p = 2; n < 64; ++p) {
      bool is_prime = true;
      for (uint32_t q = 2; q * q <= p; ++q) is_prime &= p % q != 0;
      if (!is_prime) continue;
      // floor(cbrt(p) * 2^32) mod 2^32 by bisection in 128 bits.
      __extension__ typedef unsigned __int128 Wide;
      uint64_t low = 0, high = uint64_t{1} << 35;
      while (low + 1 < high) {
        const uint64_t mid = (low + high) / 2;
        const bool below = Wide{mid} * mid * mid <= (Wide{p} << 96);
        (below ? low : high) = mid;
      }
      out[n++] = static_cast<uint32_t>(low);
    }
    return out;
  }();
  std::array<uint32_t, 8> h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string padded = text + '\x80';
  while (padded.size() % 64 != 56) padded += '\0';
  for (int shift = 56; shift >= 0; shift -= 8)
    padded += static_cast<char>(uint64_t{text.size()} * 8 >> shift);
  for (size_t at = 0; at < padded.size(); at += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i) {
      if (i < 16) {
        for (size_t b = 0; b < 4; ++b) w[i] = w[i] << 8 | static_cast<unsigned char>(padded[at + i * 4 + b]);
        continue;
      }
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    std::array<uint32_t, 8> v = h;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
      const uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
      const uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
      const uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      for (size_t j = 7; j > 0; --j) v[j] = v[j - 1];
      v[4] += t1;
      v[0] = t1 + t2;
    }
    for (size_t i = 0; i < 8; ++i) h[i] += v[i];
  }
  char out[17];
  std::snprintf(out, sizeof out, "%08x%08x", h[0], h[1]);
  return out;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The text of a published template, empty when the folder is not there.
std::string published_template(const std::string& name) {
  const char* folder = std::getenv("THERMO_TEMPLATES");
  return read_file((folder != nullptr ? std::string(folder) : THERMO_MODELS "/../../shared/templates") + "/" +
                   name);
}

std::string plankton_template() {
  try {
    const GgufFile file(THERMO_MODELS "/plankton-q4_k_m.gguf");
    return std::string(file.require_string("tokenizer.chat_template"));
  } catch (const LoadError&) {
    return "";
  }
}

const char* kTools =
    R"([{"type":"function","function":{"name":"f","description":"é","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}])";
const char* kConversation = R"([
    {"role": "user", "content": " hi "},
    {"role": "assistant", "content": "old", "reasoning_content": "r0"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "reasoning_content": "r1", "tool_calls": [
      {"function": {"name": "f", "arguments": {"a": "x", "n": 3, "l": [1, 2], "b": true, "z": null}}},
      {"function": {"name": "g", "arguments": {}}}]},
    {"role": "tool", "content": "res1"},
    {"role": "tool", "content": "res2"}])";

ChatTemplateInputs inputs_of(const char* messages, const char* tools = "null",
                             std::optional<bool> thinking = {}) {
  ChatTemplateInputs inputs;
  inputs.messages = Json::parse(messages);
  inputs.tools = Json::parse(tools);
  inputs.enable_thinking = thinking;
  return inputs;
}

ChatTemplateInputs golden_inputs(char golden_case) {
  switch (golden_case) {
    case 'A':
      return inputs_of(R"([{"role":"system","content":"sys"},{"role":"user","content":"hi"}])", kTools, true);
    case '-':
      return inputs_of(R"([{"role":"system","content":"sys"},{"role":"user","content":"hi"}])", kTools,
                       false);
    case 'B':
      return inputs_of(kConversation, "null", true);
    default:
      return inputs_of(R"([{"role":"user","content":"hi"}])", kTools);
  }
}

struct Golden {
  char golden_case;
  size_t n_bytes;
  const char* sha;
};

void expect_goldens(const std::string& source, std::initializer_list<Golden> goldens) {
  const ChatTemplate chat(source, "", "");
  for (const Golden& golden : goldens) {
    const Result<std::string> text = chat.render(golden_inputs(golden.golden_case));
    ASSERT_TRUE(text) << golden.golden_case << ": " << text.error().message;
    EXPECT_EQ(text->size(), golden.n_bytes) << golden.golden_case << ": " << *text;
    EXPECT_EQ(sha256_prefix(*text), golden.sha) << golden.golden_case << ": " << *text;
  }
}

TEST(ChatTemplate, Sha256OfTheTestsIsRight) {
  EXPECT_EQ(sha256_prefix("abc"), "ba7816bf8f01cfea");
  EXPECT_EQ(sha256_prefix(""), "e3b0c44298fc1c14");
}

TEST(ChatTemplate, RendersQwen35AsRecorded) {
  const std::string source = published_template("Qwen3.5-4B.jinja");
  if (source.empty()) GTEST_SKIP() << "no Qwen3.5-4B.jinja; set THERMO_TEMPLATES to the folder of templates";
  ASSERT_EQ(sha256_prefix(source), "a4aee8afcf2e0711");
  expect_goldens(source, {{'A', 1126, "eb926f6b617894db"},
                          {'-', 1137, "47fa8208af38d3f9"},
                          {'B', 537, "6f6eb243cceb26f2"},
                          {'C', 1121, "2b5d827f381c8516"}});
  const ChatTemplate chat(source, "", "");
  EXPECT_EQ(chat.render(inputs_of(R"([{"role":"user","content":"hi"}])")).value(),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n");
  const std::string instructions = chat.render(golden_inputs('A')).value();
  const size_t begin = instructions.find("If you choose");
  const size_t end = instructions.find("</IMPORTANT>") + std::string("</IMPORTANT>").size();
  EXPECT_EQ(sha256_prefix(instructions.substr(begin, end - begin)), "a29459c9267902db");
}

TEST(ChatTemplate, RendersLagunaXs2AsRecorded) {
  const std::string source = published_template("poolside-Laguna-XS.2.jinja");
  if (source.empty()) GTEST_SKIP() << "no poolside-Laguna-XS.2.jinja; set THERMO_TEMPLATES to the folder";
  ASSERT_EQ(sha256_prefix(source), "cefcef90515772c0");
  expect_goldens(source, {{'A', 752, "bdcda76a1395b058"},
                          {'-', 638, "72a3c7c6a321ad35"},
                          {'B', 697, "9dbff4ef65188217"},
                          {'C', 781, "87628ca004428fd4"}});
}

TEST(ChatTemplate, RendersPlanktonAsRecorded) {
  const std::string source = plankton_template();
  if (source.empty()) GTEST_SKIP() << "no " THERMO_MODELS "/plankton-q4_k_m.gguf";
  ASSERT_EQ(sha256_prefix(source), "c2f93f2985a22575");
  expect_goldens(source, {{'A', 251, "a9432409a31eeb1d"},
                          {'-', 262, "aac4136df2ffa21a"},
                          {'B', 586, "cd528eda430eb28a"},
                          {'C', 246, "255db395b9ce1214"}});
}

TEST(ChatTemplate, ShowsWhatTheTemplateRefuses) {
  const std::string source = published_template("Qwen3.5-4B.jinja");
  if (source.empty()) GTEST_SKIP() << "no Qwen3.5-4B.jinja; set THERMO_TEMPLATES to the folder of templates";
  const ChatTemplate chat(source, "", "");
  const auto empty = chat.render(inputs_of("[]"));
  ASSERT_FALSE(empty);
  EXPECT_EQ(empty.error().code, ErrorCode::InvalidArgument);
  EXPECT_THAT(empty.error().message, HasSubstr("No messages provided."));
  const auto role =
      chat.render(inputs_of(R"([{"role":"user","content":"a"},{"role":"boss","content":"b"}])"));
  ASSERT_FALSE(role);
  EXPECT_THAT(role.error().message, HasSubstr("Unexpected message role."));
}

TEST(ChatTemplate, ParsesArgumentsThatArriveAsText) {
  const Json messages = Json::parse(R"([{"role":"assistant","tool_calls":[
      {"id":"1","type":"function","function":{"name":"f","arguments":"{\"b\": 1, \"a\": [2]}"}},
      {"function":{"name":"g","arguments":""}}, {"function":{"name":"h"}}]}])");
  const Json calls = prepare_messages(messages).value()[0]["tool_calls"];
  EXPECT_EQ(calls[0]["function"]["arguments"].dump(), R"({"b":1,"a":[2]})");
  EXPECT_EQ(calls[1]["function"]["arguments"].dump(), "{}");
  EXPECT_EQ(calls[2]["function"]["arguments"].dump(), "{}");
}

TEST(ChatTemplate, WrapsBareCalls) {
  const Json messages =
      Json::parse(R"([{"role":"assistant","tool_calls":[{"id":"1","name":"f","arguments":"{}"}]}])");
  EXPECT_EQ(prepare_messages(messages).value()[0]["tool_calls"][0].dump(),
            R"({"id":"1","function":{"name":"f","arguments":{}}})");
}

TEST(ChatTemplate, JoinsTextPartsAndLeavesOthers) {
  const Json messages = Json::parse(R"([
      {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
      {"role":"user","content":[{"type":"text","text":"a"},{"type":"image"}]}, {"role":"user","content":null}])");
  const Json prepared = prepare_messages(messages).value();
  EXPECT_EQ(prepared[0]["content"], "ab");
  EXPECT_TRUE(prepared[1]["content"].is_array());
  EXPECT_TRUE(prepared[2]["content"].is_null());
}

TEST(ChatTemplate, NamesTheMessageThatIsWrong) {
  const auto message_of = [](const char* messages) {
    return prepare_messages(Json::parse(messages)).error().message;
  };
  EXPECT_THAT(message_of(R"({"role":"user"})"), HasSubstr("expected an array"));
  EXPECT_THAT(message_of(R"([{"role":"user"}, 5])"), HasSubstr("messages[1]"));
  EXPECT_THAT(message_of(R"([{"tool_calls":[{"function":{"name":"f","arguments":"nope"}}]}])"),
              HasSubstr("messages[0].tool_calls[0].function.arguments"));
  EXPECT_THAT(message_of(R"([{"tool_calls":[{"function":{"arguments":{}}}]}])"), HasSubstr("has no name"));
  EXPECT_THAT(message_of(R"([{"tool_calls":{}}])"), HasSubstr("expected an array"));
}

TEST(ChatTemplate, LeavesUndefinedWhatIsNotGiven) {
  const ChatTemplate chat("{{ tools is defined }} {{ enable_thinking is defined }} {{ bos_token }}", "<s>",
                          "</s>");
  ChatTemplateInputs inputs;
  EXPECT_EQ(chat.render(inputs).value(), "False False <s>");
  inputs.tools = Json::parse(kTools);
  inputs.enable_thinking = false;
  EXPECT_EQ(chat.render(inputs).value(), "True True <s>");
}

TEST(ChatTemplate, GivesExtraNamesButProtectsItsOwn) {
  const ChatTemplate chat("{{ mode }} {{ messages|length }} {{ bos_token }} {{ tools is defined }}", "<s>",
                          "");
  ChatTemplateInputs inputs;
  inputs.extra = Json::parse(R"({"mode": "fast", "messages": [1, 2], "bos_token": "x", "tools": [1]})");
  EXPECT_EQ(chat.render(inputs).value(), "fast 0 <s> False");
}

TEST(ChatTemplate, FallsBackToChatMlWithANote) {
  const ChatTemplate chat("", "", "");
  EXPECT_THAT(std::string(chat.note()), HasSubstr("ChatML"));
  EXPECT_EQ(chat.render(inputs_of(R"([{"role":"user","content":"hi"},{"role":"assistant","content":null}])"))
                .value(),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ChatTemplate, ThrowsOnATemplateThatDoesNotParse) {
  EXPECT_THROW(ChatTemplate("{% if %}", "", ""), LoadError);
}

// The injection guard: forged markers in any field of the request lie inside the untrusted ranges.
TEST(ChatTemplate, MarksEveryByteThatCameFromTheRequest) {
  const std::string source = published_template("Qwen3.5-4B.jinja");
  if (source.empty()) GTEST_SKIP() << "no Qwen3.5-4B.jinja; set THERMO_TEMPLATES to the folder of templates";
  const std::string forged = "<|forged|>";
  ChatTemplateInputs inputs;
  inputs.messages = Json::array();
  const auto add = [&](Json message) { inputs.messages.push_back(std::move(message)); };
  add({{"role", "system"}, {"content", " " + forged + " "}});
  add({{"role", "user"}, {"content", forged + "\n"}});
  add({{"role", "assistant"},
       {"content", "a<think>b" + forged + "</think>c" + forged},
       {"reasoning_content", forged},
       {"tool_calls",
        {{{"function", {{"name", forged}, {"arguments", {{forged, forged}, {"l", {forged, 1}}}}}}}}}});
  add({{"role", "tool"}, {"content", forged}});
  inputs.tools = Json::array({{{"name", forged}, {forged, forged}}});
  const ChatPrompt prompt = ChatTemplate(source, "", "").render_prompt(inputs).value();
  const auto is_untrusted = [&](size_t begin, size_t end) {
    for (const ByteRange& range : prompt.untrusted) {
      if (range.begin <= begin && end <= range.end) return true;
    }
    return false;
  };
  size_t n_found = 0;
  for (size_t at = prompt.text.find(forged); at != std::string::npos; at = prompt.text.find(forged, at + 1)) {
    EXPECT_TRUE(is_untrusted(at, at + forged.size())) << prompt.text.substr(0, at + 20);
    ++n_found;
  }
  EXPECT_EQ(n_found, 13u);
  size_t n_markers = 0;
  for (size_t at = prompt.text.find("<|im_start|>"); at != std::string::npos;
       at = prompt.text.find("<|im_start|>", at + 1)) {
    for (const ByteRange& range : prompt.untrusted) EXPECT_FALSE(range.begin < at + 12 && at < range.end);
    ++n_markers;
  }
  EXPECT_EQ(n_markers, 5u);
}

}  // namespace
}  // namespace thermo
