#include "experts/heat_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

namespace thermo {
namespace {

using testing::HasSubstr;

ExpertCatalog catalog_of(const std::vector<int>& n_experts) {
  ExpertCatalog catalog;
  catalog.n_active = 2;
  catalog.n_embd = 64;
  for (int n : n_experts) {
    ExpertLayer layer;
    layer.experts.resize(static_cast<size_t>(n));
    catalog.layers.push_back(layer);
  }
  return catalog;
}

class HeatFileTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::temp_directory_path() / ("heat_file_test." + std::to_string(getpid()));
    std::filesystem::create_directories(dir_);
    path_ = dir_ / "model.heat";
    for (int i = 0; i < 100; ++i) {
      heat_.use(0, i % 3, 0.1f);
      heat_.use(2, (i * i) % 4);
      heat_.advance(1);
    }
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string read() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  void write(const std::string& text) const { std::ofstream(path_, std::ios::binary) << text; }
  // The message of the refusal to load it; empty: loaded.
  std::string refusal() {
    HeatMap heat(catalog_);
    const Status status = load_heat(path_, info_, heat);
    EXPECT_TRUE(status || heat.empty());
    return status ? "" : status.error().message;
  }
  void expect_refused_after(const std::string& from, const std::string& to, const std::string& message) {
    ASSERT_TRUE(save_heat(path_, info_, heat_));
    std::string text = read();
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write(text.replace(at, from.size(), to));
    EXPECT_THAT(refusal(), HasSubstr(message)) << to;
    EXPECT_THAT(refusal(), HasSubstr(path_)) << to;
  }

  std::filesystem::path dir_;
  std::string path_;
  ExpertCatalog catalog_ = catalog_of({4, 0, 4});
  HeatFileInfo info_ = HeatFileInfo::of(catalog_, "qwen35moe", "A \"model\"\n");
  HeatMap heat_{catalog_};
};

TEST_F(HeatFileTest, BringsBackExactlyWhatWasSaved) {
  ASSERT_TRUE(save_heat(path_, info_, heat_));
  HeatMap again(catalog_);
  const Status status = load_heat(path_, info_, again);
  ASSERT_TRUE(status) << status.error().message;
  EXPECT_EQ(again.values(), heat_.values());
  EXPECT_EQ(again.n_tokens(), 100u);

  const Result<SavedHeat> saved = read_heat(path_);
  ASSERT_TRUE(saved);
  EXPECT_EQ(saved->info.name, info_.name);
  EXPECT_TRUE(saved->info.same_model(info_));
  EXPECT_EQ(saved->values, heat_.values());
}

TEST_F(HeatFileTest, ServesAnotherQuantizationOfTheSameModel) {
  ASSERT_TRUE(save_heat(path_, info_, heat_));
  info_.name = "the same, smaller";
  EXPECT_EQ(refusal(), "");
}

TEST_F(HeatFileTest, NamesBothModelsWhenItIsOfAnother) {
  const HeatFileInfo other = HeatFileInfo::of(catalog_of({8, 0, 8}), "qwen35moe", "Other");
  ASSERT_TRUE(save_heat(path_, other, HeatMap(catalog_of({8, 0, 8}))));
  EXPECT_THAT(refusal(), HasSubstr("'Other' (3 layers of 8 experts, 2 active, 64 wide)"));
  EXPECT_THAT(refusal(), HasSubstr("(3 layers of 4 experts, 2 active, 64 wide)"));

  HeatFileInfo laguna = info_;
  laguna.architecture = "laguna";
  ASSERT_TRUE(save_heat(path_, laguna, heat_));
  EXPECT_THAT(refusal(), HasSubstr("laguna"));
}

TEST_F(HeatFileTest, SaysWhatIsWrongWithADamagedFile) {
  expect_refused_after("thermocline-heat", "somebody-else", "not a heat file");
  expect_refused_after("\"version\": 1", "\"version\": 2", "version 2 is not known, 1 was expected");
  expect_refused_after("\"version\": 1", "\"version\": \"1\"", "version ?");
  expect_refused_after("\"n_layers\": 3", "\"n_layers\": 4", "says 4 layers but has heat for 3");
  expect_refused_after("\"n_tokens\": 100", "\"n_tokens\": -1", "not a whole number");
  expect_refused_after("\"n_embd\": 64", "\"n_embd\": 6.5", "not a whole number");
  expect_refused_after("\"architecture\"", "\"arch\"", "which model");
  expect_refused_after("  [", "  [-1.5, ", "expert 0 of layer 0 has heat -1.5");
  expect_refused_after("  [", "  [1e300, ", "expert 0 of layer 0 has heat 1e+300");
  expect_refused_after("  [", "  [null, ", "expert 0 of layer 0 has heat null");
  expect_refused_after("  [", "  [NaN, ", "not a heat file");
  expect_refused_after("  [", "  [0, ", "another model");
  expect_refused_after("[]", "{}", "layer 1 is not a list");
}

TEST_F(HeatFileTest, RefusesEveryBeginningOfAFile) {
  ASSERT_TRUE(save_heat(path_, info_, heat_));
  const std::string text = read();
  for (size_t n = 0; n + 2 < text.size(); n += 3) {
    write(text.substr(0, n));
    ASSERT_THAT(refusal(), HasSubstr("not a heat file")) << n;
  }
}

TEST_F(HeatFileTest, SurvivesChangedBytes) {
  ASSERT_TRUE(save_heat(path_, info_, heat_));
  const std::string text = read();
  std::mt19937 random(1);
  int n_refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string changed = text;
    for (uint32_t n = 1 + random() % 4; n > 0; --n) {
      const size_t at = random() % changed.size();
      switch (random() % 3) {
        case 0:
          changed[at] = static_cast<char>(random());
          break;
        case 1:
          changed.erase(at, 1 + random() % 16);
          break;
        default:
          changed.insert(at, text.substr(random() % text.size(), random() % 16));
          break;
      }
    }
    write(changed);
    HeatMap heat(catalog_);
    if (!load_heat(path_, info_, heat)) ++n_refused;
    for (const float value : heat.values()) ASSERT_GE(value, 0.0f);
  }
  EXPECT_GT(n_refused, 1000);
}

