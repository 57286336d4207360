#include "experts/trace.h"

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/log.h"

namespace thermo {
namespace {

// A decode step of 40 layers has about 150 events: room for a second of a fast model between two writes.
constexpr size_t kMostPending = 1 << 17;
constexpr auto kWriteEvery = std::chrono::milliseconds(100);

// The title comes from a model file and may contain anything.
std::string plain(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~' || c == '"' || c == '\\') c = ' ';
  return text;
}

}  // namespace

const char* trace_lane_name(TraceLane lane) {
  constexpr const char* kNames[kNumTraceLanes] = {"step", "device", "cpu", "fetch", "copy", "disk"};
  return kNames[static_cast<int>(lane)];
}

Result<std::unique_ptr<TraceWriter>> TraceWriter::open(const std::string& path, const std::string& title) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr)
    return Error{ErrorCode::InvalidArgument,
                 fmt::format("{}: the trace cannot be written ({}); give a path in a folder you may write to",
                             path, std::strerror(errno))};
  fmt::print(file, "[\n{{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{{\"name\":\"{}\"}}}}",
             plain(title));
  for (int lane = 0; lane < kNumTraceLanes; ++lane) {
    fmt::print(
        file,
        ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{0},\"name\":\"thread_name\",\"args\":{{\"name\":\"{1}\"}}}}",
        lane, trace_lane_name(static_cast<TraceLane>(lane)));
    fmt::print(file,
               ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{0},\"name\":\"thread_sort_index\",\"args\":{{\"sort_"
               "index\":{0}}}}}",
               lane);
  }
  std::fflush(file);
  return std::unique_ptr<TraceWriter>(new TraceWriter(file, path));
}

TraceWriter::TraceWriter(std::FILE* file, std::string path)
    : file_(file), path_(std::move(path)), start_ns_(now_ns()) {
  pending_.reserve(kMostPending);
  writer_ = std::thread([this] { write_loop(); });
}

TraceWriter::~TraceWriter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  writer_.join();
  if (n_dropped_ > 0)
    fmt::print(file_, ",\n{{\"ph\":\"M\",\"pid\":1,\"name\":\"dropped_events\",\"args\":{{\"n\":{}}}}}",
               n_dropped_);
  std::fputs("\n]\n", file_);
  if (std::fclose(file_) != 0 && !failed_) log_warning("trace", "{}: {}", path_, std::strerror(errno));
}

void TraceWriter::add(const TraceEvent& event) noexcept {
  const std::lock_guard lock(mutex_);
  if (pending_.size() == kMostPending) {
    ++n_dropped_;
  } else {
    pending_.push_back(event);
  }
}

uint64_t TraceWriter::n_dropped() const noexcept {
  const std::lock_guard lock(mutex_);
  return n_dropped_;
}

void TraceWriter::write_loop() {
  std::vector<TraceEvent> taken;
  taken.reserve(kMostPending);
  for (bool stop = false; !stop;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kWriteEvery, [this] { return stop_; });
      stop = stop_;
      taken.swap(pending_);  // both keep their memory: add() never allocates
    }
    write(taken);
    taken.clear();
  }
}

void TraceWriter::write(const std::vector<TraceEvent>& events) {
  if (events.empty() || failed_) return;
  fmt::memory_buffer text;
  for (const TraceEvent& event : events) {
    fmt::format_to(
        std::back_inserter(text),
        ",\n{{\"ph\":\"X\",\"pid\":1,\"tid\":{},\"name\":\"{}\",\"cat\":\"{}\",\"ts\":{:.3f},\"dur\":{:.3f}",
        static_cast<int>(event.lane), event.name, event.category,
        static_cast<double>(event.begin_ns - start_ns_) * 1e-3,
        static_cast<double>(event.duration_ns) * 1e-3);
    const char* separator = ",\"args\":{";
    for (const TraceArg& arg : event.args) {
      if (arg.key == nullptr) break;
      fmt::format_to(std::back_inserter(text), "{}\"{}\":{}", separator, arg.key, arg.value);
      separator = ",";
    }
    if (event.args[0].key != nullptr) text.push_back('}');
    text.push_back('}');
  }
  failed_ = std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0;
  if (failed_) log_warning("trace", "{}: the trace ends here ({})", path_, std::strerror(errno));
}

}  // namespace thermo
