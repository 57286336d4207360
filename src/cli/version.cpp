#include "cli/version.h"

#include <fmt/format.h>

#include "base/json.h"
#include "cli/commands.h"

namespace thermo {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif
#if defined(__x86_64__)
constexpr const char* kProcessor = "x86_64";
#elif defined(__aarch64__)
constexpr const char* kProcessor = "aarch64";
#else
constexpr const char* kProcessor = "other";
#endif

class VersionCommand : public Command {
 public:
  CommandText text() const override { return {"version", "version [--json]", "which build this is", "", ""}; }

  void declare(OptionSet& set) override {
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
  }

  ExitCode run(const Terminal&) override {
    if (!json_) {
      write_stdout(version_line() + "\n");
      return ExitCode::Ok;
    }
    write_stdout(version_facts().dump() + "\n");
    return ExitCode::Ok;
  }

 private:
  bool json_ = false;
};

}  // namespace

const char* version_number() {
  return THERMO_VERSION;
}
const char* build_commit() {
  return THERMO_COMMIT;
}

std::string build_fingerprint() {
  return fmt::format("thermocline-{}-{}", version_number(), build_commit());
}

Json version_facts() {
  Json out;
  out["version"] = version_number();
  out["commit"] = build_commit();
  out["compiler"] = kCompiler;
  out["processor"] = kProcessor;
  out["backends"] = {"cpu"};
  return out;
}

std::string version_line() {
#ifdef THERMO_HAS_CUDA
  constexpr const char* kBackends = "CPU and CUDA";
#else
  constexpr const char* kBackends = "CPU";
#endif
  return fmt::format("thermocline {} ({}), {}, {}, {}", version_number(), build_commit(), kCompiler,
                     kProcessor, kBackends);
}

std::unique_ptr<Command> make_version_command() {
  return std::make_unique<VersionCommand>();
}

}  // namespace thermo
