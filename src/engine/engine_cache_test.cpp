// Requests whose beginning is in the prefix cache: they compute only what is new, and write what they would
// write without the cache.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <future>
#include <random>

#include "base/mapped_file.h"
#include "base/units.h"
#include "engine/engine_thread.h"
#include "engine/testing/token_listener.h"
#include "gguf/gguf_file.h"
#include "kernels/attention/attention.h"
#include "model/model_config.h"

namespace thermo {
namespace {

using Listener = TokenListener;
using Text = std::vector<TokenId>;

const GgufFile& plankton() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  return file;
}

EngineOptions options_for(int n_sequences, int n_ctx) {
  EngineOptions options;
  options.n_ctx = n_ctx;
  options.n_threads = 2;
  options.n_sequences = n_sequences;
  options.device.kind = DeviceChoice::Kind::Cpu;
  return options;
}

using Kind = DraftOptions::Kind;

DraftOptions draft_with(Kind kind, int budget, const GgufFile* file = nullptr) {
  DraftOptions draft;
  draft.kind = kind;
  draft.file = file;
  draft.budget = budget;
  return draft;
}

Text text_of(int seed, int n, int n_vocab = 4000) {
  std::mt19937 random(static_cast<unsigned>(seed));
  Text text;
  for (int i = 0; i < n; ++i) text.push_back(static_cast<TokenId>(random() % static_cast<unsigned>(n_vocab)));
  return text;
}

Text operator+(Text text, const Text& more) {
  text.insert(text.end(), more.begin(), more.end());
  return text;
}

struct Reply {
  Text text;
  std::vector<float> logprobs;
  TokenUsage usage;
};

Reply ask(TokenService& service, const Text& prompt, int n, std::vector<int> marks = {}, bool side = false) {
  Listener listener;
  TokenRequest request = request_of(listener, prompt, n);
  request.marks = std::move(marks);
  request.options.sampling.n_probs = 2;
  request.side_request = side;
  EXPECT_TRUE(service.submit(std::move(request)).has_value());
  const TokensEnded ended = listener.wait();
  EXPECT_FALSE(ended.error);
  return {listener.text(), listener.logprobs(), ended.usage};
}

TEST(EngineCache, ReadsOnlyWhatIsNewAfterManyOtherConversations) {
  const Text system = text_of(1, 400), question = text_of(2, 2600), next = text_of(3, 30);
  for (const int n_sequences : {1, 2}) {
    Engine engine(plankton(), options_for(n_sequences, 4096));
    EngineThread service(engine, {});
    const Reply first = ask(service, system + question, 20, {400, 2990});
    EXPECT_EQ(first.usage.n_cached, 0);
    for (int i = 0; i < 20; ++i)
      EXPECT_EQ(ask(service, system + text_of(10 + i, 60), 5, {400, 450}).usage.n_cached, 400) << i;
    const Text second = system + question + first.text + next;
    const Reply reply = ask(service, second, 10, {400, static_cast<int>(second.size()) - 5});
    EXPECT_GT(reply.usage.n_cached, 3000 + 20 - 64) << n_sequences;
    EXPECT_GE(reply.usage.n_known, 3000 + 19);

    // An edit goes back to the point before it.
    Text edited = second;
    edited[2995] = (edited[2995] + 1) % 4000;
    const Reply changed = ask(service, edited, 5);
    EXPECT_EQ(changed.usage.n_cached, 2990);
    EXPECT_EQ(changed.usage.n_known, 2995);
    ASSERT_FALSE(changed.usage.known_next.empty());
    EXPECT_EQ(changed.usage.known_next[0], second[2995]);
    const CacheCounts cache = service.state().cache;
    EXPECT_LE(cache.bytes, cache.limit_bytes);
    EXPECT_GT(cache.n_points, 20u);
  }
}

TEST(EngineCache, ComesBackEveryFewThousandTokensOfALongPrompt) {
  Engine engine(plankton(), options_for(1, 2048));
  EngineThread service(engine, {.checkpoint_every = 300});
  const Text prompt = text_of(1, 1500);
  ask(service, prompt, 2);
  Text edited = prompt;
  edited[1000] = (edited[1000] + 1) % 4000;
  EXPECT_EQ(ask(service, edited, 2).usage.n_cached, 900);
}

// Two turns, an edit and another conversation in between; with one slot, so that everything comes from the
// cache.
std::vector<Reply> converse(const GgufFile& file, const DraftOptions& draft, uint64_t cache_bytes,
                            int64_t& n_cached) {
  EngineOptions options = options_for(1, 1024);
  options.n_batch = 64;
  options.draft = draft;
  Engine engine(file, options);
  EngineThread service(engine, {.checkpoint_every = 100, .cache_bytes = cache_bytes});
  const int n_vocab = engine.config().n_vocab;
  const auto text = [&](int seed, int n) { return text_of(seed, n, n_vocab); };
  std::vector<Reply> replies;
  const auto reply = [&](const Text& prompt, std::vector<int> marks) {
    replies.push_back(ask(service, prompt, 24, std::move(marks)));
    n_cached += replies.back().usage.n_cached;
    return replies.back().text;
  };
  const Text first = text(1, 270), other = text(2, 300);
  const Text answer = reply(first, {50, 260});
  reply(other, {50});
  const Text second = first + answer + text(3, 40);
  const Text answer2 = reply(second, {50, 300});
  reply(other + text(4, 10), {50});
  Text edited = second + answer2 + text(5, 300);
  reply(edited, {50, 400});
  edited[420] = (edited[420] + 1) % n_vocab;
  reply(edited, {50});
  reply(edited, {50});
  return replies;
}

void expect_same_with_a_cache(const GgufFile& file, const DraftOptions& draft) {
  int64_t n_without = 0, n_with = 0;
  const std::vector<Reply> want = converse(file, draft, 0, n_without);
  const std::vector<Reply> got = converse(file, draft, 256 * MiB, n_with);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].text, want[i].text) << i;
    EXPECT_EQ(got[i].logprobs, want[i].logprobs) << i;  // to the last bit
  }
  EXPECT_GT(n_with, n_without + 800);  // without a cache, the slot has its own checkpoints
}

