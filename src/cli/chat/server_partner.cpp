#include "cli/chat/server_partner.h"

#include <fmt/format.h>

#include "base/error.h"
#include "cli/bench/stream_client.h"
#include "cli/interrupt.h"

namespace thermo {
namespace {

constexpr size_t kMostOfARefusal = 64 * 1024;  // bytes of a reply that is no stream

// The events of a stream of chat chunks become an answer.
class ChunkReader {
 public:
  ChunkReader(Answer& answer, AnswerPrinter& printer) : answer_(answer), printer_(printer) {}

  void take(std::string_view bytes) {
    if (seen_.size() < kMostOfARefusal) seen_ += bytes;
    held_ += bytes;
    for (size_t end = held_.find('\n'); end != std::string::npos; end = held_.find('\n')) {
      std::string line = held_.substr(0, end);
      held_.erase(0, end + 1);
      if (line.ends_with('\r')) line.pop_back();
      if (line.starts_with("data:")) take_event(line.substr(5));
    }
  }
  const std::string& error() const { return error_; }
  bool is_done() const { return !answer_.finish_reason.empty(); }
  // What a reply that is no stream says.
  std::string refusal() const { return refusal_in(seen_); }

 private:
  static std::string text_in(const Json& object, const char* name) {
    const auto found = object.find(name);
    return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
  }
  static double number_in(const Json& object, const char* name) {
    const auto found = object.find(name);
    return found != object.end() && found->is_number() ? found->get<double>() : 0.0;
  }
  static const Json& object_in(const Json& object, const char* name) {
    static const Json kNone = Json::object();
    const auto found = object.find(name);
    return found != object.end() && found->is_object() ? *found : kNone;
  }

  void take_event(const std::string& data) {
    const Json event = Json::parse(data, nullptr, false);
    if (!event.is_object()) return;  // [DONE]
    if (event.contains("error")) error_ = refusal_in(data);
    if (const auto choices = event.find("choices");
        choices != event.end() && choices->is_array() && !choices->empty() && (*choices)[0].is_object()) {
      const Json& choice = (*choices)[0];
      const Json& delta = object_in(choice, "delta");
      std::string thought = text_in(delta, "reasoning_content");
      if (thought.empty()) thought = text_in(delta, "reasoning");
      show(AnswerEvent::Kind::Reasoning, thought, answer_.reasoning);
      show(AnswerEvent::Kind::Content, text_in(delta, "content"), answer_.content);
      if (std::string reason = text_in(choice, "finish_reason"); !reason.empty())
        answer_.finish_reason = std::move(reason);
    }
    AnswerStats& stats = answer_.stats;
    const Json &usage = object_in(event, "usage"), &timings = object_in(event, "timings");
    if (!usage.empty()) {
      stats.n_prompt = static_cast<int>(number_in(usage, "prompt_tokens"));
      stats.n_completion = static_cast<int>(number_in(usage, "completion_tokens"));
      stats.n_cached =
          static_cast<int>(number_in(object_in(usage, "prompt_tokens_details"), "cached_tokens"));
    }
    if (!timings.empty()) {
      stats.prompt_seconds = number_in(timings, "prompt_ms") * 1e-3;
      stats.predicted_seconds = number_in(timings, "predicted_ms") * 1e-3;
    }
  }

  void show(AnswerEvent::Kind kind, const std::string& text, std::string& all) {
    if (text.empty()) return;
    all += text;
    printer_.print({{kind, text}});
  }

