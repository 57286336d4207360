#include "server/token_endpoints.h"

#include <fmt/format.h>

#include "base/utf8.h"
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

std::vector<TokenId> prompt_ids(Dialect dialect, const Json& body, const ServerState& server,
                                const std::string& owner) {
  return render_ids(read_request(dialect, body, server), *server.model, server.options,
                    {*server.turns, owner});
}

Json tokenize(const Json& body, const ServerState& server, const std::string& owner) {
  Fields fields(body);
  const Tokenizer& tokenizer = *server.model->tokenizer;
  std::vector<TokenId> ids;
  if (fields.has("messages")) {
    ids = prompt_ids(Dialect::Chat, body, server, owner);
  } else {
    const Json& content = fields.require("content");
    if (!content.is_string()) throw invalid_value("content", "content: a string was expected");
    EncodeOptions options;
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
  std::vector<TokenId> ids;
  for (const Json& id : *tokens) {
    if (!id.is_number_integer() || !server.model->tokenizer->vocab().contains(id.get<int32_t>()))
      throw invalid_value("tokens", fmt::format("tokens: {} is no token of the vocabulary", id.dump()));
    ids.push_back(id.get<int32_t>());
  }
  return {{"content", server.model->tokenizer->decode(ids, {.special = true})}};
}

}  // namespace

TokenReply token_reply(Endpoint endpoint, const Json& body, const ServerState& server,
                       const std::string& owner) {
  if (endpoint == Endpoint::Tokenize) return {tokenize(body, server, owner), {}};
  if (endpoint == Endpoint::Detokenize) return {detokenize(body, server), {}};
  const Dialect dialect = endpoint == Endpoint::CountTokens       ? Dialect::Messages
                          : endpoint == Endpoint::ResponsesTokens ? Dialect::Responses
                                                                  : Dialect::Chat;
  std::vector<TokenId> ids = prompt_ids(dialect, body, server, owner);
  if (endpoint == Endpoint::CountTokens) return {{{"input_tokens", ids.size()}}, {}};
  if (endpoint == Endpoint::ApplyTemplate) {
    Json reply = {{"prompt", server.model->tokenizer->decode(ids, {.special = true})},
                  {"n_tokens", ids.size()}};
    return {std::move(reply), std::move(ids)};
  }
  return {{{"object", "response.input_tokens"}, {"input_tokens", ids.size()}}, {}};
}

}  // namespace thermo
