#include "server/token_endpoints.h"

#include "base/utf8.h"
#include "server/api/shared_fields.h"
#include "server/generation.h"

namespace thermo {
namespace {

Json pieces_of(const std::vector<TokenId>& ids, const Tokenizer& tokenizer) {
  Json list = Json::array();
  for (const TokenId id : ids) {
    const std::string bytes(tokenizer.token_bytes(id));
    std::string storage;
    const bool text = replace_invalid_utf8(bytes, storage).data() == bytes.data();
    Json piece = bytes;
    if (!text) {
      piece = Json::array();
      for (const char c : bytes) piece.push_back(static_cast<unsigned char>(c));
    }
    list.push_back({{"id", id}, {"piece", std::move(piece)}});
  }
  return list;
}

RenderedPrompt prompt_of(Dialect dialect, const Json& body, const ServerState& server,
                         const std::string& owner, const std::function<void()>& look,
                         bool with_segments = false) {
  return render_prompt(read_request(dialect, body, server, look), *server.model, server.options,
                       {*server.turns, owner}, with_segments, look);
}

Json segments_json(const std::vector<PromptSegment>& segments) {
  Json list = Json::array();
  for (const PromptSegment& one : segments)
    list.push_back({{"text", one.text}, {"template", one.from_template}});
  return list;
}

Json tokenize(const Json& body, const ServerState& server, const std::string& owner,
              const std::function<void()>& look) {
  Fields fields(body);
  const Tokenizer& tokenizer = *server.model->tokenizer;
  std::vector<TokenId> ids;
  if (fields.has("messages")) {
    ids = prompt_of(Dialect::Chat, body, server, owner, look).ids;
  } else {
    const Json& content = fields.require("content");
    if (!content.is_string()) throw invalid_value("content", "content: a string was expected");
    EncodeOptions options{.look = &look};
    options.add_bos_eos = fields.boolean("add_special").value_or(false);
    options.parse_special = fields.boolean("parse_special").value_or(true);
    ids = tokenizer.encode(content.get_ref<const std::string&>(), options);
  }
  if (fields.boolean("with_pieces").value_or(false)) return {{"tokens", pieces_of(ids, tokenizer)}};
  return {{"tokens", ids}};
}

Json detokenize(const Json& body, const ServerState& server) {
  Fields fields(body);
  const Json* tokens = fields.array("tokens");
  if (tokens == nullptr) fields.require("tokens");
  const Tokenizer& tokenizer = *server.model->tokenizer;
  const std::vector<TokenId> ids = read_token_ids(*tokens, "tokens", tokenizer.vocab().n_tokens());
  return {{"content", tokenizer.decode(ids, {.special = true})}};
}

}  // namespace

TokenReply token_reply(Endpoint endpoint, const Json& body, const ServerState& server,
                       const std::string& owner, const std::function<void()>& look) {
  if (endpoint == Endpoint::Tokenize) return {tokenize(body, server, owner, look), {}};
  if (endpoint == Endpoint::Detokenize) return {detokenize(body, server), {}};
  const Dialect dialect = endpoint == Endpoint::CountTokens       ? Dialect::Messages
                          : endpoint == Endpoint::ResponsesTokens ? Dialect::Responses
                                                                  : Dialect::Chat;
  RenderedPrompt prompt = prompt_of(dialect, body, server, owner, look, endpoint == Endpoint::ApplyTemplate);
  if (endpoint == Endpoint::CountTokens) return {{{"input_tokens", prompt.ids.size()}}, {}};
  if (endpoint == Endpoint::ApplyTemplate) {
    Json reply = {{"prompt", server.model->tokenizer->decode(prompt.ids, {.special = true})},
                  {"segments", segments_json(prompt.segments)},
                  {"n_tokens", prompt.ids.size()}};
    return {std::move(reply), std::move(prompt.ids)};
  }
  return {{{"object", "response.input_tokens"}, {"input_tokens", prompt.ids.size()}}, {}};
}

}  // namespace thermo