TEST(EngineCache, ChangesNoBitOfAnAnswer) {
  for (const char* name : {"qwen35moe", "qwen35", "laguna", "qwen3moe"}) {
    SCOPED_TRACE(name);
    const GgufFile file(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf");
    expect_same_with_a_cache(file, {});
  }
  expect_same_with_a_cache(plankton(), {});
}

TEST(EngineCache, ChangesNoBitOfAnAnswerWithADrafter) {
  for (const char* name : {"qwen35moe", "laguna"}) {
    SCOPED_TRACE(name);
    const GgufFile file(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf"),
        drafter(std::string(THERMO_TEST_DATA) + "/dflash-" + name + "-f32.gguf");
    expect_same_with_a_cache(file, draft_with(Kind::File, 6, &drafter));
    expect_same_with_a_cache(file, draft_with(Kind::Lookup, 4));
  }
  expect_same_with_a_cache(plankton(), draft_with(Kind::Mtp, 3));
}

// Two conversations, each in turn, in two runs of the program: the second one goes on with both.
void expect_same_after_a_restart(const GgufFile& file, const DraftOptions& draft, uint64_t cache_bytes) {
  const std::string folder = testing::TempDir() + "/thermo_engine_disk_test." + std::to_string(::getpid());
  std::filesystem::remove_all(folder);
  std::vector<Reply> replies[2];
  for (const bool on_disk : {false, true}) {
    Text texts[2];
    for (int run = 0; run < 2; ++run) {
      EngineOptions options = options_for(1, 2048);
      options.n_batch = 64;
      options.draft = draft;
      Engine engine(file, options);
      const int n_vocab = engine.config().n_vocab;
      EngineThread service(engine, {.cache_bytes = on_disk ? cache_bytes : 0,
                                    .disk_folder = folder,
                                    .disk_bytes = on_disk ? 256 * MiB : 0});
      for (int turn = 0; turn < 2; ++turn)
        for (int i = 0; i < 2; ++i) {
          texts[i] = texts[i] + text_of(100 * i + 10 * run + turn, 300, n_vocab);
          const int n = static_cast<int>(texts[i].size());
          const Reply reply = ask(service, texts[i], 16, {n - 20});
          EXPECT_TRUE(!on_disk || run + turn == 0 || reply.usage.n_cached >= n - 340)
              << run << " " << turn << " " << i << ": " << reply.usage.n_cached << " of " << n;
          texts[i] = texts[i] + reply.text;
          replies[on_disk].push_back(reply);
        }
      const bool reads = on_disk && (run == 1 || cache_bytes < 64 * MiB);
      EXPECT_EQ(service.state().cache.n_disk_read > 0, reads) << run;
    }
  }
  for (size_t i = 0; i < replies[0].size(); ++i) {
    EXPECT_EQ(replies[1][i].text, replies[0][i].text) << i;
    EXPECT_EQ(replies[1][i].logprobs, replies[0][i].logprobs) << i;  // to the last bit
  }
  std::filesystem::remove_all(folder);
}

// A drafter's keys and values are saved with the model's, and are of no use to another one of the same shape;
// nor are those of another rotation.
TEST(EngineCache, ReadsNothingThatAnotherDrafterOrRotationLeft) {
  const std::string folder = testing::TempDir() + "/thermo_engine_drafter_test." + std::to_string(::getpid());
  std::filesystem::remove_all(folder);
  const MappedFile mapped(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  std::vector<std::byte> bytes(mapped.bytes().begin(), mapped.bytes().end());
  const GgufFile trained(mapped.bytes(), "trained");
  const GgufTensor norm = trained.require_tensor("output_norm.weight");
  const float other = 0.5f;
  std::memcpy(bytes.data() + norm.file_offset, &other, sizeof(other));
  const GgufFile changed(std::span<const std::byte>(bytes), "changed");
  struct Run {
    const GgufFile* drafter;
    KvType k_type, v_type;
    bool reads;
    RopeOverride rope = {};
  };
  const Run runs[] = {{&trained, KvType::F16, KvType::Q8_0, false},
                      {&changed, KvType::F16, KvType::Q8_0, false},
                      {&trained, KvType::Q8_0, KvType::F16, false},
                      {&trained, KvType::F16, KvType::Q8_0, false, {.factor = 2.0}},
                      {&trained, KvType::F16, KvType::Q8_0, true}};
  for (const Run& run : runs) {
    EngineOptions options = options_for(1, 1024);
    options.draft = draft_with(Kind::File, 7, run.drafter);
    options.rope = run.rope;
    options.draft.k_type = run.k_type;
    options.draft.v_type = run.v_type;
    Engine engine(plankton(), options);
    EngineThread service(engine, {.cache_bytes = 64 * MiB, .disk_folder = folder, .disk_bytes = 256 * MiB});
    ask(service, text_of(1, 600), 16, {580});
    EXPECT_EQ(service.state().cache.n_disk_read > 0, run.reads);
  }
  std::filesystem::remove_all(folder);
}

TEST(EngineCache, GoesOnAfterARestart) {
  for (const char* name : {"qwen35moe", "laguna", "qwen3moe"}) {
    SCOPED_TRACE(name);
    const GgufFile file(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf");
    expect_same_after_a_restart(file, {}, 256 * MiB);
  }
  expect_same_after_a_restart(plankton(), draft_with(Kind::Mtp, 3), 256 * MiB);
}

TEST(EngineCache, FindsOnDiskWhatLeftMemory) {
  // There is room for one of the two conversations.
  expect_same_after_a_restart(plankton(), {}, 2 * MiB);
}

// A drafter that comes back from the cache guesses as well as one that was there all the time.
TEST(EngineCache, BringsTheDrafterBack) {
  const GgufFile drafter(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  for (const DraftOptions& draft : {draft_with(Kind::File, 8, &drafter), draft_with(Kind::Mtp, 3)}) {
    uint64_t accepted[2] = {};
    for (const bool back : {false, true}) {
      EngineOptions options = options_for(1, 512);
      options.draft = draft;
      Engine engine(plankton(), options);
      EngineThread service(engine, {});
      Text text;
      for (int i = 0; i < 290; ++i) text.push_back(100 + i * i % 7 + i % 11);
      const Text answer = ask(service, text, 40, {250}).text;
      if (back) ask(service, text_of(2, 100), 1);  // without a guess: those would change later ones
      const Reply reply = ask(service, text + answer + Text{17}, 60);
      EXPECT_GE(reply.usage.n_cached, 290 + 39);
      accepted[back] = reply.usage.draft.n_accepted;
    }
    EXPECT_EQ(accepted[true], accepted[false]);
  }
}

// A long prompt is copied in small pieces, so that streams beside it need not wait, and what is copied late
// is what was there when it was stored.
TEST(EngineCache, CopiesLittleBetweenTwoSteps) {
  const GgufFile drafter(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  for (const DraftOptions& draft :
       {DraftOptions{}, draft_with(Kind::File, 4, &drafter), draft_with(Kind::Mtp, 2)}) {
    EngineOptions options = options_for(2, 32768);  // the stream does not end by itself
    options.draft = draft;
    Engine engine(plankton(), options);
    const Text prompt = text_of(1, 2600), next = prompt + text_of(2, 20);
    Text want;
    {
      EngineThread alone(engine, {.cache_bytes = 0});
      want = ask(alone, next, 8).text;
    }
    EngineThread service(engine, {.checkpoint_every = 1000, .copy_bytes = 1000});
    ask(service, text_of(3, 100), 5);
    CacheCounts first;
    while (first.n_tokens == 0) first = service.state().cache;  // after the answer
    const uint64_t token_bytes = first.most_copied / first.n_tokens;
    ASSERT_GT(token_bytes, 100u);
    Listener stream, asked;
    const RequestHandle handle = *service.submit(request_of(stream, text_of(4, 50), -1));
    stream.wait_for_tokens(2);
    TokenRequest request = request_of(asked, prompt, 2);
    request.marks = {2600};
    request.on_event = [on_event = std::move(request.on_event), &stream](TokenEvent event) {
      if (std::holds_alternative<TokensEnded>(event)) stream.hold_at_next_token();
      on_event(std::move(event));
    };
    ASSERT_TRUE(service.submit(std::move(request)).has_value());
    asked.wait();
    stream.wait_until_held();
    EXPECT_GT(service.state().cache.n_uncopied, 1000u);  // a few hundred steps would copy all of it
    stream.release();
    // Its slot goes elsewhere meanwhile.
    ask(service, text_of(5, 300), 2);
    EXPECT_LE(service.state().cache.most_copied, 512 * token_bytes);
    const Reply reply = ask(service, next, 8);
    EXPECT_GE(reply.usage.n_cached, 2600);
    EXPECT_EQ(reply.text, want);
    service.cancel(handle);
    stream.wait();
  }
}

// As many requests as there are slots, right after the start.
TEST(EngineCache, HasMemoryReadyForTheFirstRequests) {
  const GgufFile laguna(std::string(THERMO_TEST_DATA) + "/laguna-f32.gguf");  // points of several sizes
  for (const GgufFile* file : {&plankton(), &laguna})
    for (const bool warm_up : {false, true}) {
      EngineOptions options = options_for(3, 1024);
      if (file == &plankton()) options.draft = draft_with(Kind::Lookup, 4);
      Engine engine(*file, options);
      EngineThread service(engine, {.cache_bytes = 256 * MiB, .warm_up = warm_up});
      const CacheCounts before = service.state().cache;
      EXPECT_EQ(before.spare_bytes > 0, warm_up);
      EXPECT_EQ(before.bytes, before.spare_bytes);
      EXPECT_EQ(before.n_blocks + before.n_points + before.n_tokens + before.n_taken, 0u);
      std::vector<Listener> listeners(3);
      for (int i = 0; i < 3; ++i) {
        TokenRequest request = request_of(listeners[static_cast<size_t>(i)],
                                          text_of(i, 300 + 77 * i, engine.config().n_vocab), 20);
        request.marks = {50, 290 + 77 * i};
        ASSERT_TRUE(service.submit(std::move(request)).has_value());
      }
      for (Listener& listener : listeners) EXPECT_FALSE(listener.wait().error);
      const auto is_done = [&] {
        const CacheCounts now = service.state().cache;
        return now.n_points >= 9 && now.n_uncopied == 0;
      };
      while (!is_done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const CacheCounts after = service.state().cache;
      EXPECT_EQ(after.n_taken == 0, warm_up) << after.n_taken;
      if (warm_up) {
        EXPECT_EQ(after.bytes, before.bytes);
      }
    }
}

// The steps before the first request fit into it, or there are none.
TEST(EngineCache, WarmsUpWithAnyContext) {
  for (int n_ctx = 1; n_ctx <= 12; ++n_ctx) {
    EngineOptions options = options_for(2, n_ctx);
    options.draft = draft_with(Kind::Lookup, 4);
    Engine engine(plankton(), options);
    EngineThread service(engine, {.cache_bytes = 64 * MiB, .warm_up = true});
    EXPECT_EQ(service.n_ctx(), n_ctx);
  }
}

// Evaluations ask for the log probabilities of texts: all rows are computed, whatever the cache has.
TEST(EngineCache, TellsLogProbabilitiesOfPrompts) {
  const Text prompt = text_of(1, 200);
  for (const Kind kind : {Kind::None, Kind::Lookup}) {
    EngineOptions options = options_for(2, 512);
    if (kind != Kind::None) options.draft = draft_with(kind, 4);
    Engine engine(plankton(), options);
    EngineThread service(engine, {});
    // The same of tokens that are written one after the other.
    Listener listener;
    TokenRequest scripted = request_of(listener, {prompt.front()}, 199);
    scripted.options.script.assign(prompt.begin() + 1, prompt.end());
    scripted.options.sampling.n_probs = 3;
    ASSERT_TRUE(service.submit(std::move(scripted)).has_value());
    listener.wait();
    ASSERT_EQ(listener.text(), Text(prompt.begin() + 1, prompt.end()));
    for (const int n_written : {0, 5}) {
      Listener told;
      TokenRequest request = request_of(told, prompt, n_written);
      request.options.sampling.n_probs = 3;
      request.options.prompt_logprobs = true;
      ASSERT_TRUE(service.submit(std::move(request)).has_value());
      const TokensEnded ended = told.wait();
      EXPECT_EQ(ended.usage.n_cached, 0);
      EXPECT_EQ(static_cast<int>(told.text().size()), n_written);
      Text tokens;
      std::vector<float> logprobs;
      for (const GeneratedToken& token : told.prompt()) {
        tokens.push_back(token.id);
        for (const TokenLogprob& entry : token.logprobs) logprobs.push_back(entry.logprob);
      }
      EXPECT_EQ(tokens, prompt);
      EXPECT_EQ(logprobs, listener.logprobs());
    }
  }
}

TEST(EngineCache, SaysWhatItHasOfAPromptAndChangesNothing) {
  Engine engine(plankton(), options_for(1, 1024));
  EngineThread service(engine, {});
  const auto look_up = [&](const Text& prompt) {
    std::promise<int> found;
    service.look_up(prompt, [&](int n) { found.set_value(n); });
    return found.get_future().get();
  };
  const Text first = text_of(1, 300), second = text_of(2, 300);
  EXPECT_EQ(look_up(first), 0);
  ask(service, first, 4, {250});
  const Text answer = ask(service, second, 4).text;
  Text edited = first;
  edited[270] = (edited[270] + 1) % 4000;
  EXPECT_EQ(look_up(edited), 250);
  const CacheCounts before = service.state().cache;
  EXPECT_EQ(look_up({}), 0);
  EXPECT_GE(look_up(second + answer + Text{1, 2}), 303);
  const CacheCounts after = service.state().cache;
  EXPECT_EQ(after.bytes, before.bytes);
  EXPECT_EQ(after.n_tokens, before.n_tokens);
  EXPECT_EQ(ask(service, edited, 2).usage.n_cached, 250);
}

TEST(EngineCache, KeepsWhatAnInterruptedPromptHadRead) {
  for (const bool other : {false, true}) {
    EngineOptions options = options_for(1, 8192);
    options.n_batch = 64;
    Engine engine(plankton(), options);
    EngineThread service(engine, {});
    const Text prompt = text_of(1, 8000);
    Listener listener;
    listener.hold_at_prompt(200);
    const RequestHandle handle = *service.submit(request_of(listener, prompt, 4));
    listener.wait_until_held();
    service.cancel(handle);
    listener.release();
    EXPECT_EQ(listener.wait().reason, FinishReason::Cancelled);
    const int n_read = listener.n_read();
    ASSERT_LT(n_read, 8000);
    if (other) ask(service, text_of(2, 50), 2);
    const Text part(prompt.begin(), prompt.begin() + n_read + 40);
    EXPECT_EQ(ask(service, part, 2).usage.n_cached, n_read);
  }
}

TEST(EngineCache, StaysBelowItsLimitWhateverIsSaid) {
  constexpr uint64_t kLimit = 64 * MiB;
  Engine engine(plankton(), options_for(2, 1024));
  EngineThread service(engine, {.checkpoint_every = 128, .cache_bytes = kLimit, .quantum = 8});
  std::mt19937 random(3);
  std::vector<Text> conversations(10);
  int64_t n_cached = 0, n_prompt = 0;
  for (int i = 0; i < 30; ++i) {
    // Three at a time, so that some are parked.
    std::vector<Listener> listeners(3);
    std::vector<size_t> who;
    for (Listener& listener : listeners) {
      who.push_back(random() % conversations.size());
      Text& text = conversations[who.back()];
      if (text.size() > 800) text = {};
      if (!text.empty() && random() % 4 == 0) text.resize(1 + random() % text.size());
      text = text + text_of(static_cast<int>(random() % 5), static_cast<int>(20 + random() % 150));
      TokenRequest request = request_of(listener, text, static_cast<int>(4 + random() % 24));
      request.marks = {20, static_cast<int>(text.size()) - 3};
      request.side_request = random() % 5 == 0;
      n_prompt += static_cast<int64_t>(text.size());
      EXPECT_TRUE(service.submit(std::move(request)).has_value());
    }
    for (size_t k = 0; k < 3; ++k) {
      n_cached += listeners[k].wait().usage.n_cached;
      conversations[who[k]] = conversations[who[k]] + listeners[k].text();
      ASSERT_LE(service.state().cache.bytes, kLimit);
    }
  }
  EXPECT_GT(n_cached, n_prompt / 4);
  EXPECT_EQ(service.state().cache.limit_bytes, kLimit);
}

// --- Time slices ---

TEST(TimeSlices, ShareSlotsWithoutReadingAnythingTwice) {
  constexpr int kRequests = 6, kPrompt = 40;
  const GgufFile drafter(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  for (const DraftOptions& draft : {DraftOptions{}, draft_with(Kind::File, 8, &drafter)}) {
    std::vector<Text> alone;
    {
      Engine engine(plankton(), options_for(1, 1024));
      EngineThread service(engine, {});
      for (int i = 0; i < kRequests; ++i) alone.push_back(ask(service, text_of(i, kPrompt), 240).text);
    }
    EngineOptions options = options_for(2, 1024);
    options.draft = draft;
    Engine engine(plankton(), options);
    EngineThread service(engine, {.quantum = 32});
    std::vector<Listener> listeners(kRequests);
    listeners[0].hold_at_tokens(160);
    for (int i = 0; i < kRequests; ++i)
      EXPECT_TRUE(service.submit(request_of(listeners[i], text_of(i, kPrompt), 240)).has_value());
    listeners[0].wait_until_held();
    size_t least = SIZE_MAX, most = 0;
    for (const Listener& listener : listeners) {
      least = std::min(least, listener.text().size());
      most = std::max(most, listener.text().size());
    }
    EXPECT_GE(static_cast<double>(least), 0.75 * static_cast<double>(most)) << least << " " << most;
    listeners[0].release();
    for (int i = 0; i < kRequests; ++i) {
      EXPECT_EQ(listeners[i].wait().reason, FinishReason::Length);
      EXPECT_EQ(listeners[i].text(), alone[static_cast<size_t>(i)]) << i;
    }
    const TokenServiceState state = service.state();
    EXPECT_EQ(state.n_prompt_computed, static_cast<uint64_t>(kRequests * kPrompt));
    EXPECT_GT(state.n_parkings, 20u);
  }
}

TEST(TimeSlices, EndAtAnyMomentAndPause) {
  Engine engine(plankton(), options_for(1, 512));
  EngineThread service(engine, {.quantum = 4});
  std::vector<Listener> listeners(4);
  std::vector<RequestHandle> handles;
  listeners[3].hold_at_tokens(8);
  for (int i = 0; i < 4; ++i)
    handles.push_back(*service.submit(request_of(listeners[i], text_of(i, 20), i == 0 ? 60 : 300)));
  listeners[3].wait_until_held();
  for (const Listener& listener : listeners) EXPECT_GE(listener.text().size(), 4u);
  service.pause(handles[1], true);
  service.cancel(handles[2]);
  listeners[3].release();
  EXPECT_EQ(listeners[2].wait().reason, FinishReason::Cancelled);
  EXPECT_EQ(listeners[0].wait().reason, FinishReason::Length);
  const size_t n_paused = listeners[1].text().size();
  EXPECT_LT(n_paused, 300u);
  service.cancel(handles[3]);
  EXPECT_EQ(listeners[3].wait().reason, FinishReason::Cancelled);
  service.pause(handles[1], false);
  EXPECT_EQ(listeners[1].wait().reason, FinishReason::Length);
  EXPECT_EQ(listeners[1].text(), ask(service, text_of(1, 20), 300).text);
  EXPECT_EQ(service.state().n_parked, 0);
}

// Nothing is taken from a request that could not go on.
TEST(TimeSlices, LeaveARequestItsSlotWhereThereIsNoMemory) {
  Engine engine(plankton(), options_for(1, 512));
  EngineThread service(engine, {.cache_bytes = 0, .quantum = 4});
  std::vector<Listener> listeners(3);
  for (int i = 0; i < 3; ++i)
    EXPECT_TRUE(service.submit(request_of(listeners[i], text_of(i, 20), 40)).has_value());
  for (Listener& listener : listeners) EXPECT_EQ(listener.wait().reason, FinishReason::Length);
  EXPECT_EQ(service.state().n_prompt_computed, 60u);
  EXPECT_EQ(service.state().n_parkings, 0u);
}

}  // namespace
}  // namespace thermo
