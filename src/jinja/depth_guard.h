// Counts how deep a rendering is nested, so that a recursive macro ends in an error and not in a full stack.
#pragma once

#include "jinja/interpreter.h"

namespace thermo::jinja {

class DepthGuard {
 public:
  DepthGuard(Interpreter& vm, int line) : vm_(vm) {
    vm_.line = line;
    vm_.heap.step();
    if (++vm_.depth_ > vm_.heap.limits().max_depth) {
      --vm_.depth_;
      fail("the template is nested more than " + std::to_string(vm_.heap.limits().max_depth) +
           " deep; does a macro call itself without end?");
    }
  }
  DepthGuard(const DepthGuard&) = delete;
  DepthGuard& operator=(const DepthGuard&) = delete;
  ~DepthGuard() { --vm_.depth_; }

 private:
  Interpreter& vm_;
};

}  // namespace thermo::jinja
