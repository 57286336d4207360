// What JSON of strangers may look like. The library looks through an object for every member that it adds,
// and what is nested deeply uses up the stack when it is written again, so both are counted in the text,
// before it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace thermo {

struct JsonLimits {
  size_t depth = 128;
  size_t elements = 1'000'000;  // of an array
  size_t members = 10'000;      // of an object
  // The squares of the objects' numbers of members, added up: what finding their places takes.
  uint64_t work = 400'000'000;
};

// What goes beyond them: "it is nested deeper than 128 levels". Empty: nothing does.
std::string beyond_limits(std::string_view text, const JsonLimits& limits = {});

}  // namespace thermo
