// Models that are split over several files.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gguf/gguf_writer.h"
#include "gguf/testing/raw_gguf.h"

namespace thermo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A fresh folder, removed with its content.
class GgufSplit : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(::testing::TempDir()) / (std::string("gguf_split_") + info->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string at(const std::string& name) const { return (folder_ / name).string(); }

  // Writes one part with these split keys and one tensor per name, after what `writer` has.
  void write_part(const std::string& file, int no, int count, int n_tensors,
                  const std::vector<std::string>& names, GgufWriter writer = {}) {
    writer.set("split.no", static_cast<uint16_t>(no));
    writer.set("split.count", static_cast<uint16_t>(count));
    writer.set("split.tensors.count", static_cast<int32_t>(n_tensors));
    for (const std::string& name : names) writer.add_tensor(name, DType::F32, {6}, data_);
    writer.write(at(file));
  }

  std::filesystem::path folder_;
  std::vector<std::byte> data_ = filled(24, 1);
};

TEST_F(GgufSplit, OpensAllPartsFromTheFirst) {
  std::vector<std::vector<std::byte>> data;
  for (int i = 0; i < 5; ++i) data.push_back(filled(24, i));
  for (int part = 0; part < 3; ++part) {
    GgufWriter writer;
    if (part == 0) writer.set("general.architecture", "tiny");
    for (int i = 2 * part; i < std::min(5, 2 * part + 2); ++i)
      writer.add_tensor(fmt::format("t{}", i), DType::F32, {6}, data[static_cast<size_t>(i)]);
    write_part(fmt::format("model-0000{}-of-00003.gguf", part + 1), part, 3, 5, {}, std::move(writer));
  }
  const GgufFile file(at("model-00001-of-00003.gguf"));
  EXPECT_EQ(file.n_parts(), 3);
  EXPECT_EQ(file.part(2)->path(), at("model-00003-of-00003.gguf"));
  EXPECT_EQ(file.require_string("general.architecture"), "tiny");
  EXPECT_EQ(file.total_tensor_bytes(), 5U * 24);
  ASSERT_EQ(file.tensors().size(), 5U);
  for (int i = 0; i < 5; ++i) {
    const GgufTensor& tensor = file.tensors()[static_cast<size_t>(i)];
    EXPECT_EQ(tensor.name, fmt::format("t{}", i));
    EXPECT_EQ(tensor.part, i / 2);
    EXPECT_EQ(tensor.data, file.part(tensor.part)->bytes().data() + tensor.file_offset);
    EXPECT_TRUE(std::equal(tensor.data, tensor.data + 24, data[static_cast<size_t>(i)].begin()));
  }
}

TEST_F(GgufSplit, OpensAModelOfOnePart) {
  write_part("m-00001-of-00001.gguf", 0, 1, 1, {"t"});
  EXPECT_EQ(GgufFile(at("m-00001-of-00001.gguf")).tensors().size(), 1U);
}

TEST_F(GgufSplit, ReadsTheAlignmentOfEachPart) {
  GgufWriter aligned;
  aligned.set("general.alignment", uint32_t{128});
  write_part("m-00001-of-00002.gguf", 0, 2, 3, {"a", "b"}, aligned);
  write_part("m-00002-of-00002.gguf", 1, 2, 3, {"c"}, aligned);
  const GgufFile file(at("m-00001-of-00002.gguf"));
  for (const GgufTensor& tensor : file.tensors()) EXPECT_EQ(tensor.file_offset % 128, 0U);
  EXPECT_GT(walk(file), 0U);
}

TEST_F(GgufSplit, AcceptsAFirstPartWithoutTensors) {
  write_part("m-00001-of-00002.gguf", 0, 2, 1, {});
  write_part("m-00002-of-00002.gguf", 1, 2, 1, {"t"});
  const GgufFile file(at("m-00001-of-00002.gguf"));
  ASSERT_EQ(file.tensors().size(), 1U);
  EXPECT_EQ(file.find_tensor("t")->part, 1);
}

