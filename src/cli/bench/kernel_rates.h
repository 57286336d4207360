// What the kernels reach on this machine: the numbers that predictions start from (engine/speed_model.h).
#pragma once

#include "engine/speed_model.h"
#include "kernels/isa.h"

namespace thermo {

class ThreadPool;

// Products of random weights of that type. About a quarter of a second and 128 MiB.
TypeRates measure_matmul(DType dtype, Isa isa, ThreadPool& pool);

// One row with weights that stay in the caches, as a multiple of `from_memory`.
double measure_cache_gain(DType dtype, Isa isa, double from_memory, ThreadPool& pool);

// Seconds that a parallel region takes in which all threads come together once.
double measure_region(ThreadPool& pool);

}  // namespace thermo
