// The commands of the program. Each lives in its own file and is known here by one function only:
//
//   class InspectCommand : public Command {          // in inspect.cpp, nowhere else
//     CommandText text() const override { return {"inspect", "inspect MODEL [options]", "what is in a model
//     file"}; } void declare(OptionSet& set) override {
//       set.section("Model");
//       add_model_option(set, model_);               // model_options.h: MODEL and -m, --model
//       set.flag("--json", json_, "print one JSON object");
//     }
//     ExitCode run(const Terminal& terminal) override { ... }
//     std::string model_;
//     bool json_ = false;
//   };
//   std::unique_ptr<Command> make_inspect_command() { return std::make_unique<InspectCommand>(); }
//
// declare() says which options there are and where their values go (options.h); run() is called once, after
// they were filled from the command line, the environment and the configuration file. Results go to stdout,
// everything else to stderr. Failures are thrown (base/error.h); main.cpp prints the sentence and sets the
// exit code.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "cli/options/options.h"
#include "cli/terminal.h"

namespace thermo {

struct CommandText {
  std::string name;      // "run"
  std::string usage;     // "run [MODEL] -p TEXT [options]"; without the program's name
  std::string summary;   // one line, lower case, no full stop
  std::string details;   // shown under the usage line by --help; may be empty
  std::string examples;  // shown last by --help, one command to a line; may be empty
};

class Command {
 public:
  virtual ~Command() = default;
  virtual CommandText text() const = 0;
  virtual void declare(OptionSet& set) = 0;
  virtual ExitCode run(const Terminal& terminal) = 0;
  virtual int default_verbosity() const { return 2; }  // of logs: warnings
};

std::unique_ptr<Command> make_run_command();
std::unique_ptr<Command> make_chat_command();
std::unique_ptr<Command> make_serve_command();
std::unique_ptr<Command> make_tokenize_command();
std::unique_ptr<Command> make_inspect_command();
std::unique_ptr<Command> make_plan_command();
std::unique_ptr<Command> make_verify_command();
std::unique_ptr<Command> make_perplexity_command();
std::unique_ptr<Command> make_bench_command();
std::unique_ptr<Command> make_experts_command();
std::unique_ptr<Command> make_synth_command();
std::unique_ptr<Command> make_pull_command();
std::unique_ptr<Command> make_list_command();
std::unique_ptr<Command> make_rm_command();
std::unique_ptr<Command> make_doctor_command();
std::unique_ptr<Command> make_connect_command();
std::unique_ptr<Command> make_completion_command();
std::unique_ptr<Command> make_manual_command();
std::unique_ptr<Command> make_version_command();

// All of them, in the order of the help.
std::vector<std::unique_ptr<Command>> make_commands();

}  // namespace thermo
