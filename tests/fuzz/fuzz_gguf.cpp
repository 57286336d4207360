// Fuzz target: any bytes as a GGUF file. A refusal (LoadError) is fine; a crash, a hang or a read outside the
// input is not.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "gguf/gguf_file.h"

namespace {

// Keeps the reads from being optimised away.
volatile size_t sink;

// Accessors may refuse what the file holds; they may do nothing worse.
template <class Access>
void attempt(Access access) {
  try {
    access();
  } catch (const thermo::LoadError&) {
  }
}

void walk(const thermo::GgufFile& file) {
  size_t sum = 0;
  for (const thermo::GgufEntry& entry : file.metadata()) {
    const std::string_view key = entry.key;
    sum += describe_type(entry.value).size() + describe_value(entry.value).size();
    attempt([&] { sum += file.find_uint(key).value_or(0); });
    attempt([&] { sum += static_cast<size_t>(file.find_int(key).value_or(0)); });
    attempt([&] { sum += file.find_float(key) > 0.0; });
    attempt([&] { sum += file.find_bool(key).value_or(false); });
    attempt([&] { sum += file.find_string(key)->size(); });
    attempt([&] { sum += file.find_uints(key)->size(); });
    attempt([&] { sum += file.find_ints(key)->size(); });
    attempt([&] {
      for (const std::string_view text : file.require_strings(key))
        if (!text.empty()) sum += static_cast<unsigned char>(text.back());
    });
    attempt([&] { sum += file.find_uint_each(key, 3)->size(); });
    attempt([&] { sum += file.find_bool_each(key, 3)->size(); });
  }
  for (const thermo::GgufTensor& tensor : file.tensors()) {
    if (file.find_tensor(tensor.name) != &tensor) __builtin_trap();
    sum += describe_shape(tensor).size();
    for (uint64_t i = 0; i < tensor.n_bytes; ++i) sum += static_cast<size_t>(tensor.data[i]);
  }
  sink = sum;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    walk(thermo::GgufFile(std::as_bytes(std::span(data, size)), "fuzz"));
  } catch (const thermo::LoadError&) {
  }
  return 0;
}
