// Runs a fuzz target without a fuzzing engine: seeds, and random changes of them, for some seconds. The tests
// use it; `make fuzz` builds the same targets with libFuzzer instead.
//
// usage: fuzz_x SECONDS [SEED_FILE ...]
// With FUZZ_KEEP_LAST set, every input is written to fuzz-last-input before it is tried: give that file as
// the only seed with 0 seconds to see a crash again.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t kMaxSize = 1 << 16;

Input read_input(const char* path) {
  std::ifstream file(path, std::ios::binary);
  Input input{std::istreambuf_iterator<char>(file), {}};
  if (input.size() > kMaxSize) input.resize(kMaxSize);
  return input;
}

// One random change: flip, overwrite with an interesting value, insert, remove, copy a piece, or splice two
// inputs.
void change(Input& input, const std::vector<Input>& seeds, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % (n ? n : 1)); };
  const size_t at = below(input.size());
  switch (random() % 7) {
    case 0:
      if (!input.empty()) input[at] = static_cast<uint8_t>(input[at] ^ (1u << (random() % 8)));
      break;
    case 1: {
      const uint64_t values[] = {
          0, 1, 255, 0x7fffffff, 0xffffffff, 0x7fffffffffffffff, 0xffffffffffffffff, input.size()};
      const uint64_t value = values[random() % 8];
      const size_t width = size_t{1} << (random() % 4);
      for (size_t i = 0; i < width && at + i < input.size(); ++i)
        input[at + i] = static_cast<uint8_t>(value >> (8 * i));
      break;
    }
    case 2:
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), 1 + below(16),
                   static_cast<uint8_t>(random()));
      break;
    case 3:
      if (!input.empty())
        input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                    input.begin() + static_cast<std::ptrdiff_t>(at + below(input.size() - at)));
      break;
    case 4: {
      const size_t to = below(input.size());
      const size_t n = below(input.size() - (at > to ? at : to));
      for (size_t i = 0; i < n; ++i) input[to + i] = input[at + i];
      break;
    }
    case 5: {
      const Input& other = seeds[below(seeds.size())];
      input.resize(at);
      input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size())),
                   other.end());
      break;
    }
    default:
      if (!input.empty()) input[at] = static_cast<uint8_t>(random());
  }
  if (input.size() > kMaxSize) input.resize(kMaxSize);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2.0;
  std::vector<Input> seeds;
  for (int i = 2; i < argc; ++i) seeds.push_back(read_input(argv[i]));
  if (seeds.empty()) seeds.push_back({});
  for (const Input& seed : seeds) LLVMFuzzerTestOneInput(seed.data(), seed.size());

  std::mt19937_64 random(1);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  long runs = 0;
  while (std::chrono::steady_clock::now() < deadline) {
    Input input = seeds[random() % seeds.size()];
    for (size_t n = 1 + random() % 4; n > 0; --n) change(input, seeds, random);
    if (std::FILE* file = std::getenv("FUZZ_KEEP_LAST") ? std::fopen("fuzz-last-input", "wb") : nullptr) {
      std::fwrite(input.data(), 1, input.size(), file);
      std::fclose(file);
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++runs;
  }
  std::printf("%zu seeds, %ld changed inputs, no crash\n", seeds.size(), runs);
  return 0;
}
