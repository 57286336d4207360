#include "model/check_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "gguf/gguf_writer.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

using testing::HasSubstr;

std::vector<std::byte> encode(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(row_bytes(dtype, values.size()));
  quantize_row(dtype, values.data(), static_cast<int64_t>(values.size()), bytes.data());
  return bytes;
}

struct TestTensor {
  const char* name;
  DType dtype;
  std::vector<uint64_t> dims;
  std::vector<std::byte> bytes;
};

// "": nothing was wrong.
std::string fault_of(const std::vector<TestTensor>& tensors, int n_threads) {
  GgufWriter writer;
  for (const TestTensor& t : tensors) writer.add_tensor(t.name, t.dtype, t.dims, t.bytes);
  const std::vector<std::byte> file = writer.to_bytes();
  ThreadPool pool({.n_threads = n_threads});
  uint64_t last = 0, total = 0;
  try {
    check_tensors(GgufFile(file, "test.gguf"), pool, [&](const LoadProgress& now) {
      EXPECT_GE(now.done_bytes, last);
      last = now.done_bytes;
      total = now.total_bytes;
    });
  } catch (const LoadError& error) {
    return error.what();
  }
  EXPECT_EQ(last, total);
  return "";
}

TEST(CheckTensors, FindsTheFirstTensorWithANumberThatIsNotFinite) {
  for (const int n_threads : {1, 3}) {
    std::vector<TestTensor> tensors;
    for (const DType dtype : {DType::F32, DType::F16, DType::Q8_0, DType::Q4_K, DType::MXFP4})
      tensors.push_back({dtype_name(dtype), dtype, {512, 3}, encode(dtype, std::vector<float>(1536, 0.5f))});
    tensors.push_back({"ids", DType::I32, {4}, std::vector<std::byte>(16, std::byte{0xff})});  // no weights
    EXPECT_EQ(fault_of(tensors, n_threads), "");

    // The scale of the last block of Q8_0 is infinite, and so is a float of a later tensor.
    const uint16_t infinite = 0x7c00;
    std::memcpy(tensors[2].bytes.data() + tensors[2].bytes.size() - 34, &infinite, sizeof infinite);
    std::vector<float> later(1536, 1.0f);
    later[7] = NAN;
    tensors.push_back({"later", DType::F32, {1536}, encode(DType::F32, later)});
    EXPECT_THAT(fault_of(tensors, n_threads), HasSubstr("tensor Q8_0 ([512, 3], Q8_0)"));
    EXPECT_THAT(fault_of(tensors, n_threads), HasSubstr("at element 1504 of 1536"));
  }
}

TEST(CheckTensors, LooksAtSmallTensorsOfFloatsAtEveryLoad) {
  std::vector<float> norm(64, 1.0f);
  norm[5] = NAN;
  for (const DType dtype : {DType::F32, DType::F16}) {
    GgufWriter writer;
    const std::vector<std::byte> data = encode(dtype, norm);
    writer.add_tensor("output_norm.weight", dtype, std::vector<uint64_t>{64}, data);
    const std::vector<std::byte> bytes = writer.to_bytes();
    const GgufFile file(bytes, "test.gguf");
    std::string fault;
    try {
      check_small_tensors(file);
    } catch (const LoadError& error) {
      fault = error.what();
    }
    if (dtype == DType::F32)
      EXPECT_THAT(fault, HasSubstr("tensor output_norm.weight ([64], F32)"));
    else
      EXPECT_EQ(fault, "");
  }
}

TEST(CheckTensors, LooksAtTheEndOfLargeTensors) {
  constexpr size_t kCount = (2u << 20) + 96;  // two tasks, and a short one
  std::vector<float> values(kCount, 1.0f);
  values.back() = -INFINITY;
  EXPECT_THAT(fault_of({{"large", DType::F32, {kCount}, encode(DType::F32, values)}}, 2),
              HasSubstr("at element 2097247 of 2097248"));
}

}  // namespace
}  // namespace thermo