TEST_F(HeatFileTest, RefusesWhatIsNoFile) {
  EXPECT_THAT(refusal(), HasSubstr("cannot be read"));
  path_ = dir_;
  EXPECT_NE(refusal(), "");
}

TEST_F(HeatFileTest, LeavesTheOldFileWhenTheNewOneCannotBeWritten) {
  const Status status = save_heat(dir_ / "missing" / "x.heat", info_, heat_);
  ASSERT_FALSE(status);
  EXPECT_THAT(status.error().message, HasSubstr("cannot be written (No such file or directory)"));

  // A path that is a folder: the data can be written beside it, but cannot replace it.
  std::filesystem::create_directories(dir_ / "folder" / "full");
  ASSERT_FALSE(save_heat(dir_ / "folder", info_, heat_));

  ASSERT_TRUE(save_heat(path_, info_, heat_));
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(dir_))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, testing::UnorderedElementsAre("folder", "model.heat"));
}

TEST_F(HeatFileTest, AddsWhatTwoProgramsCounted) {
  ASSERT_TRUE(save_heat(path_, info_, heat_));
  HeatMap start(catalog_);
  ASSERT_TRUE(load_heat(path_, info_, start));
  HeatMap first = start, second = start, both = start;
  for (int i = 0; i < 50; ++i) {
    first.use(0, 1);
    first.advance(1);
  }
  for (int i = 0; i < 70; ++i) {
    second.use(2, 3);
    second.advance(1);
  }
  HeatBase of_first{start, start}, of_second{start, start};
  ASSERT_TRUE(add_heat(path_, info_, first, of_first));
  ASSERT_TRUE(add_heat(path_, info_, second, of_second));
  HeatMap saved(catalog_);
  ASSERT_TRUE(load_heat(path_, info_, saved));
  EXPECT_EQ(saved.n_tokens(), heat_.n_tokens() + 120);
  // As if one program had done the one after the other.
  for (int i = 0; i < 50; ++i) {
    both.use(0, 1);
    both.advance(1);
  }
  for (int i = 0; i < 70; ++i) {
    both.use(2, 3);
    both.advance(1);
  }
  const std::vector<float> want = both.values(), got = saved.values();
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-3f * (1.0f + want[i])) << i;

  // Alone, what is saved is what was counted, and a file of another model is left alone.
  ASSERT_TRUE(load_heat(path_, info_, start));
  HeatBase base{start, start};
  ASSERT_TRUE(add_heat(path_, info_, both, base));
  ASSERT_TRUE(load_heat(path_, info_, saved));
  EXPECT_EQ(saved.n_tokens(), both.n_tokens());
  const HeatFileInfo other = HeatFileInfo::of(catalog_of({8, 0, 8}), "qwen35moe", "Other");
  ASSERT_TRUE(save_heat(path_, other, HeatMap(catalog_of({8, 0, 8}))));
  EXPECT_FALSE(add_heat(path_, info_, both, base));
}

TEST_F(HeatFileTest, AddsToAFileAgainAndAgain) {
  HeatMap ours(catalog_), others(catalog_), all(catalog_);
  HeatBase base{ours, ours}, of_others{others, others};
  const auto count = [](HeatMap& heat, int expert) {
    heat.use(0, expert);
    heat.advance(1);
  };
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 10; ++i) count(ours, 1), count(all, 1);
    ASSERT_TRUE(add_heat(path_, info_, ours, base));
    if (round % 2 == 0) continue;
    for (int i = 0; i < 5; ++i) count(others, 2), count(all, 2);
    ASSERT_TRUE(add_heat(path_, info_, others, of_others));
  }
  HeatMap saved(catalog_);
  ASSERT_TRUE(load_heat(path_, info_, saved));
  EXPECT_EQ(saved.n_tokens(), 50u);
  EXPECT_NEAR(saved.heat(0, 1), all.heat(0, 1), 1.0f);
  EXPECT_NEAR(saved.heat(0, 2), all.heat(0, 2), 0.5f);
}

}  // namespace
}  // namespace thermo
