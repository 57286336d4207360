// Special tokens are read in what the template writes and never in what the user wrote: a message cannot
// forge a role marker, and may talk about <think>.
#include "chat/prompt_renderer.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "base/json_limits.h"
#include "tokenizer/chat_template.h"

namespace thermo {
namespace {

// Jinja text; empty for ChatML, which ChatTemplate falls back to.
std::string template_source(const Tokenizer& tokenizer, const TemplateOptions& options) {
  if (options.source) return *options.source;
  if (tokenizer.vocab().chat_template().empty() && !tokenizer.vocab().find_special("<|im_start|>"))
    throw ConfigError("the model file has no chat template: give one, or continue a text without one",
                      Remedy::ChatTemplate);
  return tokenizer.vocab().chat_template();
}

ChatTemplate make_template(const Tokenizer& tokenizer, const TemplateOptions& options) {
  const Vocab& vocab = tokenizer.vocab();
  const auto text_of = [&vocab](std::optional<int32_t> id) {
    return id ? std::string(vocab.token_text(*id)) : std::string();
  };
  try {
    return ChatTemplate(template_source(tokenizer, options), text_of(vocab.bos()), text_of(vocab.eos()));
  } catch (const LoadError& error) {
    // The user's template is no fault of the model.
    const std::string message = error.what();
    if (options.source)
      throw ConfigError(
          "the chat template that was given cannot be used, " + message.substr(message.find(": ") + 2),
          Remedy::ChatTemplate);
    throw;
  }
}

// Takes the switch for reasoning out of the names for the template. That is the more specific place for it,
// so it wins.
std::optional<bool> take_thinking(Json& kwargs, std::optional<bool> otherwise) {
  if (!kwargs.is_object())
    throw ConfigError("the names for the chat template are no JSON object: write {\"name\": value}");
  const auto found = kwargs.find("enable_thinking");
  if (found == kwargs.end()) return otherwise;
  if (!found->is_boolean())
    throw ConfigError(
        "the names for the chat template: enable_thinking is neither true nor false; write one of them");
  const bool thinking = found->get<bool>();
  kwargs.erase(found);
  return thinking;
}

Json message_of(const Turn& turn) {
  Json message = {{"role", turn.role}, {"content", turn.content}};
  if (!turn.reasoning.empty()) message["reasoning_content"] = turn.reasoning;
  if (!turn.tool_call_id.empty()) message["tool_call_id"] = turn.tool_call_id;
  for (const ToolCall& call : turn.tool_calls) {
    // Arguments that are no object, or too large a one, are shown as they are.
    Json arguments;
    if (beyond_limits(call.arguments).empty()) arguments = Json::parse(call.arguments, nullptr, false);
    if (!arguments.is_object()) arguments = Json{{"arguments", call.arguments}};
    Json entry;
    if (!call.id.empty()) entry["id"] = call.id;
    entry["type"] = "function";
    entry["function"] = {{"name", call.name}, {"arguments", std::move(arguments)}};
    message["tool_calls"].push_back(std::move(entry));
  }
  return message;
}

Json tool_json(const Tool& tool) {
  Json function = {{"name", tool.name}};
  if (!tool.description.empty()) function["description"] = tool.description;
  if (!tool.parameters.is_null()) function["parameters"] = tool.parameters;
  return {{"type", "function"}, {"function", std::move(function)}};
}

// Whether the prompt ends inside an open <think>: by its token, or by its letters where the vocabulary has
// none.
bool ends_in_reasoning(const Tokenizer& tokenizer, std::span<const int32_t> ids, std::string_view text) {
  const std::optional<int32_t> open = tokenizer.vocab().find_special("<think>");
  const std::optional<int32_t> close = tokenizer.vocab().find_special("</think>");
  if (!open) return text.substr(0, text.find_last_not_of(" \n") + 1).ends_with("<think>");
  for (size_t i = ids.size(); i-- > 0;) {
    if (close && ids[i] == *close) return false;
    if (ids[i] == *open) return true;
  }
  return false;
}

// What stands in a gap while the template is rendered. It must come out once and as it is.
constexpr std::string_view kGapText = "gap", kGapReasoning = "thought", kGapEnd = "of7d1f0b";
std::string gap_text(size_t turn) {
  return fmt::format("{}{}{}", kGapText, turn, kGapEnd);
}
std::string gap_reasoning(size_t turn) {
  return fmt::format("{}{}{}", kGapReasoning, turn, kGapEnd);
}

// Where these stand in a text. All are looked for at once: there may be hundreds, and the text may be long.
class GapPlaces {
 public:
  explicit GapPlaces(std::string_view text) {
    for (size_t end = text.find(kGapEnd); end != std::string_view::npos; end = text.find(kGapEnd, end + 1)) {
      size_t begin = end;
      while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
      for (const std::string_view kind : {kGapText, kGapReasoning})
        if (text.substr(0, begin).ends_with(kind)) {
          const size_t at = begin - kind.size();
          const auto [found, is_first] = places_.try_emplace(text.substr(at, end + kGapEnd.size() - at), at);
          if (!is_first) found->second = std::string_view::npos;
        }
    }
  }

