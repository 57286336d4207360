// `thermocline synth`: a model file of real shape with random weights, for benchmarks and tests.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>

#include "base/json.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/inspect_facts.h"
#include "cli/interrupt.h"
#include "cli/json_text.h"
#include "cli/progress.h"
#include "cli/synth/synth_file.h"
#include "cli/synth/synth_fill.h"
#include "cli/synth/synth_shape.h"
#include "cli/synth/synth_text.h"
#include "gguf/gguf_writer.h"

namespace thermo {
namespace {

constexpr int kMaxVocab = 1 << 24;

template <class T>
std::vector<std::string> names_of(std::span<const T> items) {
  std::vector<std::string> names;
  for (const T& item : items) names.emplace_back(item.name);
  return names;
}

template <class T>
const T& find_named(std::span<const T> items, const std::string& name) {
  return *std::find_if(items.begin(), items.end(), [&](const T& item) { return item.name == name; });
}

// Fills the tensors and writes them, all threads at once. `on_progress` is called on this thread.
void write_tensors(const SynthFiller& filler, std::span<const SynthTensor> tensors, ThreadPool& threads,
                   SynthFile& file, const std::function<void(uint64_t)>& on_progress) {
  std::vector<uint64_t> first_chunk{0};  // of each tensor; the last one is their number
  for (const SynthTensor& tensor : tensors)
    first_chunk.push_back(first_chunk.back() +
                          ceil_div(tensor.n_rows(), SynthFiller::rows_per_chunk(tensor)));
  std::vector<std::vector<std::byte>> buffers(static_cast<size_t>(threads.size()));
  std::atomic<uint64_t> written{0};
  threads.run(static_cast<int>(first_chunk.back()), [&](int task, int thread) {
    if (file.failed() || InterruptScope::interrupted()) return;
    const auto chunk = static_cast<uint64_t>(task);
    const auto next = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
    const auto index = static_cast<size_t>(next - first_chunk.begin()) - 1;
    const SynthTensor& tensor = tensors[index];
    const uint64_t step = SynthFiller::rows_per_chunk(tensor), row = (chunk - first_chunk[index]) * step;
    const uint64_t n = std::min(step, tensor.n_rows() - row),
                   row_size = row_bytes(tensor.dtype, tensor.dims[0]);
    std::vector<std::byte>& buffer = buffers[static_cast<size_t>(thread)];
    buffer.resize(std::max<size_t>(buffer.size(), n * row_size));
    filler.fill(tensor, row, n, buffer.data());
    file.write(index, row * row_size, std::span(buffer).first(n * row_size));
    const uint64_t done = written += n * row_size;
    if (thread == 0) on_progress(done);
  });
}

class SynthCommand : public Command {
 public:
  CommandText text() const override {
    return {"synth", "synth OUT.gguf --shape NAME [options]",
            "write a model of real shape with random weights",
            "The file has the tensors, types and sizes of the real model, so it loads and runs at the real "
            "speed; its "
            "answers are noise. Without --text it has no vocabulary. The dflash shapes are drafters for the "
            "models they are "
            "named after.",
            "thermocline synth /dev/shm/35b.gguf --shape qwen35moe-35b-a3b\n"
            "thermocline synth /tmp/8-layers.gguf --shape qwen35moe-35b-a3b --layers 8 --vocab 32768\n"
            "thermocline synth /tmp/8-drafter.gguf --shape dflash-35b-a3b --layers 8 --vocab 32768\n"};
  }

  void declare(OptionSet& set) override {
    set.positional("OUT", path_, "the file to write");
    set.section("Synthetic model");
    set.value("--shape", "NAME", shape_, "the model whose shapes to use").choices(names_of(synth_shapes()));
    set.value("--quant", "TYPE", quant_, "types of the matrices (default Q4_K_M; Q8_0 for a drafter)")
        .choices(names_of(synth_quants()));
    set.value("--layers", "N", options_.n_layer,
              "only the first N layers (0: all); for a drafter: layers of the model it drafts for")
        .range(0, 4096);
    set.count("--vocab", "N", options_.n_vocab, "vocabulary size (0: the model's)");
    set.flag("--text", text_, "add the embedded model's vocabulary and template, for run and serve");
    set.count("-c,--context", "N", options_.n_ctx, "training length in the file (0: the model's)");
    set.flag("--nextn", options_.nextn, "add the next-token (MTP) block");
    set.value("--skew", "S", options_.skew,
              "how unevenly experts are used: the share of the router's variation that is the same for every "
              "token")
        .range(0.0, 0.99);
    set.value("--locality", "S", options_.locality,
              "how much neighbouring rows share experts: the share of the embeddings' variation that tokens "
              "of one topic have in common; bench changes the topic every 64 tokens")
        .range(0.0, 0.99);
    set.value("-s,--seed", "N", options_.seed, "seed of the weights");
    set.value("-t,--threads", "N", n_threads_, "threads (0: one for each core)").range(0, 1024);
    set.flag("--json", json_, "print one JSON object");
  }