  Answer& answer_;
  AnswerPrinter& printer_;
  std::string held_, seen_, error_;
};

Json request_of(const AnswerFlags& flags) {
  check_limits(flags);
  const ConstraintFlags& format = flags.constraint;
  if (!format.grammar.empty() || !format.grammar_file.empty() || !format.json_schema.empty() ||
      !format.json_schema_file.empty() || format.budget_message)
    throw ConfigError("--url: a format of the answer cannot be sent; leave it out");
  const TemplateFlags& templates = flags.chat_template;
  if (!templates.chat_template.empty() || !templates.chat_template_file.empty())
    throw ConfigError("--url: the server has its own chat template; leave yours out");
  const SamplingFlags& sampling = flags.sampling;
  if (!sampling.logit_bias.empty() || !sampling.dry_breakers.empty())
    throw ConfigError("--url: --logit-bias and --dry-sequence-breaker cannot be sent; leave them out");
  Json body = {{"stream", true}, {"stream_options", {{"include_usage", true}}}};
  const auto add = [&body](const char* name, const auto& value) {
    if (value) body[name] = *value;
  };
  add("temperature", sampling.temperature);
  add("top_k", sampling.top_k);
  add("top_p", sampling.top_p);
  add("min_p", sampling.min_p);
  add("repeat_penalty", sampling.repeat_penalty);
  add("repeat_last_n", sampling.repeat_last_n);
  add("presence_penalty", sampling.presence_penalty);
  add("frequency_penalty", sampling.frequency_penalty);
  add("dry_multiplier", sampling.dry_multiplier);
  add("dry_base", sampling.dry_base);
  add("dry_allowed_length", sampling.dry_allowed_length);
  add("dry_penalty_last_n", sampling.dry_penalty_last_n);
  add("seed", sampling.seed);
  if (sampling.ignore_eos) body["ignore_eos"] = true;
  if (flags.max_tokens > 0) body["max_tokens"] = flags.max_tokens;
  if (!flags.stops.empty()) body["stop"] = flags.stops;
  if (templates.reasoning_budget >= 0) body["reasoning_budget_tokens"] = templates.reasoning_budget;
  const TemplateOptions options = template_options(templates);
  if (!options.kwargs.empty()) body["chat_template_kwargs"] = options.kwargs;
  if (options.thinking) body["chat_template_kwargs"]["enable_thinking"] = *options.thinking;
  return body;
}

}  // namespace

ServerPartner::ServerPartner(ServerAddress address, const AnswerFlags& flags, const Terminal& terminal)
    : address_(std::move(address)), terminal_(terminal) {
  address_.url = server_root(address_.url);
  use(flags);
}

void ServerPartner::use(const AnswerFlags& flags) {
  body_ = request_of(flags);
  body_["model"] = address_.model;
}

Answer ServerPartner::answer(const std::string& system, std::vector<Turn>& turns,
                             std::optional<bool> thinking, AnswerPrinter& printer, size_t&) {
  Json body = body_;
  Json& messages = body["messages"] = Json::array();
  if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
  for (const Turn& turn : turns) {
    messages.push_back({{"role", turn.role}, {"content", turn.content}});
    if (!turn.reasoning.empty()) messages.back()["reasoning_content"] = turn.reasoning;
  }
  if (thinking) body["chat_template_kwargs"]["enable_thinking"] = *thinking;
  Answer answer;
  ChunkReader reader(answer, printer);
  int status = 0;
  std::string broken;
  StreamClient client;
  client.start({.url = address_.url + "/v1/chat/completions",
                .key = address_.key,
                .body = body.dump(-1, ' ', false, Json::error_handler_t::replace),
                .on_bytes = [&reader](std::string_view bytes) { reader.take(bytes); },
                .on_end =
                    [&](int code, const std::string& error) {
                      status = code;
                      broken = error;
                    }});
  answer.interrupted = !client.run([] { return InterruptScope::interrupted(); });
  printer.finish();
  if (answer.interrupted) return answer;
  if (status == 0)
    throw NoAnswer{fmt::format("{} cannot be reached: {}; is a server there?", address_.url, broken)};
  if (status != 200) {
    const std::string why = reader.refusal();
    throw NoAnswer{fmt::format("{} answered {}: {}", address_.url, status,
                               why.empty()     ? "no reason was given"
                               : status == 401 ? why + " (--api-key)"
                                               : why)};
  }
  if (!reader.error().empty()) throw NoAnswer{fmt::format("the server: {}", reader.error())};
  if (!reader.is_done())
    throw NoAnswer{fmt::format("the answer of {} broke off: {}", address_.url,
                               broken.empty() ? "its stream has no end" : broken)};
  return answer;
}

std::string ServerPartner::size_of(const std::string& text) const {
  return fmt::format("{} bytes", text.size());
}

std::vector<std::string> ServerPartner::facts() const {
  return {fmt::format("answers come from {}", address_.url)};
}

}  // namespace thermo
