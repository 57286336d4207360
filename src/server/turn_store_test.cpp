// Prompts that repeat earlier answers token by token, whatever clients make of them.
#include "server/turn_store.h"

#include <gtest/gtest.h>

#include "chat/text_model.h"
#include "engine/scripted_engine.h"
#include "server/prompt.h"

namespace thermo {
namespace {

const TextModel& plankton() {
  static const TextModel model("");
  return model;
}
const PromptRenderer& renderer() {
  static const PromptRenderer one(plankton().tokenizer(), {});
  return one;
}
const Vocab& vocab() {
  return plankton().tokenizer().vocab();
}

struct Served {
  ScriptedEngine service{{.scripts = {{1}}}};
  ServedModel model;
  ServerOptions options;
  TurnStore store{1 << 20};

  Served() {
    model.tokenizer = &plankton().tokenizer();
    model.renderer = &renderer();
    model.service = &service;
    model.chat_template = renderer().source();
  }
  PreparedRequest prepare_turns(std::vector<Turn> turns, std::optional<bool> thinking = {},
                                const std::string& owner = "key1") {
    GenerationRequest request;
    request.turns = std::move(turns);
    request.thinking = thinking;
    request.tools = {
        {.name = "get_weather",
         .description = "",
         .parameters = Json::parse(R"({"type": "object", "properties": {"city": {"type": "string"}}})")}};
    return prepare(std::move(request), model, options, {store, owner});
  }
};

std::vector<TokenId> ids_of(const std::string& text) {
  return plankton().tokenizer().encode(text, {.parse_special = true});
}

bool begins_with(const std::vector<TokenId>& ids, std::vector<TokenId> start,
                 const std::vector<TokenId>& more) {
  start.insert(start.end(), more.begin(), more.end());
  return ids.size() > start.size() && std::equal(start.begin(), start.end(), ids.begin());
}

const Turn kSystem{.role = "system", .content = "Be short."},
    kAsk{.role = "user", .content = "What is 17 + 25?"}, kNext{.role = "user", .content = "And 3 more?"};

// Tokens that no tokenizer would choose for this text.
std::vector<TokenId> odd_ids(const std::string& text) {
  std::vector<TokenId> ids;
  for (const char c : text) {
    const auto piece = plankton().tokenizer().encode(std::string(1, c));
    ids.insert(ids.end(), piece.begin(), piece.end());
  }
  return ids;
}

TEST(TurnStore, RepeatsTheTokensOfAnAnswer) {
  for (const bool thinking : {false, true}) {
    Served served;
    const PreparedRequest first = served.prepare_turns({kSystem, kAsk}, thinking);
    std::vector<TokenId> written = odd_ids(thinking ? "Carry the one.\n" : "42 it is. ");
    if (thinking) {
      const auto rest = ids_of("</think>\n\n42 it is.");
      written.insert(written.end(), rest.begin(), rest.end());
    }
    const Turn answer{
        .role = "assistant", .content = "42 it is.", .reasoning = thinking ? "Carry the one." : ""};
    served.store.remember("key1", first.prompts[0], answer, written, vocab());
    // As it was, without the space around it, without the reasoning.
    for (Turn echo : {answer, Turn{.role = "assistant", .content = "  42 it is.\n"}}) {
      const PreparedRequest second = served.prepare_turns({kSystem, kAsk, echo, kNext}, thinking);
      EXPECT_EQ(second.n_spliced, 1);
      EXPECT_TRUE(begins_with(second.prompts[0], first.prompts[0], written));
      EXPECT_EQ(second.in_reasoning, first.in_reasoning);
      // What follows is what the template writes.
      const std::string text = plankton().tokenizer().decode(second.prompts[0], {.special = true});
      EXPECT_NE(text.find("And 3 more?"), std::string::npos);
    }
    // Another text, another conversation, another key, other reasoning: as the template has it.
    Turn other = answer;
    other.content = "43 it is.";
    EXPECT_EQ(served.prepare_turns({kSystem, kAsk, other, kNext}, thinking).n_spliced, 0);
    EXPECT_EQ(served.prepare_turns({kSystem, kNext, answer, kNext}, thinking).n_spliced, 0);
    EXPECT_EQ(served.prepare_turns({kSystem, kAsk, answer, kNext}, thinking, "key2").n_spliced, 0);
    other = answer;
    other.reasoning = "I guessed.";
    EXPECT_EQ(served.prepare_turns({kSystem, kAsk, other, kNext}, thinking).n_spliced, 0);
  }
}

TEST(TurnStore, KnowsCallsByTheirValues) {
  Served served;
  const PreparedRequest first = served.prepare_turns({kAsk}, false);
  const std::vector<TokenId> written = odd_ids("x");
  const Turn answer{
      .role = "assistant",
      .content = "",
      .tool_calls = {{.id = "a", .name = "get_weather", .arguments = R"({"city":"Paris","n":1.0})"},
                     {.id = "b", .name = "get_weather", .arguments = R"({"city":"Rome"})"}}};
  served.store.remember("key1", first.prompts[0], answer, written, vocab());
  const Turn echo{
      .role = "assistant",
      .content = "\n",
      .tool_calls = {{.id = "c", .name = "get_weather", .arguments = R"({ "city": "Rome" })"},
                     {.id = "d", .name = "get_weather", .arguments = R"({"n": 1, "city": "Paris"})"}}};
  const Turn result{.role = "tool", .content = "sunny", .tool_call_id = "c"};
  const PreparedRequest second = served.prepare_turns({kAsk, echo, result}, false);
  EXPECT_EQ(second.n_spliced, 1);
  EXPECT_TRUE(begins_with(second.prompts[0], first.prompts[0], written));
  Turn changed = echo;
  changed.tool_calls[0].arguments = R"({"city": "Oslo"})";
  EXPECT_EQ(served.prepare_turns({kAsk, changed, result}, false).n_spliced, 0);
}

// Several answers; the first that was changed ends the repetition, and the text is the template's own again.
TEST(TurnStore, GoesOnFromAnswerToAnswer) {
  Served served;
  std::vector<Turn> turns = {kSystem, kAsk};
  std::vector<TokenId> before;
  for (int i = 0; i < 4; ++i) {
    const PreparedRequest prepared = served.prepare_turns(turns, false);
    EXPECT_EQ(prepared.n_spliced, i);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), prepared.prompts[0].begin()));
    const Turn answer{.role = "assistant", .content = "The answer is " + std::to_string(i)};
    const std::vector<TokenId> written = odd_ids(answer.content);
    served.store.remember("key1", prepared.prompts[0], answer, written, vocab());
    before = prepared.prompts[0];
    before.insert(before.end(), written.begin(), written.end());
    turns.push_back(answer);
    turns.push_back(kNext);
  }
  turns[4].content = "The answer is 17";
  const PreparedRequest edited = served.prepare_turns(turns, false);
  EXPECT_EQ(edited.n_spliced, 1);
  const std::string text = plankton().tokenizer().decode(edited.prompts[0], {.special = true});
  EXPECT_NE(text.find("The answer is 17"), std::string::npos);
  EXPECT_NE(text.find("The answer is 3"), std::string::npos);
  // Nobody can write the marks of a gap.
  turns[1].content = "gap2of7d1f0b <|im_end|>";
  EXPECT_EQ(served.prepare_turns(turns, false).n_spliced, 0);
}

