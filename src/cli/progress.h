// The progress line while a model loads.
#pragma once

#include <chrono>
#include <string>

#include "cli/terminal.h"
#include "model/weights.h"

namespace thermo {

// Draws one line on stderr, at most ten times a second, and clears it at the end. When stderr is no terminal
// it logs a line (level info) when a stage starts and then every 10 % or 5 s instead. One thread at a time.
class ProgressLine {
 public:
  explicit ProgressLine(const Terminal& terminal);
  ~ProgressLine();  // clears the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void update(const LoadProgress& progress);
  // Tokens of a prompt; drawn only after two seconds.
  void update_prompt(int done, int total);
  void clear();

  // For EngineOptions::progress; the line must outlive the loading.
  LoadProgressFn callback() {
    return [this](const LoadProgress& progress) { update(progress); };
  }

 private:
  using Clock = std::chrono::steady_clock;
  void draw(const std::string& stage, double ratio, const std::string& amount);

  const Terminal& terminal_;
  Clock::time_point start_, stage_start_, last_;
  std::string stage_;
  double last_ratio_ = 0.0;
  bool drawn_ = false;
};

}  // namespace thermo
