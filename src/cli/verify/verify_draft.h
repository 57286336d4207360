// Drafters and draft trees against outputs that were recorded for them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/verify/verify_reference.h"
#include "engine/engine.h"

namespace thermo {

// One recorded tensor and how far ours is off.
struct DraftCheck {
  std::string tensor;
  TensorError error;
  int n_rows = 0, n_equal_argmax = 0;  // 0 rows: no logits

  // With `rms` the root mean square counts, and the most likely tokens must be the same.
  bool passes(double tolerance, const std::optional<double>& rms) const;
};

// Whether the file records a draft tree.
bool is_tree_reference(const GgufFile& file);

// The recorded tree as one uncommitted step, then each recorded path: committed, and its tokens after it.
// Throws LoadError.
std::vector<DraftCheck> check_tree(const GgufFile& file, const ModelConfig& config, const GgufFile& expected,
                                   const EngineOptions& options);
// `draft`: the drafter's file, or mtp. Its input is the recorded hidden states. Throws LoadError,
// ConfigError.
std::vector<DraftCheck> check_drafter(const GgufFile& file, const ModelConfig& config,
                                      const std::string& draft, const GgufFile& expected,
                                      const EngineOptions& options);

std::string draft_checks_table(const std::vector<DraftCheck>& checks, bool passed);
std::string draft_checks_json(const std::vector<DraftCheck>& checks, bool passed);

}  // namespace thermo
