// From the turns of a conversation to the ids of a prompt, through the model's chat template.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "chat/message.h"
#include "tokenizer/bpe.h"

namespace thermo {

struct TemplateOptions {
  std::optional<std::string> source = {};  // Jinja text instead of the model's own; empty text: ChatML
  Json kwargs = Json::object();            // more names for the template
  std::optional<bool> thinking = {};       // reason first; nullopt: the template's default
  bool special_in_content = false;         // special tokens are read in what requests say, too
};

struct RenderOptions {
  std::span<const Tool> tools = {};
  std::optional<bool> thinking = {};            // wins over TemplateOptions
  Json kwargs = Json::object();                 // these, too
  bool continues_last_turn = false;             // instead of a new answer: nothing stands after its text
  bool with_segments = false;                   // tell who wrote what
  const std::function<void()>* look = nullptr;  // see EncodeOptions
};

// A part of the prompt's text. Special tokens are read only in what the template wrote.
struct PromptSegment {
  std::string text;
  bool from_template = false;  // and not from the request
};

struct RenderedPrompt {
  std::vector<int32_t> ids;
  bool in_reasoning = false;                 // the answer begins inside an open <think>
  std::vector<PromptSegment> segments = {};  // where they were asked for
};

// An answer among the turns whose tokens are known.
struct TurnGap {
  size_t turn = 0;
  bool has_reasoning = false;
};

// A prompt without some of its answers. Each gap goes from the end token of the turn before to that of the
// answer.
struct GappedPrompt {
  std::vector<std::vector<int32_t>> pieces;  // before, between and after the gaps
  std::vector<bool> keeps_reasoning;         // of each gap: the template shows reasoning there
  bool in_reasoning = false;
  std::vector<std::vector<PromptSegment>> segments = {};  // of the pieces, where they were asked for
};

// Neighbours of one writer become one segment.
void append_segment(std::vector<PromptSegment>& segments, std::string_view text, bool from_template);

// Immutable: any thread may render.
class PromptRenderer {
 public:
  // `tokenizer` outlives this. Throws ConfigError: no template, one that is broken, kwargs that are no JSON
  // object.
  PromptRenderer(const Tokenizer& tokenizer, const TemplateOptions& options);
  ~PromptRenderer();

  // The prompt for the next answer. Throws ConfigError with the template's own message when it refuses the
  // turns.
  RenderedPrompt render(std::span<const Turn> turns, const RenderOptions& options = {}) const;
  // The same with gaps. nullopt: the template writes more there than the answer, or it cannot be told.
  std::optional<GappedPrompt> render_with_gaps(std::span<const Turn> turns, const RenderOptions& options,
                                               std::span<const TurnGap> gaps) const;
  const std::string& source() const;  // Jinja

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
