// The grid on which the outputs of experts are added.
//
// A term is one float: the router's weight times an expert's output, rounded once. Every term is moved to the
// nearest multiple of 2^-32 (ties to even). Such terms are integers in disguise: a double holds their sum
// exactly while it stays below 2^20, and so does an int64 that counts multiples. Exact sums have no order, so
// it does not matter which experts a processor, a GPU or a round of file reads adds first, or where a sum is
// cut in two.
//
// 2^-32 is 2.3e-10: far below the last bit of any float that matters in a residual stream. Larger sums than
// 2^20 are still right to 53 bits; only their last bits may then depend on the order.
#pragma once

namespace thermo {

inline constexpr double kSumGrid = 1.0 / 4294967296.0;  // 2^-32
// x + kSumMagic - kSumMagic is x on the grid, in doubles, for |x| < 2^19: the last bit of 1.5 * 2^20 is
// 2^-32.
inline constexpr double kSumMagic = 1572864.0;

}  // namespace thermo
