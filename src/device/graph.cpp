#include "device/graph.h"

#include <utility>

#include "device/cuda_check.h"

namespace thermo {

CapturedGraph::CapturedGraph(StreamView stream, const std::function<void()>& work) {
  cudaGraph_t graph = nullptr;
  cuda_check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal), "recording a step");
  work();
  cuda_check(cudaStreamEndCapture(stream.handle, &graph), "recording a step");
  size_t n = 0;
  cudaGraphGetNodes(graph, nullptr, &n);
  n_nodes_ = static_cast<int>(n);
  const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
  cudaGraphDestroy(graph);
  cuda_check(status, "preparing a recorded step");
  // Otherwise the first replay would wait for it.
  cuda_check(cudaGraphUpload(exec_, stream.handle), "preparing a recorded step");
}

CapturedGraph::~CapturedGraph() {
  if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
}

CapturedGraph::CapturedGraph(CapturedGraph&& other) noexcept
    : exec_(std::exchange(other.exec_, nullptr)), n_nodes_(other.n_nodes_) {}

CapturedGraph& CapturedGraph::operator=(CapturedGraph&& other) noexcept {
  std::swap(exec_, other.exec_);
  std::swap(n_nodes_, other.n_nodes_);
  return *this;
}

bool CapturedGraph::replay(StreamView stream) const noexcept {
  return cudaGraphLaunch(exec_, stream.handle) == cudaSuccess;
}

}  // namespace thermo
