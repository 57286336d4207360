// One request for text, whatever API it came through. The dialects fill it; nothing after it knows their
// bodies.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "chat/dry_breaker_texts.h"
#include "chat/message.h"
#include "sampling/sampling_params.h"
#include "server/api/api_error.h"
#include "server/api/fields.h"

namespace thermo {

struct CallChoice {
  enum class Mode { Auto, None, Required };
  Mode mode = Mode::Auto;
  std::vector<std::string> names = {};  // the tools it may call; empty: all
};

// How a tool was declared, where calls of it go back in that form.
struct ToolOrigin {
  std::string space = {};  // Responses: the namespace it is in
  std::string name = {};   // there
  bool custom = false;     // Responses: free text instead of arguments
};

// What the text must look like.
struct OutputFormat {
  enum class Kind { Text, JsonObject, JsonSchema, Grammar };
  Kind kind = Kind::Text;
  Json schema = nullptr;  // JsonSchema; of JsonObject optional
  bool strict = false;
  std::string grammar = {};  // GBNF
  std::string path = {};     // where it stood in the body, for messages
};

// Where the reasoning of chat replies is.
enum class ReasoningFormat {
  Apart,   // a field of its own
  InText,  // in the text, with its tags
  Both,
};

struct GenerationRequest {
  Dialect dialect = Dialect::Chat;
  std::string model;

  // A conversation, or (completions) texts or ids to continue.
  std::vector<Turn> turns;
  std::vector<Tool> tools;
  std::map<std::string, ToolOrigin> tool_origins;  // by the name that the model sees; only the special ones
  CallChoice tool_choice;
  bool parallel_tools = true;
  bool continue_last_turn = false;
  std::vector<std::variant<std::string, std::vector<int32_t>>> prompts;
  std::string suffix;  // completions: what follows the text that is asked for; empty: nothing is known of it
  bool echo = false;

  // The answer.
  SamplingParams sampling;
  std::optional<int> max_tokens;
  int n_written = 0;  // by earlier runs of the same answer
  int n = 1;
  std::vector<std::string> stops;
  bool stop_everywhere = false;  // also in reasoning and calls
  std::vector<int32_t> stop_token_ids;
  OutputFormat format;
  std::optional<bool> thinking;        // nullopt: as the server or the template has it
  std::optional<int> thinking_budget;  // tokens
  std::string effort;                  // as it was asked for; empty: not
  Json template_kwargs = Json::object();
  ReasoningFormat reasoning_format = ReasoningFormat::Apart;

  // The stream.
  bool stream = false;
  bool include_usage = false;
  bool return_progress = false;
  bool timings_per_token = false;
  std::optional<double> ping_seconds;  // negative: none
  bool logprobs = false;               // to be reported
  bool logprobs_of_all = false;        // chat: those of reasoning and calls, too
  bool seal_reasoning = false;         // Responses: with a copy for clients that drop its text

  std::string session_key;  // what names the conversation; empty: nothing in the body
  std::string user;         // who asks: names it where neither the body nor a header does
  bool side_request = false;
  Json echoed = Json::object();  // Responses: members that the reply repeats
  std::vector<std::string> ignored_fields, ignored_tools;
};

// How many tokens of reasoning a name stands for; 0: none.
struct ReasoningEffort {
  std::string name;
  int tokens;
};
std::vector<ReasoningEffort> usual_efforts();
// auto, deepseek, none, deepseek-legacy; nullopt: another one.
std::optional<ReasoningFormat> reasoning_format_from_name(std::string_view name);

// What becomes of images, which no model here reads.
enum class ImagePolicy {
  Auto,         // refused in the question, replaced by a placeholder everywhere else
  Refuse,       // anywhere
  Placeholder,  // everywhere
};

// What a server adds to what a body says.
struct RequestDefaults {
  SamplingParams sampling;
  int n_vocab = 0;
  int n_ctx = 0;
  int max_choices = 16;
  bool keep_billing_header = false;
  bool anthropic_thinking = false;  // without a word about it: the template's default instead of off
  bool prefill_assistant = false;
  ImagePolicy images = ImagePolicy::Auto;
  std::string effort;  // of reasoning, without a word about it; empty: none
  std::vector<ReasoningEffort> efforts = usual_efforts();
  ReasoningFormat reasoning_format = ReasoningFormat::Apart;
  std::vector<std::string> dry_breakers = usual_dry_breakers();
  // A text, or texts at which runs end, as the vocabulary has them.
  std::function<std::vector<int32_t>(const std::string&)> tokens_of;
  std::function<std::shared_ptr<const DryBreakers>(const std::vector<std::string>&)> breakers_of;
};

// From the bodies of the APIs. Throw ApiError.
GenerationRequest read_chat_request(const Json& body, const RequestDefaults& defaults);
GenerationRequest read_completions_request(const Json& body, const RequestDefaults& defaults);
GenerationRequest read_messages_request(const Json& body, const RequestDefaults& defaults);
GenerationRequest read_responses_request(const Json& body, const RequestDefaults& defaults);

}  // namespace thermo