  // The only place; npos: there is none, or several.
  size_t of(const std::string& part) const {
    const auto found = places_.find(part);
    return found == places_.end() ? std::string_view::npos : found->second;
  }

 private:
  std::unordered_map<std::string_view, size_t> places_;
};

// Bytes that the request wrote, in [begin, end).
bool has_untrusted(const ChatPrompt& prompt, size_t begin, size_t end) {
  return std::any_of(prompt.untrusted.begin(), prompt.untrusted.end(), [&](const ByteRange& range) {
    return range.begin < end && range.end > begin && range.begin < range.end;
  });
}

// End tokens that the template wrote, ascending.
std::vector<ByteRange> end_tokens(const ChatPrompt& prompt, const Vocab& vocab) {
  std::vector<ByteRange> places;
  for (const int32_t id : vocab.end_of_generation()) {
    const std::string token(vocab.token_text(id));
    if (token.empty()) continue;
    for (size_t at = prompt.text.find(token); at != std::string::npos; at = prompt.text.find(token, at + 1))
      if (!has_untrusted(prompt, at, at + token.size())) places.push_back({at, at + token.size()});
  }
  std::sort(places.begin(), places.end(),
            [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  return places;
}

// A gap in the text, from the end token before it to the one after it; nullopt: what the request wrote
// elsewhere is in between.
struct TextGap {
  ByteRange range;
  bool keeps_reasoning = false;
};
std::optional<TextGap> find_gap(const ChatPrompt& prompt, const std::vector<ByteRange>& ends,
                                const GapPlaces& places, const TurnGap& gap) {
  const size_t text = places.of(gap_text(gap.turn)), thought = places.of(gap_reasoning(gap.turn));
  if (text == std::string::npos) return std::nullopt;
  const bool keeps = thought != std::string::npos && thought < text;
  const size_t first = keeps ? thought : text, last = text + gap_text(gap.turn).size();
  const auto after =
      std::find_if(ends.begin(), ends.end(), [&](const ByteRange& r) { return r.begin >= last; });
  if (after == ends.begin() || after == ends.end()) return std::nullopt;
  const size_t begin = std::prev(after)->end, end = after->begin;
  if (begin > first || has_untrusted(prompt, begin, first) || has_untrusted(prompt, last, end))
    return std::nullopt;
  return TextGap{{begin, end}, keeps};
}

// The text of the last turn goes on: its end is cut off, and the space that the template puts before that.
void open_last_turn(ChatPrompt& prompt, const Vocab& vocab, const Turn& turn) {
  constexpr const char* kSpace = " \t\r\n";
  const std::vector<ByteRange> ends = end_tokens(prompt, vocab);
  if (ends.empty() || has_untrusted(prompt, ends.back().end, prompt.text.size())) return;
  prompt.text.resize(ends.back().begin);
  if (turn.content.find_first_not_of(kSpace) == std::string::npos) return;
  const auto last = std::find_if(prompt.untrusted.rbegin(), prompt.untrusted.rend(),
                                 [](const ByteRange& range) { return range.begin < range.end; });
  if (last != prompt.untrusted.rend() &&
      prompt.text.find_first_not_of(kSpace, last->end) == std::string::npos)
    prompt.text.resize(last->end);
}

}  // namespace

struct PromptRenderer::Impl {
  const Tokenizer& tokenizer;
  ChatTemplate chat_template;
  Json kwargs;
  std::optional<bool> thinking;
  bool special_in_content;

  ChatPrompt render(std::span<const Turn> turns, const RenderOptions& options) const;
  std::vector<int32_t> encode(const ChatPrompt& prompt, size_t begin, size_t end,
                              const RenderOptions& options) const;
};

PromptRenderer::PromptRenderer(const Tokenizer& tokenizer, const TemplateOptions& options)
    : impl_(new Impl{tokenizer, make_template(tokenizer, options), options.kwargs, std::nullopt,
                     options.special_in_content}) {
  impl_->thinking = take_thinking(impl_->kwargs, options.thinking);
}

PromptRenderer::~PromptRenderer() = default;

const std::string& PromptRenderer::source() const {
  return impl_->chat_template.source();
}

ChatPrompt PromptRenderer::Impl::render(std::span<const Turn> turns, const RenderOptions& options) const {
  ChatTemplateInputs inputs;
  for (const Turn& turn : turns) inputs.messages.push_back(message_of(turn));
  for (const Tool& tool : options.tools) inputs.tools.push_back(tool_json(tool));
  inputs.add_generation_prompt = !options.continues_last_turn;
  Json kwargs_now = options.kwargs;
  inputs.enable_thinking = take_thinking(kwargs_now, options.thinking ? options.thinking : thinking);
  inputs.extra = this->kwargs;
  inputs.extra.update(kwargs_now);
  Result<ChatPrompt> rendered = chat_template.render_prompt(inputs);
  if (!rendered)
    throw rendered.error().code == ErrorCode::Unsupported
        ? ConfigError(fmt::format("{}; give another template, or continue a text without one",
                                  rendered.error().message),
                      Remedy::ChatTemplate)
        : ConfigError(fmt::format("{}; change the messages, or continue a text without a template",
                                  rendered.error().message),
                      Remedy::NoChatTemplate);
  if (options.continues_last_turn) open_last_turn(*rendered, tokenizer.vocab(), turns.back());
  if (special_in_content) rendered->untrusted.clear();
  return std::move(*rendered);
}

// A part that begins and ends at special tokens, or where the text does.
std::vector<int32_t> PromptRenderer::Impl::encode(const ChatPrompt& prompt, size_t begin, size_t end,
                                                  const RenderOptions& options) const {
  std::vector<ByteRange> untrusted;
  for (const ByteRange& range : prompt.untrusted)
    if (range.begin >= begin && range.end <= end)
      untrusted.push_back({range.begin - begin, range.end - begin});
  return tokenizer.encode_segments(std::string_view(prompt.text).substr(begin, end - begin), untrusted,
                                   {.look = options.look});
}

namespace {

std::vector<PromptSegment> segments_of(const ChatPrompt& prompt, size_t begin, size_t end) {
  const std::string_view text = prompt.text;
  std::vector<PromptSegment> segments;
  for (const ByteRange& range : prompt.untrusted) {
    if (range.end <= begin || range.begin >= end) continue;
    append_segment(segments, text.substr(begin, range.begin - begin), true);
    append_segment(segments, text.substr(range.begin, range.end - range.begin), false);
    begin = range.end;
  }
  append_segment(segments, text.substr(begin, end - begin), true);
  return segments;
}

}  // namespace

void append_segment(std::vector<PromptSegment>& segments, std::string_view text, bool from_template) {
  if (text.empty()) return;
  if (segments.empty() || segments.back().from_template != from_template)
    segments.push_back({"", from_template});
  segments.back().text += text;
}

RenderedPrompt PromptRenderer::render(std::span<const Turn> turns, const RenderOptions& options) const {
  const ChatPrompt rendered = impl_->render(turns, options);
  RenderedPrompt prompt;
  prompt.ids = impl_->encode(rendered, 0, rendered.text.size(), options);
  prompt.in_reasoning = ends_in_reasoning(impl_->tokenizer, prompt.ids, rendered.text);
  if (options.with_segments) prompt.segments = segments_of(rendered, 0, rendered.text.size());
  return prompt;
}

std::optional<GappedPrompt> PromptRenderer::render_with_gaps(std::span<const Turn> turns,
                                                             const RenderOptions& options,
                                                             std::span<const TurnGap> gaps) const {
  std::vector<Turn> marked(turns.begin(), turns.end());
  for (const TurnGap& gap : gaps) {
    marked[gap.turn] = {.role = "assistant", .content = gap_text(gap.turn)};
    if (gap.has_reasoning) marked[gap.turn].reasoning = gap_reasoning(gap.turn);
  }
  ChatPrompt rendered;
  try {
    rendered = impl_->render(marked, options);
  } catch (const ConfigError&) {
    return std::nullopt;  // it misses what was taken out
  }
  const std::vector<ByteRange> ends = end_tokens(rendered, impl_->tokenizer.vocab());
  const GapPlaces places(rendered.text);
  GappedPrompt prompt;
  size_t begin = 0;
  const auto add_piece = [&](size_t end) {
    prompt.pieces.push_back(impl_->encode(rendered, begin, end, options));
    if (options.with_segments) prompt.segments.push_back(segments_of(rendered, begin, end));
  };
  for (const TurnGap& gap : gaps) {
    const std::optional<TextGap> found = find_gap(rendered, ends, places, gap);
    if (!found || found->range.begin < begin) return std::nullopt;
    add_piece(found->range.begin);
    prompt.keeps_reasoning.push_back(found->keeps_reasoning);
    begin = found->range.end;
  }
  add_piece(rendered.text.size());
  prompt.in_reasoning = ends_in_reasoning(impl_->tokenizer, prompt.pieces.back(), rendered.text);
  return prompt;
}

}  // namespace thermo
