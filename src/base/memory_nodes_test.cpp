#include "base/memory_nodes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

namespace thermo {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(MemoryNodes, ListsOfNumbersAreRead) {
  EXPECT_THAT(numbers_of_list("0-3,8,10-11"), ElementsAre(0, 1, 2, 3, 8, 10, 11));
  EXPECT_THAT(numbers_of_list("5"), ElementsAre(5));
  for (const char* text : {"", "a", "3-1", "1-", "-1", "1,,2", "0-99999999"})
    EXPECT_THAT(numbers_of_list(text), IsEmpty()) << text;
}

TEST(MemoryNodes, AreReadFromTheSystem) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(::testing::TempDir()) / "thermocline-memory-nodes";
  const auto write = [&](const char* name, const char* text) {
    fs::create_directories((folder / name).parent_path());
    std::ofstream(folder / name) << text << "\n";
  };
  write("online", "0,2-3");
  write("has_memory", "0,3");
  write("node0/cpulist", "0-1,4-5");
  write("node2/cpulist", "2-3");
  write("node3/cpulist", "");
  const std::vector<MemoryNode> nodes = memory_nodes(folder.string());
  fs::remove_all(folder);
  EXPECT_THAT(nodes, ElementsAre(MemoryNode{0, {0, 1, 4, 5}, true}, MemoryNode{2, {2, 3}, false},
                                 MemoryNode{3, {}, true}));
  EXPECT_THAT(memory_nodes("/nowhere"), IsEmpty());
}

TEST(MemoryNodes, GiveTheirCoresInTurn) {
  const std::vector<MemoryNode> nodes = {{0, {0, 1, 4, 5}}, {1, {2, 3, 6, 7}}};
  const auto in_turn = [&](std::vector<int> cores) { return cores_in_turn(cores, nodes); };
  EXPECT_THAT(in_turn({0, 1, 2, 3, 4, 5, 6, 7}), ElementsAre(0, 2, 1, 3, 4, 6, 5, 7));
  EXPECT_THAT(in_turn({0, 1, 4, 3}), ElementsAre(0, 3, 1, 4));  // a node has fewer
  EXPECT_THAT(in_turn({9, 2, 0}), ElementsAre(0, 2, 9));        // one is on no node
  EXPECT_THAT(cores_in_turn(std::vector<int>{1, 0}, {}), ElementsAre(1, 0));
}

TEST(MemoryNodes, HaveCoresBesideEachOther) {
  const std::vector<MemoryNode> nodes = {{0, {0, 1, 4, 5}}, {1, {2, 3, 6, 7}}};
  const std::vector<int> cores = {0, 2, 3, 4, 7};
  EXPECT_THAT(cores_beside(6, cores, nodes), ElementsAre(2, 3, 7));
  EXPECT_THAT(cores_beside(0, cores, nodes), ElementsAre(0, 4));
  EXPECT_THAT(cores_beside(9, cores, nodes), ElementsAre(0, 2, 3, 4, 7));
}

TEST(MemoryNodes, MemoryIsSpreadByThreadsStartedLater) {
  int error = 0, policy = -1;
  std::thread([&] {  // the policy ends with the thread
    error = interleave_memory(memory_nodes()) ? 0 : errno;
    std::thread([&] { ::syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0); }).join();
  })
      .join();
  if (error != 0) GTEST_SKIP() << "not allowed here: " << std::strerror(error);
  EXPECT_EQ(policy, 3);  // MPOL_INTERLEAVE
}

}  // namespace
}  // namespace thermo
