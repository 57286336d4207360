// Whether two computed texts belong together: hashes that differ wherever the same tokens may give other
// numbers.
#pragma once

#include <cstdint>
#include <string>

namespace thermo {

struct ModelConfig;
class GgufFile;
enum class KvType : uint8_t;

// Names and shapes of the file's tensors, and a little of what is in each: two trainings of one model differ
// in every tensor.
std::string file_fingerprint(const GgufFile& file);

// Its file, how positions are rotated, and how keys and values are kept.
std::string model_fingerprint(const GgufFile& file, const ModelConfig& config, KvType k_type, KvType v_type);

}  // namespace thermo
