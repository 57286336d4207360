// What a request holds its answer to: a format, the tools it may or must call, a budget of reasoning.
#pragma once

#include "chat/answer_constraint.h"
#include "server/server_options.h"

namespace thermo {

// For an answer that could not be held to its format, or (where it has none) to the schemas of its tools.
ApiError lost_format(const OutputFormat& format);

// One for each of n answers; none where anything may be said. `max_tokens`: of the answer, at most.
// `ignored` gets the parts of schemas that cannot be enforced. Throws ApiError.
std::vector<std::shared_ptr<AnswerConstraint>> make_constraints(const GenerationRequest& request,
                                                                const ServedModel& model,
                                                                const ServerOptions& server,
                                                                bool in_reasoning, int max_tokens, size_t n,
                                                                std::vector<std::string>& ignored);

}  // namespace thermo
