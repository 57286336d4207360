// Texts with drafts against texts without, over 200 prompts: code, chat, arithmetic, tool calls and free
// text.
//
// Every drafter and budget, greedy and with a seed. On the processor all texts must be equal. Also prints
// what drafting did to each kind of text: tokens a step, how often the first guess was right, and with
// --speed the time of each text with drafts over that without, written in turn.
//
//   draft_parity [--prompts 200] [-n 96] [--who lookup,mtp,DRAFTER.gguf] [--budgets 1,7,16,63] [--temps
//   0,0.8]
//                [--sequences 1] [--model FILE] [--device cpu|sim|gpu] [--threads N] [--speed REPETITIONS]
//                [--candidates 1: chains] [--expert-cache 40%]
//
// A model without a vocabulary gets random prompts.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <random>

#include "base/error.h"
#include "chat/prompt_renderer.h"
#include "chat/text_model.h"
#include "embedded/embedded_model.h"
#include "engine/engine.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

struct Prompt {
  std::string kind;
  std::vector<TokenId> ids;
};

struct Options {
  int n_prompts = 200, n_tokens = 96, n_sequences = 1, n_threads = 0, n_speed = 0, n_candidates = 0;
  std::vector<std::string> who = {"lookup", "mtp", "embedded"}, budgets = {"1", "7", "16", "63"};
  std::vector<float> temperatures = {0.0f, 0.8f};
  std::string model, device = "cpu";
  ExpertBudget expert_cache = {};
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text)
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

Options read_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--prompts") {
      o.n_prompts = std::stoi(value);
    } else if (name == "-n") {
      o.n_tokens = std::stoi(value);
    } else if (name == "--sequences") {
      o.n_sequences = std::stoi(value);
    } else if (name == "--threads") {
      o.n_threads = std::stoi(value);
    } else if (name == "--speed") {
      o.n_speed = std::stoi(value);
    } else if (name == "--candidates") {
      o.n_candidates = std::stoi(value);
    } else if (name == "--who") {
      o.who = split(value);
    } else if (name == "--budgets") {
      o.budgets = split(value);
    } else if (name == "--model") {
      o.model = value;
    } else if (name == "--device") {
      o.device = value;
    } else if (name == "--expert-cache") {
      o.expert_cache = parse_expert_budget(value).value();
    } else if (name == "--temps") {
      o.temperatures.clear();
      for (const std::string& t : split(value)) o.temperatures.push_back(std::stof(t));
    } else {
      throw ConfigError(fmt::format("{} is not known", name));
    }
  }
  return o;
}

// One of each kind in turn, so that a short run sees all of them.
std::vector<std::pair<std::string, std::string>> questions() {
  const char* nouns[] = {"list", "string", "number", "file",  "tree",
                         "word", "date",   "matrix", "queue", "name"};
  const char* verbs[] = {"sorts", "reverses", "counts", "prints"};
  const char* topics[] = {"the sea", "a lighthouse", "winter",   "a small town", "the moon",
                          "bread",   "a river",      "old maps", "bees",         "rain"};
  const char* chats[] = {"What do you know about", "Why do people like", "How would you describe",
                         "What is special about"};
  const char* tools[] = {"Search for", "What is the weather near", "Find news about", "Look up"};
  const char* frees[] = {"Tell me a story about", "Write a poem about", "Write a letter about", "Describe"};
  std::vector<std::pair<std::string, std::string>> all;
  for (int i = 0; i < 40; ++i) {
    all.emplace_back("code",
                     fmt::format("Write a Python function that {} a {}.", verbs[i / 10], nouns[i % 10]));
    all.emplace_back("chat", fmt::format("{} {}?", chats[i % 4], topics[i / 4]));
    all.emplace_back("sums", fmt::format("What is {} {} {}?", 7 * i + 3, "+-*"[i % 3], 5 * i + 2));
    all.emplace_back("tools", fmt::format("{} {}.", tools[i % 4], topics[i / 4]));
    all.emplace_back("free", fmt::format("{} {}.", frees[i % 4], topics[i / 4]));
  }
  return all;
}

