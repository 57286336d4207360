#include "speculative/ddtree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "base/json.h"

namespace thermo {
namespace {

struct Candidates {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  DraftCandidates view;
};

Candidates candidates_of(const Json& set) {
  Candidates c;
  for (const Json& row : set["token"])
    for (const Json& token : row) c.tokens.push_back(token.get<int32_t>());
  for (const Json& row : set["logprob"])
    for (const Json& value : row) c.logprobs.push_back(value.get<float>());
  c.view = {set["L"].get<int>(), set["K"].get<int>(), c.tokens, c.logprobs};
  return c;
}

TEST(DdTree, GivesTheRecordedTreesSlotForSlot) {
  std::ifstream file(std::string(THERMO_TEST_DATA) + "/ddtree-cases.json");
  ASSERT_TRUE(file);
  const Json cases = Json::parse(file);
  DraftTreeBuilder builder;
  std::vector<DraftNode> nodes;
  int n_trees = 0;
  for (const Json& set : cases["sets"]) {
    const Candidates c = candidates_of(set);
    for (const Json& tree : set["trees"]) {
      SCOPED_TRACE(set["name"].get<std::string>() + " " + tree["budget"].dump());
      builder.build(c.view, tree["budget"].get<int>(), nodes);
      ASSERT_EQ(nodes.size(), tree["nodes"].get<size_t>());
      double expected = 0.0;
      for (size_t i = 0; i < nodes.size(); ++i) {
        EXPECT_EQ(nodes[i].token, tree["token"][i].get<int32_t>()) << i;
        EXPECT_EQ(nodes[i].parent, tree["parent"][i].get<int32_t>()) << i;
        EXPECT_EQ(nodes[i].depth, tree["depth"][i].get<int32_t>()) << i;
        EXPECT_EQ(nodes[i].rank, tree["rank"][i].get<int32_t>()) << i;
        EXPECT_EQ(nodes[i].score, tree["score"][i].get<float>()) << i;
        expected += std::exp(static_cast<double>(nodes[i].score));
      }
      EXPECT_NEAR(expected, tree["expected"].get<double>(), 1e-6);
      ++n_trees;
    }
  }
  EXPECT_EQ(n_trees, 30);
}

Candidates random_candidates(int n_depths, int n_ranks, std::mt19937& random) {
  Candidates c;
  std::exponential_distribution<float> gap(1.5f);
  for (int d = 0; d < n_depths; ++d) {
    float value = -gap(random);
    for (int k = 0; k < n_ranks; ++k) {
      c.tokens.push_back(d * 100 + k);
      c.logprobs.push_back(value);
      value -= gap(random);
    }
  }
  c.view = {n_depths, n_ranks, c.tokens, c.logprobs};
  return c;
}

// So at one place of a text a larger tree never accepts fewer tokens.
TEST(DdTree, BeginsWithTheSmallerTree) {
  std::mt19937 random(6);
  DraftTreeBuilder builder;
  std::vector<DraftNode> largest, nodes;
  for (int round = 0; round < 20; ++round) {
    Candidates c = random_candidates(7, 8, random);
    for (int32_t& token : c.tokens) token %= 30;  // some come twice in a row
    for (const float repeat : {0.0f, -4.0f}) {
      builder.build(c.view, kMaxDraftNodes, largest, repeat);
      for (int budget = 1; budget < kMaxDraftNodes; ++budget) {
        builder.build(c.view, budget, nodes, repeat);
        ASSERT_EQ(nodes.size(), static_cast<size_t>(budget));
        for (size_t i = 0; i < nodes.size(); ++i) {
          ASSERT_EQ(nodes[i].token, largest[i].token) << i << " of " << budget;
          ASSERT_EQ(nodes[i].parent, largest[i].parent) << i << " of " << budget;
        }
      }
    }
  }
}

// Every path, by brute force.
void all_scores(const DraftCandidates& c, int depth, double score, std::vector<double>& out) {
  if (depth > c.n_depths) return;
  for (int k = 0; k < c.n_ranks; ++k) {
    const double node = score + static_cast<double>(c.logprob(depth, k));
    out.push_back(node);
    all_scores(c, depth + 1, node, out);
  }
}

TEST(DdTree, TakesTheHeaviestNodesOfAll) {
  std::mt19937 random(5);
  DraftTreeBuilder builder;
  std::vector<DraftNode> nodes;
  for (int round = 0; round < 50; ++round) {
    const Candidates c = random_candidates(5, 4, random);
    std::vector<double> scores;
    all_scores(c.view, 1, 0.0, scores);
    std::sort(scores.rbegin(), scores.rend());
    for (const int budget : {1, 2, 7, 16, 40, 63}) {
      builder.build(c.view, budget, nodes);
      ASSERT_EQ(nodes.size(), static_cast<size_t>(budget));
      double want = 0.0, got = 0.0;
      for (int i = 0; i < budget; ++i) {
        want += std::exp(scores[static_cast<size_t>(i)]);
        got += std::exp(static_cast<double>(nodes[static_cast<size_t>(i)].score));
        EXPECT_LE(nodes[static_cast<size_t>(i)].parent, i) << "parents come first";
      }
      EXPECT_NEAR(got, want, 1e-5);
    }
  }
}

TEST(DdTree, DoesNotRepeatATokenThatComesNowOrNext) {
  const std::vector<int32_t> tokens = {1, 2, 2, 1, 3, 4};
  const auto logs = [](std::initializer_list<float> p) {
    std::vector<float> out;
    for (const float value : p) out.push_back(std::log(value));
    return out;
  };
  const std::vector<float> logprobs = logs({0.6f, 0.3f, 0.5f, 0.4f, 0.9f, 0.1f});
  DraftTreeBuilder builder;
  std::vector<DraftNode> nodes;
  const auto tokens_of = [&](float repeat) {
    builder.build({3, 2, tokens, logprobs}, 6, nodes, repeat);
    std::vector<int32_t> out;
    for (const DraftNode& node : nodes) {
      EXPECT_LT(node.parent, static_cast<int>(out.size()) + 1);
      out.push_back(node.token);
    }
    return out;
  };
  // 1 2 3 and 1 1 3; without repetitions 1 2 3 and 2 1 3.
  EXPECT_EQ(tokens_of(0.0f), (std::vector<int32_t>{1, 2, 2, 3, 1, 3}));
  EXPECT_EQ(tokens_of(-3.0f), (std::vector<int32_t>{1, 2, 2, 3, 1, 3}));
  EXPECT_EQ(nodes[static_cast<size_t>(nodes[4].parent) - 1].token, 2) << "the 1 after a 2, not after a 1";
  // What both positions have for sure may be repeated.
  const std::vector<int32_t> same = {7, 7};
  const std::vector<float> sure = logs({0.95f, 0.95f});
  builder.build({2, 1, same, sure}, 2, nodes, -3.0f);
  EXPECT_NEAR(std::exp(nodes[1].score), 0.9, 0.01);
}

TEST(DdTree, IsAChainWithOneCandidateAPosition) {
  std::mt19937 random(1);
  const Candidates c = random_candidates(7, 1, random);
  DraftTreeBuilder builder;
  std::vector<DraftNode> nodes;
  builder.build(c.view, 63, nodes);
  ASSERT_EQ(nodes.size(), 7u);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(nodes[static_cast<size_t>(i)].parent, i);
}

TEST(DdTree, EndsAListAtWhatIsNoProbability) {
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  std::vector<float> logprobs = {-0.5f, std::numeric_limits<float>::quiet_NaN(), -0.1f,
                                 -std::numeric_limits<float>::infinity()};
  DraftTreeBuilder builder;
  std::vector<DraftNode> nodes;
  builder.build({2, 2, tokens, logprobs}, 63, nodes);
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[1].token, 3);
  logprobs[0] = std::numeric_limits<float>::quiet_NaN();
  builder.build({2, 2, tokens, logprobs}, 63, nodes);
  EXPECT_TRUE(nodes.empty()) << "nothing to draft: a plain step";
  builder.build({2, 2, tokens, {}}, 0, nodes);
  EXPECT_TRUE(nodes.empty());
}

}  // namespace
}  // namespace thermo
