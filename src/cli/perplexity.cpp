// `thermocline perplexity`: how well a model predicts a text, by llama.cpp's method, so that the numbers
// compare.
//
// The text is cut into chunks of the context's length. In each, the second half is foretold token by token
// from all that stands before it in the chunk; perplexity is e to the mean negative logarithm of what the
// tokens were given.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "chat/text_model.h"
#include "cli/answer_printer.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/json_text.h"

namespace thermo {
namespace {

constexpr int kDefaultContext = 512;
constexpr int kScoredRows = 32;  // at once: a row of logits is a megabyte

// -log of the probability that these logits give to `token`.
double surprise(std::span<const float> logits, TokenId token) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - most));
  return std::log(sum) - static_cast<double>(logits[static_cast<size_t>(token)] - most);
}

struct Estimate {
  double sum = 0.0, sum_of_squares = 0.0;
  uint64_t n = 0;

  void add(double x) {
    sum += x;
    sum_of_squares += x * x;
    ++n;
  }
  double mean() const { return sum / static_cast<double>(n); }
  double perplexity() const { return std::exp(mean()); }
  // Of the perplexity, from the spread of the single values.
  double deviation() const {
    const double variance = sum_of_squares / static_cast<double>(n) - mean() * mean();
    return n < 2 || variance <= 0.0 ? 0.0 : std::sqrt(variance / static_cast<double>(n - 1)) * perplexity();
  }
};

class PerplexityCommand : public Command {
 public:
  CommandText text() const override {
    return {
        "perplexity", "perplexity [MODEL] -f FILE [options]", "how well a model predicts a text",
        "Uses llama.cpp's method: chunks of -c tokens (default 512), of which the second half counts. Run it "
        "with different --device, --isa, -ctk, -ctv or --expert-cache to see how they affect quality.",
        "thermocline perplexity model.gguf -f wiki.test.raw\n"
        "thermocline perplexity model.gguf -f wiki.test.raw -ctk q8_0 -ctv q8_0 --chunks 20"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Text");
    set.value("-f,--file", "FILE", file_, "file with the text; - is stdin").no_environment().once();
    set.value("--chunks", "N", n_chunks_, "use at most N chunks; -1: all (default)")
        .range(-1, 1e9)
        .no_environment();
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
    add_engine_options(set, flags_);
  }

  ExitCode run(const Terminal& terminal) override {
    if (n_chunks_ == 0) throw ConfigError("--chunks: 0 cannot be used, -1 (all) or at least 1 was expected");
    EngineOptions options = engine_options(flags_);
    if (options.n_ctx > 0 && options.n_ctx < 8)
      throw ConfigError("--ctx-size: perplexity needs chunks of 8 tokens or more");
    if (file_.empty() && !stdin_brings_text())
      throw ConfigError("no text was given: name a file with -f, or send one through a pipe");
    const std::string text = file_.empty() ? read_stdin() : read_text_file(file_);
    TextModel model(model_);
    if (options.n_ctx == 0) options.n_ctx = flags_.whole_context ? model.n_ctx_train() : kDefaultContext;
    const std::vector<TokenId> ids =
        model.tokenizer().encode(text, {.parse_special = false, .add_bos_eos = true});
    const auto n_ctx = static_cast<size_t>(options.n_ctx);
    size_t n_chunks = ids.size() / n_ctx;
    if (n_chunks == 0)
      throw ConfigError(fmt::format(
          "the text has {} tokens and a chunk {}: give a longer text, or a smaller -c", ids.size(), n_ctx));
    if (n_chunks_ >= 0) n_chunks = std::min(n_chunks, static_cast<size_t>(n_chunks_));
    set_expert_options(flags_.experts, model.config(), options);
    load_model(model, options, flags_, terminal);
    note_unused_cache(flags_.experts, model.engine(), terminal);

    const InterruptScope interrupts;
    Session session = model.open_session();
    Estimate estimate;
    size_t n_done = 0;
    if (!json_) write_stdout(fmt::format("perplexity: {} chunks of {} tokens\n", n_chunks, n_ctx));
    for (; n_done < n_chunks && !InterruptScope::interrupted(); ++n_done) {
      const size_t i = n_done;
      std::vector<TokenId> chunk(ids.begin() + static_cast<std::ptrdiff_t>(i * n_ctx),
                                 ids.begin() + static_cast<std::ptrdiff_t>((i + 1) * n_ctx));
      const Vocab& vocab = model.tokenizer().vocab();
      if (vocab.add_bos() && vocab.bos()) chunk[0] = *vocab.bos();  // as llama.cpp does
      score(model.engine(), session, chunk, estimate);
      if (std::isnan(estimate.sum))
        throw LoadError(
            fmt::format("{}: the model's output has no numbers in it: its weights are damaged; fetch the "
                        "file again",
                        model.file().path()));
      if (!json_)
        write_stdout(
            fmt::format("[{}]{:.4f},{}", i + 1, estimate.perplexity(), i + 1 == n_chunks ? "\n" : ""));
    }
    if (n_done < n_chunks) {
      if (!json_) write_stdout("\n");
      terminal.note(fmt::format("interrupted: the estimate is of {} of {} chunks", n_done, n_chunks));
    }
    if (n_done > 0) print(model, n_done, estimate);
    return InterruptScope::interrupted() ? InterruptScope::exit_code() : ExitCode::Ok;
  }

 private:
  static void require(const Status& status) {
    if (!status)
      throw ThermoError(
          status.error().code == ErrorCode::DeviceFault ? ExitCode::DeviceFault : ExitCode::Internal,
          "perplexity: " + status.error().message, status.error().remedy);
  }

  static void score(Engine& engine, Session& session, std::span<const TokenId> chunk, Estimate& estimate) {
    const size_t first = chunk.size() / 2;  // the first whose successor is foretold
    session.clear();
    require(session.append(chunk.first(first)));
    for (size_t at = first; at + 1 < chunk.size();) {
      const size_t n = std::min<size_t>(std::min(kScoredRows, engine.n_batch()), chunk.size() - 1 - at);
      std::vector<Row> rows;
      for (size_t k = 0; k < n; ++k)
        rows.push_back({.token = chunk[at + k], .parent = static_cast<int32_t>(k) - 1, .want_logits = true});
      const SequenceRows group{.sequence = session.sequence(), .rows = rows};
      const Result<StepOutput> output = engine.step({.groups = std::span(&group, 1)});
      if (!output) require(Status(output.error()));
      for (size_t k = 0; k < n; ++k)
        estimate.add(surprise(engine.fetch_logits(static_cast<int>(k)), chunk[at + k + 1]));
      at += n;
    }
  }

  void print(TextModel& model, size_t n_chunks, const Estimate& estimate) const {
    if (!json_) {
      write_stdout(fmt::format("Final estimate: PPL = {:.4f} +/- {:.5f}\n", estimate.perplexity(),
                               estimate.deviation()));
      return;
    }
    const Json out = {{"model", model.id()},
                      {"device", model.engine().info().device},
                      {"n_ctx", model.engine().n_ctx()},
                      {"n_chunks", n_chunks},
                      {"n_tokens", estimate.n},
                      {"perplexity", estimate.perplexity()},
                      {"deviation", estimate.deviation()}};
    write_stdout(json_text(out));
  }

  std::string model_, file_;
  int n_chunks_ = -1;
  bool json_ = false;
  EngineFlags flags_;
};

}  // namespace

std::unique_ptr<Command> make_perplexity_command() {
  return std::make_unique<PerplexityCommand>();
}

}  // namespace thermo
