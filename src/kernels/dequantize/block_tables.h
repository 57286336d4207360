// The two value tables of the 4-bit formats that are not linear, for every kernel that reads them.
#pragma once

#include <cstdint>

namespace thermo {

// IQ4_NL and IQ4_XS: the value of each nibble.
inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

// MXFP4: E2M1 values doubled, so that they are integers; the block exponent has bias 128 to make up for it.
inline constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace thermo
