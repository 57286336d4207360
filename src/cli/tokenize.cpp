// `thermocline tokenize`: text to ids and back.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/json.h"
#include "chat/model_source.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/options/model_options.h"
#include "tokenizer/bpe.h"
#include "tokenizer/stream_decoder.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

std::vector<int32_t> parse_ids(const std::string& text, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  size_t at = 0;
  while (at < text.size()) {
    const size_t begin = text.find_first_not_of(", \t\n\r[]", at);
    if (begin == std::string::npos) break;
    const size_t end = std::min(text.find_first_of(", \t\n\r[]", begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    int id = 0;
    try {
      parse_value(word, id);
    } catch (const ConfigError&) {
      throw ConfigError(fmt::format("--ids: '{}' is not a token id; give numbers separated by commas", word));
    }
    if (!tokenizer.vocab().contains(id))
      throw ConfigError(
          fmt::format("--ids: {} is outside the vocabulary of {} tokens", id, tokenizer.vocab().n_tokens()));
    ids.push_back(id);
    at = end;
  }
  return ids;
}

// Valid UTF-8, whatever the bytes.
std::string as_utf8(std::string_view bytes) {
  Utf8Assembler assembler;
  std::string text = assembler.push(bytes);
  return text + assembler.finish();
}

class TokenizeCommand : public Command {
 public:
  CommandText text() const override {
    return {"tokenize", "tokenize [MODEL] --text TEXT | --ids 1,2,3 | -f FILE", "text to token ids, and back",
            "Without --text, --ids and -f the text is read from stdin.",
            "thermocline tokenize --text \"Hello, world!\"\nthermocline tokenize --ids 39,514,333\n"
            "thermocline tokenize -f prompt.txt --count"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Input");
    set.value("-p,--text,--prompt", "TEXT", text_, "text to encode").no_environment().once();
    set.value("-f,--file", "FILE", file_, "file with the text; - is stdin").no_environment().once();
    set.value("--ids", "LIST", ids_, "token ids to decode").no_environment();
    set.flag("--special", special_,
             "read and show special tokens by their text (default); --no-special: plain text");
    set.flag("--bos", add_bos_, "add BOS and EOS where the model asks for them");
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
    set.flag("--count", count_, "print only the number of tokens");
    set.flag("--pieces", pieces_, "print a line for each token: id and text");
  }

  ExitCode run(const Terminal&) override {
    const int n_inputs = (text_ ? 1 : 0) + (file_.empty() ? 0 : 1) + (ids_ ? 1 : 0);
    if (n_inputs > 1) throw ConfigError("--text, --file and --ids exclude each other: give one of them");
    if (n_inputs == 0 && !stdin_brings_text())
      throw ConfigError("no text was given: use --text TEXT, -f FILE, --ids LIST, or send it through a pipe");
    const GgufFile file = open_model(model_);
    std::optional<VocabData> data = read_vocab(file);
    if (!data)
      throw LoadError(fmt::format("{}: the file has no vocabulary; use a model that has one", file.path()));
    const Tokenizer tokenizer(std::move(*data));

    std::vector<int32_t> ids;
    std::string decoded;
    if (ids_) {
      ids = parse_ids(*ids_, tokenizer);
      decoded = tokenizer.decode(ids, {.special = special_});
    } else {
      const std::string text = text_ ? *text_ : file_.empty() ? read_stdin() : read_text_file(file_);
      ids = tokenizer.encode(text, {.parse_special = special_, .add_bos_eos = add_bos_});
      decoded = text;
    }
    write_stdout(format(tokenizer, ids, decoded));
    return ExitCode::Ok;
  }

 private:
  std::string format(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                     const std::string& text) const {
    if (json_) {
      Json out;
      out["ids"] = ids;
      out["n_tokens"] = ids.size();
      out["text"] = as_utf8(text);
      out["tokens"] = Json::array();
      for (int32_t id : ids) out["tokens"].push_back(as_utf8(tokenizer.token_bytes(id)));
      return out.dump() + "\n";
    }
    if (count_) return fmt::format("{}\n", ids.size());
    if (pieces_) {
      std::string out;
      for (int32_t id : ids)
        out += fmt::format("{:>7}  {}\n", id, Json(as_utf8(tokenizer.token_bytes(id))).dump());
      return out;
    }
    if (ids_) return text + "\n";
    return fmt::format("{}\n", fmt::join(ids, ","));
  }

  std::string model_;
  std::optional<std::string> text_;
  std::optional<std::string> ids_;
  std::string file_;
  bool special_ = true, add_bos_ = false, json_ = false, count_ = false, pieces_ = false;
};

}  // namespace

std::unique_ptr<Command> make_tokenize_command() {
  return std::make_unique<TokenizeCommand>();
}

}  // namespace thermo
