// A model with text: its file, its tokenizer and its engine together.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "chat/model_card.h"
#include "engine/engine.h"
#include "gguf/gguf_file.h"
#include "grammar/token_trie.h"
#include "model/model_config.h"
#include "tokenizer/bpe.h"

namespace thermo {

// Members in the order of their lifetimes: the engine reads the file.
class TextModel {
 public:
  // Opens the file, its card and its vocabulary; loads no weights. `model` as for open_model(). Throws
  // LoadError, and ConfigError where the card cannot be used.
  explicit TextModel(const std::string& model);

  // Loads the weights. Throws as the engine does.
  void load(const EngineOptions& options);

  const GgufFile& file() const { return file_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  // Its tokens by their bytes, for constrained answers. Made when it is first asked for; any thread.
  std::shared_ptr<const TokenTrie> token_trie() const;
  const std::string& id() const { return id_; }  // of replies
  const std::optional<ModelCard>& card() const { return card_; }
  const ModelConfig& config() const { return config_; }  // as the file has it
  // After load() with what its options make of it.
  int n_ctx_train() const { return (engine_ ? engine_->config() : config_).n_ctx_train; }
  Engine& engine() { return *engine_; }  // REQUIRES: load()
  // A new conversation. REQUIRES: load().
  Session open_session();

 private:
  GgufFile file_;
  std::string id_;
  ModelConfig config_;  // before the vocabulary: an unknown architecture is the better message
  Tokenizer tokenizer_;
  std::optional<ModelCard> card_;
  mutable std::once_flag trie_once_;
  mutable std::shared_ptr<const TokenTrie> trie_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace thermo
