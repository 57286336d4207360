#include "grammar/grammar_cache.h"

#include <gtest/gtest.h>

namespace thermo {
namespace {

struct Asker {
  GrammarCache& cache;
  int n_compiled = 0;

  std::shared_ptr<const Grammar> ask(const std::string& schema) {
    const auto compiled = cache.get(schema, [&] {
      ++n_compiled;
      return compile_json_schema(Json::parse(schema));
    });
    return compiled ? compiled->grammar : nullptr;
  }
};

TEST(GrammarCache, CompilesOnceWhatIsAskedForAgain) {
  GrammarCache cache;
  Asker asker{cache};
  const auto first = asker.ask(R"({"type": "integer"})");
  EXPECT_NE(asker.ask(R"({"type": "string"})"), first);
  EXPECT_EQ(asker.ask(R"({"type": "integer"})"), first);
  EXPECT_EQ(asker.n_compiled, 2);
  EXPECT_EQ(cache.n_found(), 1u);
  const auto listed =
      cache.get("x", [] { return compile_json_schema(Json::parse(R"({"uniqueItems": true})")); });
  EXPECT_EQ(cache.get("x", [] { return Result<SchemaGrammar>(Error{}); })->ignored, listed->ignored);
}

TEST(GrammarCache, KeepsNoErrors) {
  GrammarCache cache;
  Asker asker{cache};
  for (int i = 0; i < 2; ++i) EXPECT_EQ(asker.ask(R"({"type": "number of things"})"), nullptr);
  EXPECT_EQ(asker.n_compiled, 2);
}

TEST(GrammarCache, ForgetsWhatWasNotUsedForLongest) {
  const std::vector<std::string> schemas = {R"({"enum": ["a"]})", R"({"enum": ["b"]})", R"({"enum": ["c"]})"};
  const size_t n_bytes = (*compile_json_schema(Json::parse(schemas[0]))).grammar->n_bytes();
  GrammarCache cache(2 * n_bytes + n_bytes / 2);
  Asker asker{cache};
  for (const int i : {0, 1, 0, 2, 0}) asker.ask(schemas[static_cast<size_t>(i)]);
  EXPECT_EQ(asker.n_compiled, 3);
  asker.ask(schemas[1]);
  EXPECT_EQ(asker.n_compiled, 4);
  GrammarCache none(1);
  Asker other{none};
  for (int i = 0; i < 2; ++i) EXPECT_NE(other.ask(schemas[0]), nullptr);
  EXPECT_EQ(other.n_compiled, 2);
}

}  // namespace
}  // namespace thermo
