#include "embedded/embedded_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/mapped_file.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

TEST(EmbeddedModel, HoldsTheBytesOfTheFiles) {
  const std::string folder = THERMO_MODELS;
  MappedFile model(folder + "/plankton-q4_k_m.gguf");
  MappedFile drafter(folder + "/plankton-draft-q8_0.gguf");
  EXPECT_TRUE(std::ranges::equal(embedded_model(), model.bytes()));
  EXPECT_TRUE(std::ranges::equal(embedded_drafter(), drafter.bytes()));
}

TEST(EmbeddedModel, IsAlignedForVectorLoads) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(embedded_model().data()) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(embedded_drafter().data()) % 64, 0u);
  GgufFile file(embedded_model(), "embedded");
  for (const GgufTensor& tensor : file.tensors())
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data) % 32, 0u) << tensor.name;
}

}  // namespace
}  // namespace thermo
