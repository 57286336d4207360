// For tests of CUDA kernels: device memory with guard bands, and the rows of a step in device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "device/buffer.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/testing/inputs.h"

namespace thermo::testing {

// n elements between bands of a NaN pattern, which they hold too until something is written.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : n_(n), buffer_(2 * kBand + n * sizeof(T)) {
    cudaMemset(buffer_.data(), kPattern, buffer_.size());
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) { write(from); }

  T* data() const { return reinterpret_cast<T*>(buffer_.data() + kBand); }
  void write(const std::vector<T>& from) {
    cudaMemcpy(data(), from.data(), n_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  std::vector<T> read() const {
    std::vector<T> to(n_);
    cudaMemcpy(to.data(), data(), n_ * sizeof(T), cudaMemcpyDeviceToHost);
    return to;
  }
  // Whether nothing was written outside the elements.
  bool intact() const {
    std::vector<unsigned char> all(buffer_.size());
    cudaMemcpy(all.data(), buffer_.data(), all.size(), cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < kBand; ++i)
      if (all[i] != kPattern || all[all.size() - 1 - i] != kPattern) return false;
    return true;
  }

 private:
  static constexpr size_t kBand = 1024;
  static constexpr int kPattern = 0xff;  // NaN in every float format
  size_t n_;
  DeviceBuffer buffer_;
};

struct StepGroup {
  int past, n_rows;
  bool committed = false;  // beside uncommitted groups
  bool siblings = false;   // of uncommitted rows: none has a parent in the step
};

// Group i is sequence n_groups - 1 - i, so that groups and sequences are not the same by chance. Uncommitted
// rows are a tree of the shape of Inputs::tree().
struct DeviceStep {
  std::vector<StepGroup> groups;
  int n_rows = 0;  // with padding
  std::vector<int32_t> group, position, parent, group_sequence, group_begin, group_rows, group_past,
      group_uncommitted;
  std::vector<uint64_t> ancestors;
  bool any_uncommitted;
  DeviceArray<int32_t> device_ints;
  DeviceArray<uint64_t> device_ancestors;

  // `chains`: uncommitted rows are chains instead.
  DeviceStep(const std::vector<StepGroup>& g, int n_padding, bool uncommitted, uint64_t seed,
             bool chains = false)
      : groups(g),
        any_uncommitted(uncommitted),
        device_ints(fill(n_padding, seed, chains)),
        device_ancestors(ancestors) {}

  int n_valid() const {
    int n = 0;
    for (const StepGroup& g : groups) n += g.n_rows;
    return n;
  }
  int sequence(size_t g) const { return group_sequence[g]; }
  bool uncommitted(size_t g) const { return group_uncommitted[g] != 0; }
  DeviceRows rows() const {
    const int32_t* const base = device_ints.data();
    const size_t n = static_cast<size_t>(n_rows);
    return {.n_valid = base,
            .n_groups = base + 1,
            .token = nullptr,
            .group = base + 2,
            .position = base + 2 + n,
            .parent = base + 2 + 2 * n,
            .ancestors = device_ancestors.data(),
            .group_sequence = base + 2 + 3 * n,
            .group_begin = base + 2 + 4 * n,
            .group_rows = base + 2 + 5 * n,
            .group_past = base + 2 + 6 * n,
            .group_uncommitted = base + 2 + 7 * n,
            .any_uncommitted = any_uncommitted};
  }

 private:
  std::vector<int32_t> fill(int n_padding, uint64_t seed, bool chains) {
    Inputs in(seed);
    const int n_groups = static_cast<int>(groups.size());
    for (int g = 0; g < n_groups; ++g) {
      const StepGroup& step = groups[static_cast<size_t>(g)];
      group_sequence.push_back(n_groups - 1 - g);
      group_begin.push_back(n_rows);
      group_rows.push_back(step.n_rows);
      group_past.push_back(step.past);
      group_uncommitted.push_back(any_uncommitted && !step.committed);
      std::vector<int32_t> parents(static_cast<size_t>(step.n_rows));
      for (int r = 0; r < step.n_rows; ++r) parents[static_cast<size_t>(r)] = r - 1;
      if (group_uncommitted.back() != 0 && !chains) parents = in.tree(step.n_rows);
      if (step.siblings) parents.assign(parents.size(), -1);
      for (int r = 0; r < step.n_rows; ++r) {
        const int32_t p = parents[static_cast<size_t>(r)];
        const size_t at = static_cast<size_t>(n_rows + p);
        group.push_back(g);
        parent.push_back(p);
        position.push_back(p < 0 ? step.past : position[at] + 1);
        ancestors.push_back((p < 0 ? 0 : ancestors[at]) | uint64_t{1} << (r % 64));
      }
      n_rows += step.n_rows;
    }
    n_rows += n_padding;
    const size_t n = static_cast<size_t>(n_rows);
    group.resize(n, -1);
    parent.resize(n, -1);
    position.resize(n, 0);
    ancestors.resize(n, 0);
    for (std::vector<int32_t>* v :
         {&group_sequence, &group_begin, &group_rows, &group_past, &group_uncommitted})
      v->resize(n, -1000000);  // read by nobody
    std::vector<int32_t> all = {n_valid(), n_groups};
    for (const std::vector<int32_t>* v : {&group, &position, &parent, &group_sequence, &group_begin,
                                          &group_rows, &group_past, &group_uncommitted})
      all.insert(all.end(), v->begin(), v->end());
    return all;
  }
};

}  // namespace thermo::testing
