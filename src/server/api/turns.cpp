#include "server/api/turns.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

namespace thermo {
namespace {

void put_before(Turn& turn, std::string_view text) {
  turn.content.insert(0, text);
  for (size_t& mark : turn.marks) mark += text.size();
}

void erase_front(Turn& turn, size_t n) {
  n = std::min(n, turn.content.size());
  turn.content.erase(0, n);
  for (size_t& mark : turn.marks) mark -= std::min(mark, n);
}

void remove_billing_header(Turn& turn) {
  constexpr std::string_view kHeader = "x-anthropic-billing-header:";
  if (!turn.content.starts_with(kHeader)) return;
  const size_t line_end = turn.content.find('\n');
  erase_front(turn,
              line_end == std::string::npos ? line_end : turn.content.find_first_not_of('\n', line_end));
}

// As one text, with an empty line between them.
void append(Turn& turn, const Turn& more) {
  turn.content += "\n\n";
  for (const size_t mark : more.marks) turn.marks.push_back(turn.content.size() + mark);
  turn.content += more.content;
}

void merge_system_turns(std::vector<Turn>& turns, const RequestDefaults& defaults) {
  std::vector<Turn> merged;
  bool leading = true;
  for (Turn& turn : turns) {
    if (turn.role == "developer") turn.role = "system";
    if (turn.role != "system") {
      leading = false;
      merged.push_back(std::move(turn));
      continue;
    }
    if (!leading) {
      turn.role = "user";
      put_before(turn, "<system-reminder>\n");
      turn.content += "\n</system-reminder>";
      merged.push_back(std::move(turn));
      continue;
    }
    if (!defaults.keep_billing_header) remove_billing_header(turn);
    if (turn.content.empty()) continue;
    if (merged.empty())
      merged.push_back(std::move(turn));
    else
      append(merged.front(), turn);
  }
  turns = std::move(merged);
}

void split_reasoning(Turn& turn) {
  if (turn.role != "assistant" || !turn.content.starts_with("<think>")) return;
  const size_t end = turn.content.find("</think>");
  if (end == std::string::npos) return;
  std::string reasoning = turn.content.substr(7, end - 7);
  const auto trim = [](std::string& text) {
    text.erase(0, std::min(text.find_first_not_of('\n'), text.size()));
    text.resize(text.find_last_not_of('\n') + 1);
  };
  trim(reasoning);
  // Told twice, as reasoning_format deepseek-legacy does; otherwise the model wrote about the tags.
  if (!turn.reasoning.empty() && turn.reasoning != reasoning) return;
  erase_front(turn, end + 8);
  erase_front(turn, turn.content.find_first_not_of('\n'));
  turn.reasoning = std::move(reasoning);
}

// The prompt shows no call ids, only an order: that of the calls. What a user said may stand between the
// calls and a result; then it is one of theirs only if it says so.
void sort_results(std::vector<Turn>& turns) {
  std::vector<ToolCall> calls;
  bool are_last = false;  // nothing was said since
  for (size_t i = 0; i < turns.size();) {
    if (turns[i].role != "tool") {
      are_last = turns[i].role == "assistant";
      if (are_last) calls = turns[i].tool_calls;
      ++i;
      continue;
    }
    size_t end = i;
    while (end < turns.size() && turns[end].role == "tool") ++end;
    std::unordered_map<std::string_view, size_t> places;
    for (size_t k = 0; k < calls.size(); ++k)
      if (!calls[k].id.empty()) places.try_emplace(calls[k].id, k);
    const auto place = [&](const Turn& turn) {
      const auto found = places.find(turn.tool_call_id);
      return found == places.end() ? calls.size() : found->second;
    };
    std::stable_sort(turns.begin() + static_cast<long>(i), turns.begin() + static_cast<long>(end),
                     [&](const Turn& a, const Turn& b) { return place(a) < place(b); });
    for (; i < end; ++i) {
      if (place(turns[i]) < calls.size() || (are_last && !calls.empty())) continue;
      turns[i].role = "user";
      put_before(turns[i], "[tool result] ");
      turns[i].tool_call_id.clear();
    }
  }
}

}  // namespace

std::string image_placeholder(const std::string& media_type, size_t n_bytes) {
  return fmt::format("[image omitted: {}, {} bytes]", media_type, n_bytes);
}

void normalise_turns(GenerationRequest& request, const RequestDefaults& defaults) {
  std::vector<Turn>& turns = request.turns;
  if (turns.empty()) throw ApiError(400, "invalid_value", "there are no messages", "messages");
  merge_system_turns(turns, defaults);
  for (Turn& turn : turns) split_reasoning(turn);
  sort_results(turns);
  if (std::none_of(turns.begin(), turns.end(), [](const Turn& t) { return t.role == "user"; }))
    turns.insert(turns.end() - (request.continue_last_turn ? 1 : 0), {"user", ""});
}

}  // namespace thermo
