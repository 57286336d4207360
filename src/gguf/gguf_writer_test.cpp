#include "gguf/gguf_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<std::byte> filled(size_t n, int seed) {
  std::vector<std::byte> bytes(n);
  for (size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<std::byte>((i * 7 + static_cast<size_t>(seed)) & 0xFF);
  return bytes;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const LoadError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a LoadError";
  return {};
}

class GgufWriterFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(::testing::TempDir()) / (std::string("gguf_writer_") + info->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string at(const std::string& name) const { return (folder_ / name).string(); }
  size_t n_files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder_), {}));
  }

  std::filesystem::path folder_;
};

TEST(GgufWriter, WritesEveryValueTypeAsItself) {
  GgufWriter writer;
  writer.set("u8", uint8_t{1});
  writer.set("i8", int8_t{-1});
  writer.set("u16", uint16_t{2});
  writer.set("i16", int16_t{-2});
  writer.set("u32", uint32_t{3});
  writer.set("i32", int32_t{-3});
  writer.set("f32", 0.5F);
  writer.set("bool", true);
  writer.set("string", "text");
  writer.set("u64", uint64_t{4});
  writer.set("i64", int64_t{-4});
  writer.set("f64", 0.25);
  writer.set_array("array", std::vector<uint64_t>{1, 2});
  const std::vector<std::byte> bytes = writer.to_bytes();
  const GgufFile file(bytes, "types");
  for (const GgufEntry& entry : file.metadata()) EXPECT_EQ(gguf_type_name(entry.value.type), entry.key);
  EXPECT_EQ(file.metadata().size(), kGgufTypeCount);
  EXPECT_EQ(file.find_int("i8"), -1);
  EXPECT_EQ(file.find_int("i16"), -2);
  EXPECT_EQ(file.find_int("i32"), -3);
  EXPECT_EQ(file.find_int("i64"), -4);
}

TEST(GgufWriter, ReplacesAKeyThatIsSetAgain) {
  GgufWriter writer;
  writer.set("first", 1);
  writer.set("second", 2);
  writer.set("first", "now text");
  const std::vector<std::byte> bytes = writer.to_bytes();
  const GgufFile file(bytes, "replaced");
  ASSERT_EQ(file.metadata().size(), 2U);
  EXPECT_EQ(file.metadata()[0].key, "first");
  EXPECT_EQ(file.require_string("first"), "now text");
}

TEST(GgufWriter, RoundTripsTensorsOfEveryType) {
  GgufWriter writer;
  std::vector<std::vector<std::byte>> data;
  std::vector<DType> dtypes;
  for (uint32_t id = 0; id < 64; ++id)
    if (const auto dtype = dtype_from_id(id)) dtypes.push_back(*dtype);
  for (const DType dtype : dtypes) data.push_back(filled(row_bytes(dtype, 256) * 3, static_cast<int>(dtype)));
  for (size_t i = 0; i < dtypes.size(); ++i)
    writer.add_tensor(dtype_name(dtypes[i]), dtypes[i], {256, 3}, data[i]);
  const std::vector<std::byte> bytes = writer.to_bytes();
  const GgufFile file(bytes, "types");
  ASSERT_EQ(file.tensors().size(), dtypes.size());
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const GgufTensor& tensor = file.tensors()[i];
    EXPECT_EQ(tensor.dtype, dtypes[i]);
    EXPECT_EQ(tensor.name, dtype_name(dtypes[i]));
    ASSERT_EQ(tensor.n_bytes, data[i].size());
    EXPECT_TRUE(std::equal(data[i].begin(), data[i].end(), tensor.data));
  }
}

TEST(GgufWriter, WritesTheOffsetsThatStrictReadersExpect) {
  GgufWriter writer;
  const auto a = filled(4, 1), b = filled(68, 2), c = filled(4, 3);
  writer.add_tensor("a", DType::F32, {1}, a);
  writer.add_tensor("b", DType::F32, {17}, b);
  writer.add_tensor("c", DType::F32, {1}, c);
  const std::vector<std::byte> bytes = writer.to_bytes();
  const GgufFile file(bytes, "offsets");
  const uint64_t start = file.tensors()[0].file_offset;
  EXPECT_EQ(start % 32, 0U);
  EXPECT_EQ(file.tensors()[1].file_offset, start + 32);
  EXPECT_EQ(file.tensors()[2].file_offset, start + 32 + 96);
  EXPECT_EQ(bytes.size(), start + 32 + 96 + 32);  // the last one is padded too
}

TEST_F(GgufWriterFiles, CopiesAFileByteForByte) {
  const std::string original = std::string(THERMO_TEST_DATA) + "/qwen35-f32.gguf";
  const GgufFile file(original);
  GgufWriter writer;
  for (const GgufEntry& entry : file.metadata()) writer.set(entry.key, entry.value);
  for (const GgufTensor& tensor : file.tensors())
    writer.add_tensor(tensor.name, tensor.dtype,
                      std::vector<uint64_t>(tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims),
                      std::span(tensor.data, tensor.n_bytes));
  writer.write(at("copy.gguf"));
  const MappedFile copy(at("copy.gguf"));
  const auto expected = file.part(0)->bytes();
  ASSERT_EQ(copy.bytes().size(), expected.size());
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), copy.bytes().begin()));
}

