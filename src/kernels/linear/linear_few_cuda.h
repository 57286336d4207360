// Products of 2 to 64 rows (linear_few.cuh), by the sets of weight types that are compiled apart.
#pragma once

#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/sum_cuts.h"

namespace thermo {

struct FewPlan;
void launch_few_any(FewPlan& plan, StreamView stream) noexcept;

// How the columns of a call are added up.
SumCuts linear_sum_cuts(const DeviceLinearArgs& args) noexcept;
// Whether a job can run there: quantised weights, and rows in the form that they read.
bool linear_few_possible(const DeviceLinearArgs& args, int job) noexcept;
void linear_few_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept;
// The same, and of one row, of a matrix with panels for every multiprocessor; false: it is none, or the card
// has too little memory for the rows.
bool linear_stream_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept;

}  // namespace thermo
