// What each lane did when, as a file that chrome://tracing and ui.perfetto.dev show (Chrome trace format, an
// array of complete events). docs/experts.md says how to read it.
//
// Any thread may add. add() copies one event into memory allocated at the start; a separate thread writes.
// The file can be loaded at any moment, even after the program was killed: the format allows a missing end.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace thermo {

// The rows of the picture.
enum class TraceLane : int { Step, Device, Cpu, Fetch, Copy, Disk };
inline constexpr int kNumTraceLanes = 6;
const char* trace_lane_name(TraceLane lane);

// Keys, names and categories are literals without quotes.
struct TraceArg {
  const char* key = nullptr;
  int64_t value = 0;
};

struct TraceEvent {
  TraceLane lane = TraceLane::Step;
  const char* name = "";
  const char* category = "";
  int64_t begin_ns = 0;  // of now_ns()
  int64_t duration_ns = 0;
  std::array<TraceArg, 5> args{};  // up to the first without a key
};

class TraceWriter {
 public:
  // Refused: the file cannot be written. `title` is shown above the lanes.
  static Result<std::unique_ptr<TraceWriter>> open(const std::string& path, const std::string& title);
  // Writes what is left and the end of the file.
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  void add(const TraceEvent& event) noexcept;
  // Events that came faster than they could be written; the file has their number too.
  uint64_t n_dropped() const noexcept;

 private:
  TraceWriter(std::FILE* file, std::string path);
  void write_loop();
  void write(const std::vector<TraceEvent>& events);

  std::FILE* file_;
  std::string path_;
  int64_t start_ns_;
  bool failed_ = false;  // the writer's: the disk is full

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<TraceEvent> pending_;  // guarded by mutex_, as are the next two
  uint64_t n_dropped_ = 0;
  bool stop_ = false;
  std::thread writer_;
};

}  // namespace thermo
