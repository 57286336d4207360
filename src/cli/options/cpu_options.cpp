#include "cli/options/cpu_options.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/log.h"
#include "base/memory_nodes.h"
#include "engine/engine.h"

namespace thermo {
namespace {

constexpr int kMaxCores = CPU_SETSIZE;

void use_cores(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(static_cast<size_t>(core), &set);
  // Cores that are not there are left out by the system; it refuses only where none is left.
  if (sched_setaffinity(0, sizeof(set), &set) != 0)
    throw ConfigError(
        "this program may use none of these cores; `thermocline doctor` shows how many there are");
}

void use_priority(std::string_view text) {
  int level = 0;
  parse_value(text, level);
  constexpr int kNice[] = {5, 0, -5, -10, -20};  // as llama.cpp has them, from -1 on
  if (level < -1 || level > 3) throw ConfigError("-1 (low), 0 (normal) or 1 to 3 (higher) was expected");
  if (level != 0 && setpriority(PRIO_PROCESS, 0, kNice[level + 1]) != 0)
    throw ConfigError("only an administrator may do this; leave it out, or run the program as one");
}

// Where threads and memory go on a machine with several memory nodes, as llama.cpp has it.
void use_nodes(const std::string& how) {
  if (how.empty()) return;
  const std::vector<MemoryNode> nodes = memory_nodes();
  if (nodes.size() <= 1) {
    log_info("cli", "--numa {} changes nothing: this machine has one memory node", how);
    return;
  }
  if (how == "isolate") use_cores(cores_beside(sched_getcpu(), usable_cores(), nodes));
  if (how == "distribute" && !interleave_memory(nodes))
    log_warning(
        "cli",
        "--numa distribute: threads are spread over {} memory nodes, but the system does not let memory "
        "be spread ({}); numactl --interleave=all may",
        nodes.size(), std::strerror(errno));
  log_info("cli", "--numa {}: {} cores may be used, of {} memory nodes", how, usable_cores().size(),
           nodes.size());
}

}  // namespace

std::vector<int> cores_of_mask(std::string_view text) {
  if (text.starts_with("0x") || text.starts_with("0X")) text.remove_prefix(2);
  std::vector<int> cores;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[text.size() - 1 - i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0 || i >= kMaxCores / 4)
      throw ConfigError("a mask of cores in hexadecimal digits was expected: 0xF0 for cores 4 to 7");
    for (int bit = 0; bit < 4; ++bit)
      if ((digit >> bit & 1) != 0) cores.push_back(4 * static_cast<int>(i) + bit);
  }
  if (cores.empty()) throw ConfigError("a mask with at least one core was expected: 0xF0 for cores 4 to 7");
  return cores;
}

std::vector<int> cores_of_range(std::string_view text) {
  const size_t dash = text.find('-');
  int low = 0, high = kMaxCores - 1;
  bool valid = dash != std::string_view::npos && text.size() > 1;
  try {
    if (valid && dash > 0) parse_value(text.substr(0, dash), low);
    if (valid && dash + 1 < text.size()) parse_value(text.substr(dash + 1), high);
  } catch (const ConfigError&) {
    valid = false;
  }
  if (!valid || low < 0 || low > high || high >= kMaxCores)
    throw ConfigError("a range of cores was expected: 4-7, 4- or -7");
  std::vector<int> cores;
  for (int core = low; core <= high; ++core) cores.push_back(core);
  return cores;
}

Option& add_numa_option(OptionSet& set, std::string& how) {
  set.before_run([&how](const Terminal&) { use_nodes(how); });
  return set
      .value("--numa", "HOW", how,
             "with several memory nodes: distribute (threads and memory over all of them), isolate (only the "
             "cores of the node that the program starts on) or numactl (what numactl says, as without this)")
      .choices({"distribute", "isolate", "numactl"})
      .advanced();
}

void add_cpu_options(OptionSet& set, CpuFlags& flags) {
  set.flag("--pin-threads", flags.pin_threads, "bind each thread to a core (default on)").advanced();
  set.custom(
         "-C,--cpu-mask", "MASK", [](std::string_view text) { use_cores(cores_of_mask(text)); },
         "use only these cores: a mask in hexadecimal digits (0xF0: 4 to 7)")
      .advanced();
  set.custom(
         "-Cr,--cpu-range", "LOW-HIGH", [](std::string_view text) { use_cores(cores_of_range(text)); },
         "use only these cores (4-7)")
      .advanced();
  set.custom(
         "--cpu-strict", "WHEN", [&flags](std::string_view text) { parse_value(text, flags.pin_threads); },
         "1: the same as --pin-threads, 0: as --no-pin-threads")
      .choices({"0", "1"})
      .advanced();
  set.custom("--prio", "N", use_priority,
             "priority of the program: -1 low, 0 normal, 1 to 3 higher, for administrators (default 0)")
      .advanced();
  set.value("--poll", "N", flags.poll,
            "how long threads without work spin before they sleep, in milliseconds, 0 to 100 (default 50)")
      .range(0, 100)
      .advanced();
  add_numa_option(set, flags.numa);
}

void set_cpu_options(const CpuFlags& flags, EngineOptions& options) {
  options.pin_threads = flags.pin_threads;
  options.spread_threads = flags.numa == "distribute";
  if (flags.poll) options.spin_us = spin_us_of_poll(*flags.poll);
}

}  // namespace thermo