std::vector<Prompt> prompts_of(const GgufFile& file, const ModelConfig& config, int n) {
  std::vector<Prompt> prompts;
  std::optional<VocabData> vocab = read_vocab(file);
  if (!vocab) {
    std::mt19937 random(1);
    for (int i = 0; i < n; ++i) {
      Prompt& prompt = prompts.emplace_back(Prompt{"random", {}});
      for (int k = 0; k < 6 + i % 23; ++k)
        prompt.ids.push_back(static_cast<TokenId>(random() % static_cast<unsigned>(config.n_vocab)));
    }
    return prompts;
  }
  const Tokenizer tokenizer(std::move(*vocab));
  const PromptRenderer renderer(tokenizer, {});
  const auto tool = [](const char* name, const char* argument) {
    return Tool{.name = name,
                .description = name,
                .parameters = {{"type", "object"},
                               {"properties", {{argument, {{"type", "string"}}}}},
                               {"required", {argument}}}};
  };
  const std::vector<Tool> tools = {tool("get_weather", "city"), tool("search", "query")};
  for (const auto& [kind, text] : questions()) {
    if (static_cast<int>(prompts.size()) == n) break;
    Turn turn;
    turn.role = "user";
    turn.content = text;
    RenderOptions render;
    if (kind == "tools") render.tools = tools;
    prompts.push_back({kind, renderer.render({&turn, 1}, render).ids});
  }
  return prompts;
}

struct Text {
  std::vector<TokenId> tokens;
  double seconds = 0.0;
  DraftTelemetry draft;
};

// Writes texts [first, first + n) together, one in each session.
std::vector<Text> write(Engine& engine, std::span<const Prompt> prompts, size_t first, float temperature,
                        int n_tokens, const std::vector<TokenId>& stops) {
  std::vector<Session> sessions;
  std::vector<Text> texts(prompts.size());
  RequestLoop loop(engine);
  std::vector<RequestId> ids;
  const DraftTelemetry before = engine.draft_telemetry();
  for (size_t i = 0; i < prompts.size(); ++i) {
    sessions.push_back(std::move(engine.open_session().value()));
    if (prompts.size() == 1)  // timed without its prompt
      if (const Status status = sessions.back().append(prompts[i].ids); !status)
        throw ThermoError(ExitCode::Internal, status.error().message);
  }
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < prompts.size(); ++i) {
    GenerateOptions options;
    options.max_tokens = n_tokens;
    options.stop_tokens = stops;
    options.sampling.temperature = temperature;
    options.sampling.seed = first + i;
    const std::span<const TokenId> rest =
        prompts.size() == 1 ? std::span<const TokenId>{} : std::span<const TokenId>(prompts[i].ids);
    ids.push_back(loop.add(sessions[i], rest, options).value());
  }
  while (!loop.empty())
    for (const RequestEvent& event : loop.step()) {
      const auto i = static_cast<size_t>(std::find(ids.begin(), ids.end(), event.request) - ids.begin());
      if (const auto* token = std::get_if<GeneratedToken>(&event.what)) texts[i].tokens.push_back(token->id);
      if (const auto* error = std::get_if<Error>(&event.what))
        throw ThermoError(ExitCode::Internal, error->message);
    }
  texts.front().seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  texts.front().draft = engine.draft_telemetry() - before;
  return texts;
}

class Parity {
 public:
  explicit Parity(Options options)
      : o_(std::move(options)),
        file_(o_.model.empty() ? GgufFile(embedded_model(), "embedded") : GgufFile(o_.model)),
        config_(read_model_config(file_)),
        prompts_(prompts_of(file_, config_, o_.n_prompts)) {
    if (const auto eos = file_.find_uint("tokenizer.ggml.eos_token_id"))
      stops_.push_back(static_cast<TokenId>(*eos));
  }

  int run() {
    const auto plain = make_engine("none", "auto");
    for (const float temperature : o_.temperatures) {
      plain_.clear();
      for (size_t i = 0; i < prompts_.size(); ++i)
        plain_.push_back(
            write(*plain, std::span(prompts_).subspan(i, 1), i, temperature, o_.n_tokens, stops_).front());
      for (const std::string& who : o_.who)
        for (const std::string& budget : o_.budgets) {
          const auto engine = make_engine(who, budget);
          if (o_.n_speed > 0)
            speed(*plain, *engine, temperature, who, budget);
          else
            compare(*engine, temperature, who, budget);
        }
    }
    fmt::print("{} texts, {} differ\n", n_texts_, n_different_);
    return n_different_ == 0 ? 0 : 1;
  }