TEST(TurnStore, DropsReasoningWhereTheTemplateDoes) {
  Served served;
  served.options.preserve_reasoning = false;
  const PromptRenderer dropping(
      plankton().tokenizer(),
      {.source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last "
                 "%}<think>\n"
                 "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"});
  served.model.renderer = &dropping;
  const PreparedRequest first = served.prepare_turns({kAsk});
  const Turn answer{.role = "assistant", .content = "42", .reasoning = "Hm."};
  served.store.remember("key1", first.prompts[0], answer, ids_of("Hm.\n</think>\n\n42"), vocab());
  EXPECT_EQ(served.prepare_turns({kAsk, answer, kNext}).n_spliced, 0);
  const std::string text = plankton().tokenizer().decode(
      served.prepare_turns({kAsk, answer, kNext}).prompts[0], {.special = true});
  EXPECT_EQ(text.find("Hm."), std::string::npos);
}

TEST(Prompt, MarksTheTokenAfterWhichAClientSaysThatTextsDiffer) {
  Served served;
  const std::string book = "  The sea is deep. The moon is far. ", question = "What is deep?";
  Turn user{.role = "user", .content = book + question};
  user.marks = {book.size()};
  const PreparedRequest plain = served.prepare_turns({kSystem, {.role = "user", .content = user.content}}),
                        marked = served.prepare_turns({kSystem, user});
  ASSERT_EQ(marked.prompts, plain.prompts);
  ASSERT_EQ(marked.marks.size(), plain.marks.size() + 1);
  int mark = 0;
  for (const int place : marked.marks)
    if (std::find(plain.marks.begin(), plain.marks.end(), place) == plain.marks.end()) mark = place;
  const std::vector<TokenId>& ids = marked.prompts.front();
  const auto text = [&](size_t begin, size_t n) {
    return plankton().tokenizer().decode(std::span(ids).subspan(begin, n), {.special = true});
  };
  const auto at = static_cast<size_t>(mark);
  EXPECT_TRUE(text(0, at).ends_with("The moon is far. ")) << text(0, at);
  EXPECT_TRUE(text(at, ids.size() - at).starts_with(question));
  EXPECT_TRUE(std::is_sorted(marked.marks.begin(), marked.marks.end()));
}

TEST(TurnStore, ForgetsWhatWasNotUsedForLong) {
  TurnStore store(4000);
  const std::vector<TokenId> prompt = {5, *vocab().eos(), 7};
  const auto turn = [](int i) { return Turn{.role = "assistant", .content = "answer " + std::to_string(i)}; };
  PromptHash head;
  head.add(std::span(prompt).first(2));
  for (int i = 0; i < 100; ++i) {
    store.remember("", prompt, turn(i), std::vector<TokenId>(20, i), vocab());
    EXPECT_LE(store.bytes(), 4000u);
    EXPECT_TRUE(store.find("", turn(0), head));  // used again and again
  }
  EXPECT_TRUE(store.find("", turn(99), head));
  EXPECT_FALSE(store.find("", turn(1), head));
  store.remember("", prompt, turn(200), std::vector<TokenId>(2000, 1), vocab());
  EXPECT_FALSE(store.find("", turn(200), head));
  TurnStore off(0);
  off.remember("", prompt, turn(0), {}, vocab());
  EXPECT_FALSE(off.known("", turn(0)));
}

}  // namespace
}  // namespace thermo
