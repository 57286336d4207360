// Messages to prompt: runs the Jinja template that came with a model.
//
// The template is the file's own, so the prompt is the one the model was trained on. Requests are first
// brought into the shape that templates expect: string arguments of tool calls become objects, bare calls are
// wrapped in "function", arrays of text parts become one string.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "base/utf8.h"  // ByteRange
#include "jinja/template.h"

namespace thermo {

struct ChatTemplateInputs {
  Json messages = Json::array();  // as in the OpenAI API; "reasoning_content" holds past reasoning
  Json tools;                     // array; null or empty: the template sees no tools
  bool add_generation_prompt = true;
  std::optional<bool> enable_thinking;  // none: the template's own default
  Json extra = Json::object();          // further names for the template; cannot replace those above
};

struct ChatPrompt {
  std::string text;
  // The bytes that came from the request and not from the template, ascending. Special tokens must not be
  // cut out of them: see Tokenizer::encode_segments.
  std::vector<ByteRange> untrusted;
};

// Immutable: any thread may render.
class ChatTemplate {
 public:
  // An empty `source` means a file without a template: then ChatML is used, and note() says so. Throws
  // LoadError when the template cannot be parsed.
  ChatTemplate(std::string source, std::string bos, std::string eos);

  // InvalidArgument: messages of a wrong shape, or what the template itself refuses (its message is shown).
  Result<ChatPrompt> render_prompt(const ChatTemplateInputs& inputs) const;
  Result<std::string> render(const ChatTemplateInputs& inputs) const;

  // What the user should know about the choice of template; empty when there is nothing to say.
  std::string_view note() const noexcept;
  const std::string& source() const noexcept { return source_; }

 private:
  bool is_fallback_;
  std::string source_;
  std::string bos_, eos_;
  jinja::Template template_;
};

// The messages as templates expect them; for tests and for showing what a template was given.
Result<Json> prepare_messages(const Json& messages);

}  // namespace thermo
