#include "server/prompt.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "server/constraint.h"
#include "server/server_state.h"
#include "tokenizer/fill_in_middle.h"

namespace thermo {
namespace {

// Tokens of an answer: markers are the template's, the rest is what was written.
void append_answer(std::vector<PromptSegment>& segments, std::span<const TokenId> ids,
                   const Tokenizer& tokenizer) {
  for (const TokenId id : ids) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    append_segment(segments, bytes, tokenizer.vocab().find_special(bytes) == id);
  }
}

// Where the next request of a conversation may begin to differ: after the system prompt, after every turn
// that is not too short, and where the answer begins. All are where a role's marker stands.
std::vector<int> marks_of(const std::vector<TokenId>& ids, const Vocab& vocab) {
  constexpr int kApart = 256;  // tokens from one mark to the next that cost more than to compute them again
  const auto is_role = [&](TokenId id) {
    if (!vocab.contains(id) || !vocab.is_control(id) || vocab.is_end_of_generation(id)) return false;
    const std::string_view text = vocab.token_text(id);
    return text != "<think>" && text != "</think>";
  };
  std::vector<int> places;
  const size_t first =
      !ids.empty() && vocab.bos() && ids[0] == *vocab.bos() && !vocab.is_end_of_generation(ids[0]) ? 1 : 0;
  for (size_t i = first + 1; i < ids.size(); ++i)
    if (is_role(ids[i]) && ids[i] == ids[first]) places.push_back(static_cast<int>(i));
  if (places.empty()) {
    for (size_t i = ids.size(); i-- > 1;)
      if (is_role(ids[i])) return {static_cast<int>(i)};
    return {static_cast<int>(ids.size())};
  }
  std::vector<int> marks = {places.front()};
  for (const int place : places)
    if (place - marks.back() >= kApart && places.back() - place >= kApart) marks.push_back(place);
  if (places.size() > 1) marks.push_back(places.back());
  return marks;
}

// Where clients said that a beginning will come again, also inside a turn. The texts of the turns are looked
// up in that of the prompt: a template may cut spaces off, and an answer may be spelled as it was written.
std::vector<int> marks_in_turns(const std::vector<Turn>& turns, const std::vector<TokenId>& ids,
                                const Tokenizer& tokenizer) {
  std::vector<int> marks;
  if (std::all_of(turns.begin(), turns.end(), [](const Turn& turn) { return turn.marks.empty(); }))
    return marks;
  std::string text;
  std::vector<size_t> ends;  // of each token
  for (const TokenId id : ids) {
    text += tokenizer.token_bytes(id);
    ends.push_back(text.size());
  }
  constexpr const char* kSpace = " \t\r\n";
  size_t from = 0;
  for (const Turn& turn : turns) {
    const size_t begin = turn.content.find_first_not_of(kSpace);
    if (begin == std::string::npos) continue;
    const size_t end = turn.content.find_last_not_of(kSpace) + 1;
    const size_t at = text.find(std::string_view(turn.content).substr(begin, end - begin), from);
    if (at == std::string::npos) continue;
    for (const size_t mark : turn.marks) {
      const size_t place = at + std::clamp(mark, begin, end) - begin;
      marks.push_back(static_cast<int>(std::upper_bound(ends.begin(), ends.end(), place) - ends.begin()));
    }
    from = at + end - begin;
  }
  return marks;
}

bool knows(const ServedModel& model, const char* name) {
  return model.chat_template.find(name) != std::string::npos;
}

}  // namespace

int PreparedRequest::n_prompt() const {
  size_t n = 0;
  for (const auto& prompt : prompts) n += prompt.size();
  return static_cast<int>(n);
}

ApiError context_exceeded(Dialect dialect, size_t n_prompt, int n_ctx) {
  ApiError error(
      400, "context_length_exceeded",
      dialect == Dialect::Messages
          ? fmt::format("prompt is too long: {} tokens > {} maximum", n_prompt, n_ctx)
          : fmt::format("This model's maximum context length is {} tokens. However, your messages resulted "
                        "in {} tokens. Please reduce the length of the messages.",
                        n_ctx, n_prompt),
      dialect == Dialect::Completions ? "prompt" : "messages");
  error.extra = {{"n_prompt_tokens", n_prompt}, {"n_ctx", n_ctx}};
  return error;
}