 private:
  std::unique_ptr<Engine> make_engine(const std::string& who, const std::string& budget) {
    EngineOptions options;
    options.n_threads = o_.n_threads;
    options.n_ctx = std::min(config_.n_ctx_train, o_.n_tokens + 512);
    options.n_sequences = o_.n_sequences;
    options.expert_cache = o_.expert_cache;
    options.device.kind = o_.device == "sim"   ? DeviceChoice::Kind::StandIn
                          : o_.device == "gpu" ? DeviceChoice::Kind::Gpu
                                               : DeviceChoice::Kind::Cpu;
    using Kind = DraftOptions::Kind;
    options.draft.budget = budget == "auto" ? 0 : std::stoi(budget);
    options.draft.max_candidates = o_.n_candidates;
    options.draft.kind = who == "none"     ? Kind::None
                         : who == "lookup" ? Kind::Lookup
                         : who == "mtp"    ? Kind::Mtp
                                           : Kind::File;
    if (options.draft.kind == Kind::File) {
      if (!drafters_.contains(who))
        drafters_.emplace(who, who == "embedded" ? GgufFile(embedded_drafter(), who) : GgufFile(who));
      options.draft.file = &drafters_.at(who);
    }
    return std::make_unique<Engine>(file_, options);
  }

  void compare(Engine& engine, float temperature, const std::string& who, const std::string& budget) {
    std::map<std::string, DraftTelemetry> kinds;
    const auto n = static_cast<size_t>(o_.n_sequences);
    for (size_t first = 0; first < prompts_.size(); first += n) {
      const auto now = std::span(prompts_).subspan(first, std::min(n, prompts_.size() - first));
      const std::vector<Text> texts = write(engine, now, first, temperature, o_.n_tokens, stops_);
      for (size_t i = 0; i < texts.size(); ++i) {
        ++n_texts_;
        if (texts[i].tokens == plain_[first + i].tokens) continue;
        ++n_different_;
        fmt::print("differs: prompt {} ({}), {} budget {}, temperature {}\n", first + i, now[i].kind, who,
                   budget, temperature);
      }
      DraftTelemetry& sum = kinds[n == 1 ? now.front().kind : "all"];
      sum = sum + texts.front().draft;
    }
    std::string line = fmt::format("{} budget {} temperature {}:", who, budget, temperature);
    for (const auto& [kind, t] : kinds) {
      const auto first_guess =
          t.tried[1] == 0 ? 0.0
                          : 100.0 * static_cast<double>(t.accepted[1]) / static_cast<double>(t.tried[1]);
      line += fmt::format(" {} {:.3f} ({:.1f} %)", kind, t.tokens_per_step(), first_guess);
    }
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }

  // Each text without and with drafts, in turn; of several repetitions the median.
  void speed(Engine& plain, Engine& engine, float temperature, const std::string& who,
             const std::string& budget) {
    std::map<std::string, std::vector<double>> ratios;
    std::map<std::string, DraftTelemetry> kinds;
    for (int repetition = 0; repetition < o_.n_speed; ++repetition) {
      std::map<std::string, double> without, with;
      for (size_t i = 0; i < prompts_.size(); ++i) {
        const auto prompt = std::span(prompts_).subspan(i, 1);
        const std::string& kind = prompt.front().kind;
        without[kind] += write(plain, prompt, i, temperature, o_.n_tokens, stops_).front().seconds;
        const Text drafted = write(engine, prompt, i, temperature, o_.n_tokens, stops_).front();
        with[kind] += drafted.seconds;
        kinds[kind] = kinds[kind] + drafted.draft;
        ++n_texts_;
        if (drafted.tokens != plain_[i].tokens) ++n_different_;
      }
      for (const auto& [kind, seconds] : without) ratios[kind].push_back(seconds / with[kind]);
    }
    std::string line = fmt::format("{} budget {} temperature {}, times none:", who, budget, temperature);
    for (auto& [kind, values] : ratios) {
      std::sort(values.begin(), values.end());
      line +=
          fmt::format(" {} {:.3f} ({:.3f}..{:.3f}; {:.2f} tokens a step)", kind, values[values.size() / 2],
                      values.front(), values.back(), kinds[kind].tokens_per_step());
    }
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }

  Options o_;
  GgufFile file_;
  ModelConfig config_;
  std::vector<Prompt> prompts_;
  std::vector<TokenId> stops_;
  std::map<std::string, GgufFile> drafters_;
  std::vector<Text> plain_;
  int n_texts_ = 0, n_different_ = 0;
};

}  // namespace
}  // namespace thermo

int main(int argc, char** argv) {
  try {
    return thermo::Parity(thermo::read_options(argc, argv)).run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
  }
}
