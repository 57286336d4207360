#include "chat/tool_grammar.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "grammar/grammar_matcher.h"

namespace thermo {
namespace {

// Whether a whole text is one of the grammar.
bool takes(const SchemaGrammar& calls, const std::string& text) {
  GrammarMatcher matcher(std::make_shared<TokenMachine>(calls.grammar, nullptr));
  return matcher.accept_text(text) && matcher.can_end();
}

std::string call_of(const std::string& name, const std::vector<std::string>& keys) {
  std::string text = fmt::format("<tool_call>\n<function={}>\n", name);
  for (const std::string& key : keys)
    text += fmt::format("<parameter={}>\n{}\n</parameter>\n", key, key == "n" ? "7" : "a text");
  return text + "</function>\n</tool_call>";
}

// Each with six parameters that are required, and six that are not.
std::vector<Tool> many_tools(size_t n) {
  Json properties = Json::object();
  for (const char* key : {"a", "b", "c", "d", "e", "n", "o", "p", "q", "r", "s", "t"})
    properties[key] = {{"type", *key == 'n' ? "integer" : "string"}};
  const Json parameters = {{"type", "object"},
                           {"properties", std::move(properties)},
                           {"required", Json::array({"a", "b", "c", "d", "e", "n"})}};
  std::vector<Tool> tools;
  for (size_t i = 0; i < n; ++i)
    tools.push_back({.name = fmt::format("tool_{}", i), .parameters = parameters});
  return tools;
}

// An agent with many servers of tools got 400: the orders of their parameters alone made too large a grammar.
TEST(ToolGrammar, TakesHundredsOfTools) {
  const Result<SchemaGrammar> few = compile_tool_calls(many_tools(20), {});
  ASSERT_TRUE(few) << few.error().message;
  EXPECT_TRUE(takes(*few, call_of("tool_3", {"n", "q", "e", "d", "c", "b", "a"})));  // in any order

  const Result<SchemaGrammar> many = compile_tool_calls(many_tools(200), {});
  ASSERT_TRUE(many) << many.error().message;
  EXPECT_TRUE(takes(*many, call_of("tool_199", {"a", "b", "q", "c", "d", "e", "n", "o"})));
  EXPECT_FALSE(takes(*many, call_of("tool_199", {"a", "b", "c", "d", "n"})));  // one is missing
  EXPECT_FALSE(takes(*many, call_of("tool_200", {"a", "b", "c", "d", "e", "n"})));
}

}  // namespace
}  // namespace thermo
