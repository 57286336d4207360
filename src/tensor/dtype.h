// Element types of GGUF tensors: ids as in the file, block sizes, names.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace thermo {

// The values are the type ids of the file format.
enum class DType : uint32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  I8 = 24,
  I16 = 25,
  I32 = 26,
  I64 = 27,
  F64 = 28,
  BF16 = 30,
  MXFP4 = 39,
};

struct DTypeInfo {
  DType dtype;
  const char* name;
  int block_elements;  // elements per block
  int block_bytes;     // bytes per block
  bool is_weight;      // the engine can multiply by it
};

// Facts about a supported type; `dtype` must be one of the enumerators.
const DTypeInfo& dtype_info(DType dtype);

// The type with this file id, or nullopt when the engine cannot read it.
std::optional<DType> dtype_from_id(uint32_t id);

// Name of any id of the file format, also of those we refuse ("IQ2_XXS"); "unknown" when there is none.
const char* file_type_name(uint32_t id);

inline const char* dtype_name(DType dtype) {
  return dtype_info(dtype).name;
}
// Bytes of a row of n elements; n must be a multiple of the block.
inline uint64_t row_bytes(DType dtype, uint64_t n) {
  const DTypeInfo& info = dtype_info(dtype);
  return n / static_cast<uint64_t>(info.block_elements) * static_cast<uint64_t>(info.block_bytes);
}

}  // namespace thermo
