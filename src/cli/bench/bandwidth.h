// How fast this machine reads memory: the bound that decoding is measured against.
#pragma once

namespace thermo {

class ThreadPool;

// Bytes per second that all threads of the pool read together, each walking several prefetched streams, from
// memory too large for the caches. Takes about half a second and 256 MiB for each thread, at most 2 GiB in
// all; less where the system gives less. 0: it gives too little to measure with.
double measure_read_bandwidth(ThreadPool& pool);

}  // namespace thermo
