// What the kernels reach on this machine: the numbers that predictions start from (engine/speed_model.h).
#pragma once

#include "engine/speed_model.h"
#include "kernels/isa.h"

namespace thermo {

class ThreadPool;

// Products of random weights of that type. About half a second, and more memory than the caches hold.
TypeRates measure_matmul(DType dtype, Isa isa, ThreadPool& pool);

// One row with weights that stay in the caches, as a multiple of `from_memory`.
double measure_cache_gain(DType dtype, Isa isa, double from_memory, ThreadPool& pool);

// Seconds that a small product (kSmallProduct bytes of weights, one row) takes beyond its bytes at the rate
// of a large one: the threads come together, begin to read, and wait for the last.
double measure_small_product(DType dtype, Isa isa, ThreadPool& pool);

}  // namespace thermo