  ExitCode run(const Terminal& terminal) override {
    check_options();
    const auto start = std::chrono::steady_clock::now();
    const std::vector<SynthTensor> tensors = synth_tensors(options_);
    uint64_t n_bytes = 0, n_params = 0;
    for (const SynthTensor& tensor : tensors) {
      n_bytes += tensor.n_bytes();
      n_params += tensor.n_elements();
    }

    ThreadPool threads({.n_threads = n_threads_, .pin = false});
    const SynthFiller filler(options_, tensors, threads);
    ProgressLine progress(terminal);
    GgufWriter metadata;
    set_synth_metadata(options_, metadata);
    if (text_)
      set_synth_vocabulary(options_.n_vocab > 0 ? options_.n_vocab : options_.shape->config.n_vocab,
                           metadata);
    const InterruptScope interrupts;
    SynthFile file(path_, metadata, tensors);
    write_tensors(filler, tensors, threads, file, [&](uint64_t done) {
      progress.update({"write", done, n_bytes});
    });
    if (InterruptScope::interrupted()) {  // the file removes what was written
      terminal.note(fmt::format("interrupted: {} was not written", path_));
      return InterruptScope::exit_code();
    }
    file.finish();
    progress.clear();

    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (json_) {
      Json out;
      out["path"] = path_;
      out["shape"] = shape_;
      out["quant"] = quant_;
      out["n_layer"] = options_.n_layer > 0 ? options_.n_layer : options_.shape->n_layer();
      out["n_vocab"] = options_.n_vocab > 0 ? options_.n_vocab : options_.shape->config.n_vocab;
      out["nextn"] = options_.nextn;
      out["skew"] = options_.skew;
      out["locality"] = options_.locality;
      out["seed"] = options_.seed;
      out["n_tensors"] = tensors.size();
      out["n_params"] = n_params;
      out["tensor_bytes"] = n_bytes;
      out["seconds"] = seconds;
      write_stdout(json_text(out));
    } else {
      write_stdout(fmt::format("{}: {} {}, {} tensors, {} parameters, {} in {:.1f} s\n", path_, shape_,
                               quant_, tensors.size(), format_params(n_params), format_bytes(n_bytes),
                               seconds));
    }
    return ExitCode::Ok;
  }

 private:
  void check_options() {
    if (path_.empty())
      throw ConfigError("synth needs a file to write: thermocline synth OUT.gguf --shape NAME");
    if (shape_.empty())
      throw ConfigError(
          fmt::format("synth needs --shape; there are {}", fmt::join(names_of(synth_shapes()), ", ")));
    if (options_.n_vocab < 0 || options_.n_vocab > kMaxVocab)
      throw ConfigError(
          fmt::format("--vocab: {} cannot be used, 0 to {} was expected", options_.n_vocab, kMaxVocab));
    if (options_.n_ctx < 0)
      throw ConfigError(fmt::format("--context: {} cannot be used, 0 or more was expected", options_.n_ctx));
    options_.shape = &find_named(synth_shapes(), shape_);
    if (text_ && options_.shape->drafter)
      throw ConfigError("--text is for models: a drafter has the vocabulary of the model it drafts for");
    const SynthShape& shape = *options_.shape;
    if (quant_.empty()) quant_ = shape.drafter ? "Q8_0" : "Q4_K_M";
    options_.quant = &find_named(synth_quants(), quant_);
    const auto n_captured = static_cast<int>(shape.config.network.features.empty()
                                                 ? 0
                                                 : shape.config.network.features.front().tensors[0].shape[0] /
                                                       shape.config.n_embd);
    if (options_.n_layer > shape.n_layer())
      throw ConfigError(fmt::format("--layers {}: {} has {}", options_.n_layer, shape_, shape.n_layer()));
    if (options_.n_layer > 0 && options_.n_layer < n_captured)
      throw ConfigError(
          fmt::format("--layers {}: {} reads {} layers of its model", options_.n_layer, shape_, n_captured));
    if (options_.nextn && !shape.nextn)
      throw ConfigError(fmt::format("--nextn: {} has no next-token block; use a qwen35 shape", shape_));
    if (!shape.config.is_moe() && (options_.skew > 0.0 || options_.locality > 0.0))
      throw ConfigError(fmt::format("{}: {} has no experts; use a shape that has",
                                    options_.skew > 0.0 ? "--skew" : "--locality", shape_));
  }

  std::string path_, shape_, quant_;
  SynthOptions options_;
  int n_threads_ = 0;
  bool text_ = false, json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_synth_command() {
  return std::make_unique<SynthCommand>();
}

}  // namespace thermo