namespace {

// With the tokens of earlier answers as the model wrote them, as far as they are known.
RenderedPrompt render_turns(const GenerationRequest& request, const ServedModel& model,
                            const RenderOptions& options, const KnownTurns& known, int& n_spliced) {
  std::vector<TurnGap> gaps;
  const size_t n_turns = request.turns.size() - (request.continue_last_turn ? 1 : 0);
  for (size_t i = 0; i < n_turns; ++i)
    if (request.turns[i].role == "assistant")
      if (const auto answer = known.store.known(known.owner, request.turns[i]))
        gaps.push_back({i, answer->has_reasoning});
  while (!gaps.empty()) {
    const std::optional<GappedPrompt> gapped = model.renderer->render_with_gaps(request.turns, options, gaps);
    if (!gapped) break;
    RenderedPrompt prompt{.ids = {}, .in_reasoning = gapped->in_reasoning};
    PromptHash hash;
    const auto append = [&](const std::vector<TokenId>& ids) {
      prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
      hash.add(ids);
    };
    const auto append_segments = [&](size_t piece) {
      if (!options.with_segments) return;
      for (const PromptSegment& one : gapped->segments[piece])
        append_segment(prompt.segments, one.text, one.from_template);
    };
    append(gapped->pieces[0]);
    append_segments(0);
    size_t i = 0;
    for (; i < gaps.size(); ++i) {
      const auto found = known.store.find(known.owner, request.turns[gaps[i].turn], hash);
      // A template that drops old reasoning wants it dropped.
      if (!found || (found->has_reasoning && !gapped->keeps_reasoning[i])) break;
      append(found->ids);
      if (options.with_segments) append_answer(prompt.segments, found->ids, *model.tokenizer);
      append(gapped->pieces[i + 1]);
      append_segments(i + 1);
    }
    n_spliced = static_cast<int>(i);
    if (i == gaps.size()) return prompt;
    gaps.resize(i);  // from here on the prompt is another one
  }
  n_spliced = 0;
  return model.renderer->render(request.turns, options);
}

RenderedPrompt render_request(const GenerationRequest& request, const ServedModel& model,
                              const ServerOptions& server, const KnownTurns& known, bool with_segments,
                              const std::function<void()>& look, int& n_spliced) {
  RenderOptions options;
  options.with_segments = with_segments;
  options.look = &look;
  options.tools = request.tools;
  options.thinking = request.thinking;
  options.kwargs = request.template_kwargs;
  options.continues_last_turn = request.continue_last_turn;
  const auto offer = [&](const char* name, Json value) {
    if (knows(model, name) && !options.kwargs.contains(name)) options.kwargs[name] = std::move(value);
  };
  offer("preserve_thinking", server.preserve_reasoning.value_or(true));
  if (!request.effort.empty()) offer("reasoning_effort", request.effort);
  if (request.continue_last_turn && request.thinking.value_or(false) &&
      request.turns.back().reasoning.empty())
    throw invalid_value(
        "messages", "messages: an answer without its reasoning cannot be continued while reasoning is on");
  try {
    RenderedPrompt rendered = render_turns(request, model, options, known, n_spliced);
    rendered.in_reasoning &= !request.continue_last_turn;
    return rendered;
  } catch (const ConfigError& error) {
    throw ApiError(400, "invalid_value", error.what(), "messages");
  }
}

}  // namespace

RenderedPrompt render_prompt(const GenerationRequest& request, const ServedModel& model,
                             const ServerOptions& options, const KnownTurns& turns, bool with_segments,
                             const std::function<void()>& look) {
  int n_spliced = 0;
  return render_request(request, model, options, turns, with_segments, look, n_spliced);
}