TEST_F(GgufSplit, NamesTheFirstPartWhenGivenALaterOne) {
  write_part("m-00001-of-00002.gguf", 0, 2, 2, {"a"});
  write_part("m-00002-of-00002.gguf", 1, 2, 2, {"b"});
  EXPECT_THAT(path_error(at("m-00002-of-00002.gguf")),
              AllOf(HasSubstr("part 2"), HasSubstr(at("m-00001-of-00002.gguf"))));
}

TEST_F(GgufSplit, NamesAMissingPart) {
  write_part("m-00001-of-00002.gguf", 0, 2, 2, {"a"});
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")),
              AllOf(HasSubstr("part 2"), HasSubstr(at("m-00002-of-00002.gguf"))));
}

TEST_F(GgufSplit, RejectsARenamedFirstPart) {
  write_part("m.gguf", 0, 2, 2, {"a"});
  EXPECT_THAT(path_error(at("m.gguf")), HasSubstr("rename"));
  write_part("m-00001-of-00003.gguf", 0, 2, 2, {"a"});
  EXPECT_THAT(path_error(at("m-00001-of-00003.gguf")), HasSubstr("rename"));
}

TEST_F(GgufSplit, RejectsPartsThatDoNotBelongTogether) {
  write_part("m-00001-of-00002.gguf", 0, 2, 2, {"a"});
  write_part("m-00002-of-00002.gguf", 0, 2, 2, {"b"});
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")),
              HasSubstr("says it is part 1 of 2, expected part 2 of 2"));
  write_part("m-00002-of-00002.gguf", 1, 3, 2, {"b"});
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")), HasSubstr("says it is part 2 of 3"));
  write_part("m-00002-of-00002.gguf", 1, 2, 7, {"b"});
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")), HasSubstr("says the whole model has 7"));
  GgufWriter plain;
  plain.add_tensor("b", DType::F32, {6}, data_);
  plain.write(at("m-00002-of-00002.gguf"));
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")),
              AllOf(HasSubstr("m-00002-of-00002.gguf: "), HasSubstr("'split.no' is missing")));
}

TEST_F(GgufSplit, RejectsAWrongTotalOfTensors) {
  write_part("m-00001-of-00002.gguf", 0, 2, 3, {"a"});
  write_part("m-00002-of-00002.gguf", 1, 2, 3, {"b"});
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")), HasSubstr("hold 2 tensors, expected 3"));
}

TEST_F(GgufSplit, RejectsATensorThatIsInTwoParts) {
  write_part("m-00001-of-00002.gguf", 0, 2, 2, {"a"});
  write_part("m-00002-of-00002.gguf", 1, 2, 2, {"a"});
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")), HasSubstr("'a' appears twice"));
}

TEST_F(GgufSplit, RejectsADamagedLaterPart) {
  write_part("m-00001-of-00002.gguf", 0, 2, 2, {"a"});
  write_part("m-00002-of-00002.gguf", 1, 2, 2, {"b"});
  std::filesystem::resize_file(at("m-00002-of-00002.gguf"), 40);
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")), StartsWith(at("m-00002-of-00002.gguf")));
  std::filesystem::resize_file(at("m-00002-of-00002.gguf"), 0);
  EXPECT_THAT(path_error(at("m-00001-of-00002.gguf")), HasSubstr("part 2 is not usable"));
}

TEST_F(GgufSplit, RefusesAPartInMemory) {
  GgufWriter writer;
  writer.set("split.no", uint16_t{0});
  writer.set("split.count", uint16_t{2});
  const std::vector<std::byte> bytes = writer.to_bytes();
  EXPECT_THAT(open_error(bytes), HasSubstr("one part of a split model"));
}

TEST_F(GgufSplit, OpensAMergedFileThatKeptTheKeys) {
  for (const int count : {0, 1}) {
    write_part("merged.gguf", 0, count, 2, {"a", "b"});
    EXPECT_EQ(GgufFile(at("merged.gguf")).tensors().size(), 2U);
  }
}

}  // namespace
}  // namespace thermo
