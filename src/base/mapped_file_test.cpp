#include "base/mapped_file.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <utility>

namespace thermo {
namespace {

constexpr size_t kPage = 4096;

std::string write_pages(const char* name, int n_pages) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << std::string(static_cast<size_t>(n_pages) * kPage - 10, 'x');
  return path;
}

char at(const MappedFile& file, size_t offset) {
  return static_cast<char>(*static_cast<const volatile std::byte*>(file.bytes().data() + offset));
}

TEST(MappedFile, ReadsZerosWhereItsFileBecameShorterAndSaysSo) {
  const std::string path = write_pages("shrinks", 8), other_path = write_pages("stays", 2);
  MappedFile file(path);
  const MappedFile other(other_path);
  EXPECT_EQ(at(file, 8 * kPage - 11), 'x');
  std::filesystem::resize_file(path, 2 * kPage);
  EXPECT_EQ(at(file, kPage), 'x');
  EXPECT_FALSE(file.lost());
  EXPECT_EQ(at(file, 3 * kPage + 5), 0);
  EXPECT_TRUE(file.lost());
  EXPECT_EQ(at(file, 8 * kPage - 1), 0);  // the last page, including what comes after the file's old end
  EXPECT_EQ(at(file, 2 * kPage), 0);      // before the first page that was missed
  EXPECT_EQ(at(file, kPage), 'x');

  const MappedFile moved = std::move(file);
  EXPECT_TRUE(moved.lost());
  EXPECT_FALSE(other.lost());
  EXPECT_EQ(at(other, kPage), 'x');
  EXPECT_TRUE(MappedFile::any_lost());
}

TEST(MappedFile, BeginsAnewWithANewMapping) {
  const std::string path = write_pages("again", 4);
  for (int round = 0; round < 600; ++round) {  // more than can be open at once
    const MappedFile file(path);
    ASSERT_FALSE(file.lost());
    ASSERT_EQ(at(file, 3 * kPage), 'x');
    if (round % 100 != 0) continue;
    std::filesystem::resize_file(path, kPage);
    ASSERT_EQ(at(file, 3 * kPage), 0);
    ASSERT_TRUE(file.lost());
    write_pages("again", 4);
  }
}

// An address that is not ours ends the program as usual.
TEST(MappedFileDeathTest, LeavesOtherBusErrorsAlone) {
  const MappedFile file(write_pages("bystander", 1));
  EXPECT_DEATH(raise(SIGBUS), "");
}

}  // namespace
}  // namespace thermo
