#include "cli/options/draft_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "base/error.h"
#include "model/model_config.h"
#include "speculative/ddtree.h"

namespace thermo {
namespace {

using ::testing::HasSubstr;
using Kind = DraftOptions::Kind;
using enum OptionSource;

using Sourced = std::vector<std::tuple<const char*, const char*, OptionSource>>;

// Who drafts for a model of a file, given these options.
DraftOptions drafts(const Sourced& all, bool has_block = false, const std::string& model = "model.gguf") {
  DraftFlags flags;
  OptionSet set;
  add_draft_options(set, flags);
  OptionValues values(set);
  for (const auto& [name, value, source] : all) values.add(*set.find(name).option, value, source, name);
  values.apply();
  ModelConfig config;
  config.n_nextn = has_block ? 1 : 0;
  std::optional<GgufFile> file;
  EngineOptions options;
  set_draft_options(flags, model, config, file, options);
  return options.draft;
}

Kind kind(const Sourced& all, bool has_block = false) {
  return drafts(all, has_block).kind;
}

std::string refusal(const Sourced& all, bool has_block = false) {
  try {
    drafts(all, has_block);
  } catch (const ThermoError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(DraftOptions, DraftNothingUnlessAsked) {
  EXPECT_EQ(kind({}), Kind::None);
  EXPECT_EQ(kind({{"--spec-default", "off", CommandLine}}), Kind::None);
  EXPECT_EQ(kind({{"--spec-default", "on", CommandLine}}), Kind::Auto);
}

TEST(DraftOptions, TheCommandLineWins) {
  EXPECT_EQ(kind({{"--draft", "none", CommandLine}, {"-md", "missing.gguf", LlamaEnvironment}}), Kind::None);
  EXPECT_EQ(kind({{"--draft", "lookup", CommandLine}, {"-md", "missing.gguf", LlamaEnvironment}}),
            Kind::Lookup);
  EXPECT_EQ(kind({{"--draft", "none", CommandLine}, {"--spec-default", "on", Environment}}), Kind::None);
  EXPECT_EQ(kind({{"--draft", "lookup", CommandLine}, {"--spec-type", "draft-mtp", File}}), Kind::Lookup);
  EXPECT_EQ(kind({{"--spec-type", "ngram-mod", CommandLine}, {"--draft", "mtp", Environment}}), Kind::Lookup);
  EXPECT_EQ(kind({{"--spec-type", "none", CommandLine}, {"-md", "missing.gguf", File}}), Kind::None);
  EXPECT_EQ(kind({{"--spec-default", "on", CommandLine}, {"--draft", "none", File}}), Kind::Auto);
  EXPECT_EQ(kind({{"--draft", "lookup", Environment}, {"--draft", "none", File}}), Kind::Lookup);
  // A file that a type can use stays.
  EXPECT_THAT(refusal({{"--spec-type", "draft-dflash", CommandLine}, {"-md", "missing.gguf", File}}),
              HasSubstr("missing.gguf"));
  // Who wants a longer draft than before, and who forbids it.
  EXPECT_EQ(drafts({{"--draft-max", "2", CommandLine}, {"--draft-min", "5", LlamaEnvironment}}).min_depth, 0);
  EXPECT_EQ(drafts({{"--draft-max", "2", File}, {"--draft-min", "5", CommandLine}}).max_depth, 0);
}

TEST(DraftOptions, NoneWinsInOnePlaceAndOthersContradict) {
  EXPECT_EQ(kind({{"--draft", "none", CommandLine}, {"-md", "missing.gguf", CommandLine}}), Kind::None);
  EXPECT_EQ(kind({{"--draft", "auto", CommandLine}, {"--spec-type", "ngram-mod", CommandLine}}),
            Kind::Lookup);
  EXPECT_THAT(refusal({{"--draft", "lookup", CommandLine}, {"-md", "missing.gguf", CommandLine}}),
              HasSubstr("contradict"));
  EXPECT_THAT(
      refusal({{"--spec-type", "draft-mtp", CommandLine}, {"-md", "missing.gguf", CommandLine}}, true),
      HasSubstr("contradict"));
}

TEST(DraftOptions, OfAListTheFirstIsTakenThatCanBeHad) {
  const auto of_list = [](const char* list, bool has_block = false) {
    return kind({{"--spec-type", list, CommandLine}}, has_block);
  };
  EXPECT_EQ(of_list("ngram-mod,draft-mtp", true), Kind::Lookup);
  EXPECT_EQ(of_list("draft-mtp,ngram-mod", true), Kind::Mtp);
  EXPECT_EQ(of_list("draft-mtp,ngram-mod", false), Kind::Lookup);
  EXPECT_EQ(of_list("draft-dflash,draft-eagle3,draft-mtp", true), Kind::Mtp);
  const auto refused = [](const char* list) { return refusal({{"--spec-type", list, CommandLine}}); };
  EXPECT_THAT(refused("ngram-whatever"), HasSubstr("ngram-whatever"));
  EXPECT_THAT(refused("ngram-mod,"), HasSubstr("''"));
  EXPECT_THAT(refused("draft-simple"), HasSubstr("draft-dflash, draft-mtp"));
  EXPECT_THAT(refused("draft-dflash"), HasSubstr("--model-draft"));
  EXPECT_THAT(refused("draft-mtp"), HasSubstr("next-token block"));
  // The embedded model has its drafter with it.
  EXPECT_EQ(drafts({{"--spec-type", "draft-dflash", CommandLine}}, true, "").kind, Kind::Auto);
}

TEST(DraftOptions, LongDraftsAreCutToWhatThereIs) {
  const DraftOptions draft =
      drafts({{"--draft-max", "64", CommandLine}, {"--draft-min", "100", CommandLine}});
  EXPECT_EQ(draft.max_depth, kMaxDraftNodes);
  EXPECT_EQ(draft.min_depth, kMaxDraftNodes);
  EXPECT_THAT(refusal({{"--draft-max", "3", CommandLine}, {"--draft-min", "4", CommandLine}}),
              HasSubstr("--draft-max is 3"));
  EXPECT_THAT(refusal({{"--draft-max", "-1", CommandLine}}), HasSubstr("0 to"));
}

}  // namespace
}  // namespace thermo
