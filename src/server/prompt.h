// From a request to the ids that the engine gets: template, tokens, limits. On a worker's thread; pure, but
// for the turn store.
#pragma once

#include <functional>

#include "chat/answer_constraint.h"
#include "server/server_options.h"
#include "server/turn_store.h"

namespace thermo {

struct ServerState;

struct PreparedRequest {
  GenerationRequest request;
  std::vector<std::vector<TokenId>> prompts;  // one, or as many as a completion has
  std::vector<std::string> echoed_prompts;    // texts of the prompts, where they are repeated
  std::vector<int> marks;                     // see TokenRequest
  int n_spliced = 0;                          // answers of the turns whose tokens came from the turn store
  bool in_reasoning = false;                  // the answer begins there
  GenerateOptions options;                    // but for the choice's number and constraint
  std::vector<std::shared_ptr<AnswerConstraint>> constraints;  // of each answer; empty: none
  double constraint_seconds = 0.0;                             // making them took
  int n_prompt() const;                                        // tokens of all prompts
};

// Where answers of earlier turns are looked up.
struct KnownTurns {
  TurnStore& store;
  std::string owner;  // the name of the API key
};

// All of these call `look` now and then. It may throw what the caller catches: nobody needs the rest.

// Reads a body in its dialect. Throws ApiError.
GenerationRequest read_request(Dialect dialect, const Json& body, const ServerState& server,
                               const std::function<void()>& look);

// Throws ApiError: a template that refuses, a prompt that does not fit.
PreparedRequest prepare(
    GenerationRequest request, const ServedModel& model, const ServerOptions& options,
    const KnownTurns& turns, const std::function<void()>& look = [] {});

// The prompt only, for those who count it or look at it.
RenderedPrompt render_prompt(const GenerationRequest& request, const ServedModel& model,
                             const ServerOptions& options, const KnownTurns& turns, bool with_segments,
                             const std::function<void()>& look);

// The words that clients look for.
ApiError context_exceeded(Dialect dialect, size_t n_prompt, int n_ctx);

}  // namespace thermo