TEST_F(GgufWriterFiles, StreamsATensorInPieces) {
  // 6 MiB in pieces of an odd size, some of them larger than the writer's buffer.
  const std::vector<std::byte> small = filled(1001, 1), large = filled(3 * MiB + 5, 2);
  const uint64_t n_bytes = small.size() * 3000 + large.size();
  GgufWriter writer;
  writer.add_tensor("stream", DType::I8, {n_bytes}, [&](const ByteSink& sink) {
    for (int i = 0; i < 1500; ++i) sink(small);
    sink(large);
    for (int i = 0; i < 1500; ++i) sink(small);
  });
  writer.write(at("stream.gguf"));
  const GgufFile file(at("stream.gguf"));
  const GgufTensor& tensor = file.require_tensor("stream");
  ASSERT_EQ(tensor.n_bytes, n_bytes);
  EXPECT_TRUE(std::equal(small.begin(), small.end(), tensor.data));
  EXPECT_TRUE(std::equal(large.begin(), large.end(), tensor.data + 1500 * small.size()));
  EXPECT_TRUE(std::equal(small.begin(), small.end(), tensor.data + n_bytes - small.size()));
  EXPECT_EQ(n_files(), 1U);
}

TEST_F(GgufWriterFiles, ReplacesAFileWithoutDisturbingItsReaders) {
  GgufWriter before, after;
  before.set("text", "before");
  after.set("text", "after");
  before.write(at("model.gguf"));
  const GgufFile open_file(at("model.gguf"));
  after.write(at("model.gguf"));
  EXPECT_EQ(open_file.require_string("text"), "before");
  EXPECT_EQ(GgufFile(at("model.gguf")).require_string("text"), "after");
}

TEST_F(GgufWriterFiles, WritesThroughALink) {
  GgufWriter writer;
  writer.set("text", "before");
  writer.write(at("target.gguf"));
  std::filesystem::create_symlink(at("target.gguf"), at("link.gguf"));
  writer.set("text", "after");
  writer.write(at("link.gguf"));
  EXPECT_TRUE(std::filesystem::is_symlink(at("link.gguf")));
  EXPECT_EQ(GgufFile(at("target.gguf")).require_string("text"), "after");
}

TEST_F(GgufWriterFiles, SaysWhyItCannotWrite) {
  const GgufWriter writer;
  EXPECT_THAT(error_of([&] { writer.write(at("no/such/folder.gguf")); }),
              AllOf(HasSubstr("no/such/folder.gguf"), HasSubstr("No such file or directory")));
  EXPECT_THAT(error_of([&] { writer.write(folder_.string()); }), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of([&] { writer.write("/dev/full"); }), HasSubstr("not a regular file"));
}

TEST_F(GgufWriterFiles, RefusesAFileThatTheDiskCannotHoldBeforeWritingIt) {
  GgufWriter writer;
  writer.add_tensor("huge", DType::I8, {1ULL << 60},
                    [](const ByteSink&) { ADD_FAILURE() << "should not be asked"; });
  EXPECT_THAT(error_of([&] { writer.write(at("huge.gguf")); }), AllOf(HasSubstr("needs"), HasSubstr("free")));
  EXPECT_EQ(n_files(), 0U);
}

TEST_F(GgufWriterFiles, LeavesNothingBehindWhenTheDiskRefuses) {
  // A limit on the file size stands in for a full disk.
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  rlimit limit = old_limit;
  limit.rlim_cur = 2 * MiB;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::vector<std::byte> data = filled(5 * MiB, 1);
  GgufWriter writer;
  writer.add_tensor("t", DType::I8, {data.size()}, data);
  const std::string message = error_of([&] { writer.write(at("model.gguf")); });
  ::setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(message, AllOf(HasSubstr("model.gguf"), HasSubstr("2.00 MiB"), HasSubstr("too large")));
  EXPECT_EQ(n_files(), 0U);
}

TEST_F(GgufWriterFiles, LeavesNothingBehindWhenASourceThrows) {
  GgufWriter writer;
  writer.add_tensor("t", DType::I8, {100}, [](const ByteSink&) { throw std::runtime_error("source"); });
  EXPECT_THROW(writer.write(at("model.gguf")), std::runtime_error);
  EXPECT_EQ(n_files(), 0U);
}

TEST(GgufWriterDeathTest, StopsAtATensorTheFormatDoesNotAllow) {
  const auto data = filled(144, 1);
  GgufWriter writer;
  writer.add_tensor("t", DType::Q4_K, {256}, data);
  EXPECT_DEATH(writer.add_tensor("t", DType::Q4_K, {256}, data), "unique");
  EXPECT_DEATH(writer.add_tensor("u", DType::Q4_K, {128}, data), "whole number of blocks");
  EXPECT_DEATH(writer.add_tensor("u", DType::Q4_K, {256, 2}, data), "size");
  EXPECT_DEATH(writer.add_tensor("u", DType::F32, {0}, data), "is 0");
  GgufWriter short_source;
  short_source.add_tensor("t", DType::I8, {3}, [&](const ByteSink& sink) { sink(std::span(data).first(2)); });
  EXPECT_DEATH(short_source.to_bytes(), "fewer bytes");
}

}  // namespace
}  // namespace thermo
