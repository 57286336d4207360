// Work recorded once and replayed with one call. A graph holds raw addresses: what it touches must outlive
// it.
#pragma once

#include <functional>

#include "device/stream.h"

struct CUgraphExec_st;

namespace thermo {

class CapturedGraph {
 public:
  CapturedGraph() = default;
  // Records what `work` queues on the stream. Throws CudaError.
  CapturedGraph(StreamView stream, const std::function<void()>& work);
  ~CapturedGraph();
  CapturedGraph(CapturedGraph&& other) noexcept;
  CapturedGraph& operator=(CapturedGraph&& other) noexcept;

  bool empty() const noexcept { return exec_ == nullptr; }
  int n_nodes() const noexcept { return n_nodes_; }
  bool replay(StreamView stream) const noexcept;

 private:
  CUgraphExec_st* exec_ = nullptr;
  int n_nodes_ = 0;
};

}  // namespace thermo
