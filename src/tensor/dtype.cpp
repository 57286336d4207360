#include "tensor/dtype.h"

#include "base/check.h"

namespace thermo {
namespace {

constexpr DTypeInfo kTypes[] = {
    {DType::F32, "F32", 1, 4, true},         {DType::F16, "F16", 1, 2, true},
    {DType::Q4_0, "Q4_0", 32, 18, true},     {DType::Q4_1, "Q4_1", 32, 20, true},
    {DType::Q5_0, "Q5_0", 32, 22, true},     {DType::Q5_1, "Q5_1", 32, 24, true},
    {DType::Q8_0, "Q8_0", 32, 34, true},     {DType::Q2_K, "Q2_K", 256, 84, true},
    {DType::Q3_K, "Q3_K", 256, 110, true},   {DType::Q4_K, "Q4_K", 256, 144, true},
    {DType::Q5_K, "Q5_K", 256, 176, true},   {DType::Q6_K, "Q6_K", 256, 210, true},
    {DType::IQ4_NL, "IQ4_NL", 32, 18, true}, {DType::IQ4_XS, "IQ4_XS", 256, 136, true},
    {DType::I8, "I8", 1, 1, false},          {DType::I16, "I16", 1, 2, false},
    {DType::I32, "I32", 1, 4, false},        {DType::I64, "I64", 1, 8, false},
    {DType::F64, "F64", 1, 8, false},        {DType::BF16, "BF16", 1, 2, true},
    {DType::MXFP4, "MXFP4", 32, 17, true},
};

// Every id the format has given out, so that a refusal can name what it saw.
// clang-format off
constexpr const char* kFileTypeNames[] = {
    "F32",     "F16",    "Q4_0",    "Q4_1",   "Q4_2 (retired)", "Q4_3 (retired)", "Q5_0", "Q5_1", "Q8_0",
    "Q8_1",    "Q2_K",   "Q3_K",    "Q4_K",   "Q5_K",           "Q6_K",           "Q8_K", "IQ2_XXS",
    "IQ2_XS",  "IQ3_XXS", "IQ1_S",  "IQ4_NL", "IQ3_S",          "IQ2_S",          "IQ4_XS", "I8",
    "I16",     "I32",    "I64",     "F64",    "IQ1_M",          "BF16",           "Q4_0_4_4 (retired)",
    "Q4_0_4_8 (retired)", "Q4_0_8_8 (retired)", "TQ1_0", "TQ2_0", "IQ4_NL_4_4 (retired)",
    "IQ4_NL_4_8 (retired)", "IQ4_NL_8_8 (retired)", "MXFP4", "NVFP4", "Q1_0", "Q2_0"};
// clang-format on

}  // namespace

const DTypeInfo& dtype_info(DType dtype) {
  for (const DTypeInfo& info : kTypes)
    if (info.dtype == dtype) return info;
  check_failed(__FILE__, __LINE__, "dtype", "a DType that is no enumerator");
}

std::optional<DType> dtype_from_id(uint32_t id) {
  for (const DTypeInfo& info : kTypes)
    if (static_cast<uint32_t>(info.dtype) == id) return info.dtype;
  return std::nullopt;
}

const char* file_type_name(uint32_t id) {
  constexpr uint32_t count = sizeof(kFileTypeNames) / sizeof(kFileTypeNames[0]);
  return id < count ? kFileTypeNames[id] : "unknown";
}

}  // namespace thermo
