// Numbers of a reply.
#pragma once

#include <charconv>

namespace thermo {

// The number that was meant: 0.95, not 0.949999988.
inline double plain_number(float value) {
  char text[32];
  const char* const end = std::to_chars(text, text + sizeof(text), value).ptr;
  double number = 0.0;
  std::from_chars(text, end, number);
  return number;
}

}  // namespace thermo
