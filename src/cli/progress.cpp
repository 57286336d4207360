#include "cli/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "base/log.h"
#include "base/units.h"

namespace thermo {
namespace {

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string bar(double ratio, int width, bool unicode) {
  int filled = std::clamp(static_cast<int>(ratio * width + 0.5), 0, width);
  std::string result;
  for (int i = 0; i < width; ++i)
    result += i < filled ? (unicode ? "\u2588" : "#") : (unicode ? "\u2591" : ".");
  return result;
}

}  // namespace

ProgressLine::ProgressLine(const Terminal& terminal)
    : terminal_(terminal), start_(Clock::now()), stage_start_(start_), last_(start_) {}

ProgressLine::~ProgressLine() {
  clear();
}

void ProgressLine::clear() {
  if (!drawn_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

void ProgressLine::update(const LoadProgress& progress) {
  Clock::time_point now = Clock::now();
  double ratio = progress.total_bytes == 0
                     ? 0.0
                     : static_cast<double>(progress.done_bytes) / static_cast<double>(progress.total_bytes);
  bool new_stage = stage_ != progress.stage;
  if (new_stage) {
    stage_ = progress.stage;
    stage_start_ = now;
    last_ratio_ = 0.0;
  }
  if (!terminal_.progress) {
    if (new_stage) {
      log_info("load", "{}: {}", stage_, format_bytes(progress.total_bytes));
      last_ = now;
    } else if (ratio >= last_ratio_ + 0.1 || seconds(now - last_) >= 5.0) {
      log_info("load", "{}: {:.0f} %", stage_, ratio * 100.0);
      last_ratio_ = ratio;
      last_ = now;
    }
    return;
  }
  // The first tenth of a second shows nothing, so that small models do not flicker.
  if (seconds(now - last_) < 0.1) return;
  last_ = now;
  double elapsed = std::max(seconds(now - stage_start_), 1e-3);
  double rate = static_cast<double>(progress.done_bytes) / elapsed;
  std::string amount =
      fmt::format("{} / {}", format_bytes(progress.done_bytes), format_bytes(progress.total_bytes));
  if (rate > 0.0 && elapsed > 0.3) {
    double left =
        static_cast<double>(progress.total_bytes - std::min(progress.done_bytes, progress.total_bytes)) /
        rate;
    amount += fmt::format("  {}/s  {:.0f} s left", format_bytes(static_cast<uint64_t>(rate)), left);
  }
  draw(stage_, ratio, amount);
}

void ProgressLine::update_prompt(int done, int total) {
  Clock::time_point now = Clock::now();
  if (!terminal_.progress || seconds(now - start_) < 2.0 || seconds(now - last_) < 0.1 || total <= 0) return;
  last_ = now;
  double rate = done / std::max(seconds(now - start_), 1e-3);
  draw("prompt", static_cast<double>(done) / total,
       fmt::format("{} / {} tokens  {:.0f} tok/s", done, total, rate));
}

void ProgressLine::draw(const std::string& stage, double ratio, const std::string& amount) {
  ratio = std::clamp(ratio, 0.0, 1.0);
  std::string tail = fmt::format(" {:3.0f} %  {}", ratio * 100.0, amount);
  int room = terminal_.width - 1 - static_cast<int>(stage.size()) - 1 - static_cast<int>(tail.size());
  std::string line = stage + " ";
  if (room >= 5) line += bar(ratio, std::min(room, 30), terminal_.unicode);
  line += tail;
  // A line that wraps cannot be drawn over. Without a bar it is ASCII.
  if (room < 0) line.resize(static_cast<size_t>(std::max(1, terminal_.width - 1)));
  std::fprintf(stderr, "\r%s\x1b[K", line.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace thermo