PreparedRequest prepare(GenerationRequest request, const ServedModel& model, const ServerOptions& options,
                        const KnownTurns& turns, const std::function<void()>& look) {
  PreparedRequest prepared;
  const Tokenizer& tokenizer = *model.tokenizer;
  const Vocab& vocab = tokenizer.vocab();
  const int n_ctx = model.service->n_ctx();
  std::optional<FillTokens> fill;
  if (!request.suffix.empty()) {
    fill = fill_tokens(vocab);
    if (!fill)
      throw unsupported("suffix",
                        "suffix: this model has no tokens for filling in the middle; leave it out, or use a "
                        "model that was trained for it");
  }
  if (request.dialect == Dialect::Completions) {
    for (const auto& prompt : request.prompts) {
      if (fill) {
        const auto* text = std::get_if<std::string>(&prompt);
        const std::vector<TokenId> before =
            text != nullptr ? tokenizer.encode(*text, {.parse_special = false, .look = &look})
                            : std::get<std::vector<int32_t>>(prompt);
        prepared.prompts.push_back(fill_prompt(tokenizer, *fill, before, request.suffix, &look));
        continue;
      }
      if (const auto* text = std::get_if<std::string>(&prompt)) {
        std::vector<TokenId> ids =
            tokenizer.encode(*text, {.parse_special = true, .add_bos_eos = true, .look = &look});
        // An end token at the end would be answered by nothing.
        if (vocab.add_eos() && ids.size() > 1 && vocab.eos() && ids.back() == *vocab.eos()) ids.pop_back();
        prepared.prompts.push_back(std::move(ids));
        // With log probabilities the text is that of the tokens, which have offsets in it.
        prepared.echoed_prompts.push_back(
            request.logprobs ? tokenizer.decode(prepared.prompts.back(), {.special = true}) : *text);
      } else {
        prepared.prompts.push_back(std::get<std::vector<int32_t>>(prompt));
        prepared.echoed_prompts.push_back(tokenizer.decode(prepared.prompts.back(), {.special = true}));
      }
      if (prepared.prompts.back().empty())
        throw invalid_value("prompt", "prompt: there is nothing to continue");
    }
  } else {
    // None has less than a token: such a prompt need not be made to know that it does not fit.
    if (request.turns.size() > static_cast<size_t>(n_ctx))
      throw context_exceeded(request.dialect, request.turns.size(), n_ctx);
    RenderedPrompt rendered = render_request(request, model, options, turns, false, look, prepared.n_spliced);
    prepared.in_reasoning = rendered.in_reasoning;
    prepared.prompts.push_back(std::move(rendered.ids));
    prepared.marks = marks_of(prepared.prompts.front(), vocab);
    for (const int mark : marks_in_turns(request.turns, prepared.prompts.front(), tokenizer))
      prepared.marks.push_back(mark);
    std::sort(prepared.marks.begin(), prepared.marks.end());
  }
  look();
  size_t n_longest = 0;
  for (const auto& prompt : prepared.prompts) n_longest = std::max(n_longest, prompt.size());
  if (n_longest >= static_cast<size_t>(n_ctx)) throw context_exceeded(request.dialect, n_longest, n_ctx);

  GenerateOptions& generate = prepared.options;
  generate.sampling = request.sampling;
  generate.prompt_logprobs = request.echo && request.logprobs;
  const int room = n_ctx - static_cast<int>(n_longest) + 1;
  const int wanted = request.max_tokens.value_or(options.default_max_tokens);
  generate.max_tokens = wanted > room ? -1 : wanted;  // the end of the context ends it then
  generate.stop_tokens.assign(vocab.end_of_generation().begin(), vocab.end_of_generation().end());
  generate.more_stop_tokens = request.stop_token_ids;
  if (fill) generate.stop_tokens.insert(generate.stop_tokens.end(), fill->ends.begin(), fill->ends.end());
  const bool may_call = !request.tools.empty() && request.tool_choice.mode != CallChoice::Mode::None;
  const auto ban = [&](const char* marker) {
    if (const std::optional<int32_t> id = vocab.find_special(marker))
      generate.sampling.logit_bias[*id] = kBanToken;
  };
  if (request.dialect != Dialect::Completions) {
    if (!may_call) ban("<tool_call>");
    if (request.thinking == false) ban("<think>");  // some models would open a second thought
  }
  const size_t n_answers = prepared.prompts.size() * static_cast<size_t>(request.n);
  const auto begin = std::chrono::steady_clock::now();
  // Of the whole answer: the limits of reasoning count what earlier runs wrote.
  const int limit = generate.max_tokens < 0 ? room : std::min(room, generate.max_tokens + request.n_written);
  prepared.constraints = make_constraints(request, model, options, prepared.in_reasoning, limit, n_answers,
                                          request.ignored_fields);
  prepared.constraint_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (const Status status = validate(generate.sampling, vocab.n_tokens()); !status)
    throw ApiError(400, "invalid_value", status.error().message);
  prepared.request = std::move(request);
  return prepared;
}

GenerationRequest read_request(Dialect dialect, const Json& body, const ServerState& server,
                               const std::function<void()>& look) {
  const ServedModel& model = *server.model;
  RequestDefaults defaults;
  defaults.sampling = model.sampling;
  defaults.n_vocab = model.tokenizer->vocab().n_tokens();
  defaults.n_ctx = model.service->n_ctx();
  defaults.max_choices = std::min(16, model.service->n_slots());
  defaults.keep_billing_header = server.options.keep_billing_header;
  defaults.anthropic_thinking = server.options.anthropic_thinking;
  defaults.prefill_assistant = server.options.prefill_assistant;
  defaults.images = server.options.images;
  defaults.effort = server.options.reasoning_effort;
  defaults.efforts = server.options.efforts;
  defaults.reasoning_format = server.options.reasoning_format;
  defaults.dry_breakers = server.options.dry_breakers;
  defaults.breakers_of = [&server, &model](const std::vector<std::string>& texts) {
    return server.dry_breakers->of(*model.tokenizer, texts);
  };
  defaults.tokens_of = [&model, &look](const std::string& text) {
    return model.tokenizer->encode(text, {.look = &look});
  };
  GenerationRequest request = dialect == Dialect::Messages      ? read_messages_request(body, defaults)
                              : dialect == Dialect::Responses   ? read_responses_request(body, defaults)
                              : dialect == Dialect::Completions ? read_completions_request(body, defaults)
                                                                : read_chat_request(body, defaults);
  const bool known =
      request.model.empty() || request.model == model.id ||
      std::find(model.aliases.begin(), model.aliases.end(), request.model) != model.aliases.end();
  if (server.options.strict_model && !known)
    throw ApiError(404, "model_not_found", fmt::format("there is no model called '{}'", request.model),
                   "model");
  return request;
}

}  // namespace thermo
