#include "model/model_fingerprint.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/sha256.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"

namespace thermo {
namespace {

void add(Sha256& hash, std::string_view text) {
  hash.update(std::as_bytes(std::span(text)));
}

}  // namespace

std::string file_fingerprint(const GgufFile& file) {
  constexpr size_t kBytesOfATensor = 64;
  Sha256 hash;
  for (const GgufTensor& tensor : file.tensors()) {
    add(hash, fmt::format("{} {} {}\n", tensor.name, static_cast<int>(tensor.dtype), describe_shape(tensor)));
    hash.update({tensor.data, std::min<size_t>(tensor.n_bytes, kBytesOfATensor)});
  }
  return hash.finish();
}

std::string model_fingerprint(const GgufFile& file, const ModelConfig& config, KvType k_type, KvType v_type) {
  Sha256 hash;
  add(hash, file_fingerprint(file));
  for (const RopeConfig& r : config.ropes)
    add(hash,
        fmt::format("{} {} {} {} {} {} {} {} {}\n", r.n_rot, r.freq_base, static_cast<int>(r.scaling),
                    r.factor, r.original_context, r.beta_fast, r.beta_slow, r.extrapolation, r.attention));
  add(hash, fmt::format("{} {}\n", static_cast<int>(k_type), static_cast<int>(v_type)));
  return hash.finish();
}

}  // namespace thermo
