#include "chat/text_model.h"

#include <fmt/format.h>

#include "base/error.h"
#include "chat/model_source.h"
#include "model/check_tensors.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

VocabData require_vocab(const GgufFile& file) {
  std::optional<VocabData> data = read_vocab(file);
  if (!data)
    throw LoadError(
        fmt::format("{}: the file has no vocabulary, so there is no text; `bench` and `verify` work with "
                    "it, `run` and `chat` need a model with one",
                    file.path()));
  return std::move(*data);
}

}  // namespace

TextModel::TextModel(const std::string& model)
    : file_(open_model(model)),
      id_(model_display_name(model)),
      config_(read_model_config(file_)),
      tokenizer_(require_vocab(file_)),
      card_(find_model_card(model, file_)) {}

std::shared_ptr<const TokenTrie> TextModel::token_trie() const {
  std::call_once(trie_once_, [this] { trie_ = std::make_shared<const TokenTrie>(tokenizer_.vocab()); });
  return trie_;
}

void TextModel::load(const EngineOptions& options) {
  check_small_tensors(file_);
  engine_ = std::make_unique<Engine>(file_, options);
}

Session TextModel::open_session() {
  Result<Session> session = engine_->open_session();
  if (!session) throw ThermoError(ExitCode::Internal, session.error().message, session.error().remedy);
  return std::move(*session);
}

}  // namespace thermo
