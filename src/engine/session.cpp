#include "engine/session.h"

#include <fmt/format.h>

#include <algorithm>

namespace thermo {
Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Session::~Session() {
  if (!impl_) return;
  impl_->drop_logits();
  impl_->release();
}

int Session::sequence() const {
  return impl_->sequence;
}
int Session::n_past() const {
  return impl_->n_past();
}
int Session::n_pages() const {
  return impl_->backend->n_pages(impl_->sequence);
}
std::span<const TokenId> Session::tokens() const {
  return impl_->tokens;
}
std::span<const float> Session::logits() const {
  impl_->fetch_logits();
  return impl_->logits;
}

TokenId Session::best() const {
  const Impl& s = *impl_;
  if (s.top != nullptr) return s.top->best;
  if (s.logits.empty()) return -1;
  return static_cast<TokenId>(std::max_element(s.logits.begin(), s.logits.end()) - s.logits.begin());
}

Status Session::Impl::check_room(size_t n_tokens) const {
  const int n_ctx = engine->n_ctx();
  if (n_tokens <= static_cast<size_t>(n_ctx - n_past())) return {};
  return Error{ErrorCode::ContextFull,
               fmt::format("{} tokens do not fit: the context holds {} and {} are "
                           "taken; use a larger context or a shorter prompt",
                           n_tokens, n_ctx, n_past()),
               Remedy::LargerContext};
}

void Session::Impl::add_rows(std::span<const TokenId> ids, bool ends, std::vector<Row>& rows) {
  for (size_t i = 0; i < ids.size(); ++i)
    rows.push_back(
        {.token = ids[i], .parent = static_cast<int32_t>(i) - 1, .want_logits = ends && i + 1 == ids.size()});
}

void Session::Impl::took_step(std::span<const TokenId> ids, const StepOutput& output,
                              std::optional<size_t> i) {
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  drop_logits();
  if (!i) return;
  const RowLogits& row = output.rows[*i];
  logits.assign(row.logits.begin(), row.logits.end());
  if (row.top == nullptr) return;
  top = row.top;
  top_index = *i;
  unread->push_back(this);
}

void Session::Impl::took_path(std::span<const TokenId> ids, std::optional<size_t> i) {
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  drop_logits();
  if (!i) return;
  const std::span<const float> row = backend->fetch_logits(static_cast<int>(*i));
  logits.assign(row.begin(), row.end());
}

Status Session::append(std::span<const TokenId> tokens, const PrefillProgressFn& progress) {
  Impl& s = *impl_;
  if (tokens.empty()) return {};
  if (Status status = s.check_room(tokens.size()); !status) return status;
  const auto tell = [&, total = static_cast<int>(tokens.size())](size_t done) {
    return !progress || progress(static_cast<int>(done), total);
  };
  const auto n_batch = static_cast<size_t>(s.engine->n_batch());
  for (size_t done = 0; done < tokens.size();) {
    if (!tell(done)) return Error{ErrorCode::Cancelled, "stopped while reading the prompt"};
    const std::span<const TokenId> rest = tokens.subspan(done),
                                   chunk = rest.first(std::min(rest.size(), n_batch));
    const bool ends = chunk.size() == rest.size();
    s.rows.clear();
    Impl::add_rows(chunk, ends, s.rows);
    const SequenceRows group{.sequence = s.sequence, .rows = s.rows, .need = LogitsNeed::Top};
    Result<StepOutput> output = s.engine->step({.groups = {&group, 1}});
    if (!output) return output.error();
    s.took_step(chunk, *output, ends ? std::optional<size_t>(0) : std::nullopt);
    done += chunk.size();
  }
  tell(tokens.size());
  return {};
}

size_t Session::Impl::common_with(std::span<const TokenId> prompt) const {
  const size_t limit = std::min(prompt.size(), tokens.size());
  size_t common = 0;
  while (common < limit && prompt[common] == tokens[common]) ++common;
  if (common == prompt.size() && common > 0 && (common < tokens.size() || !has_logits())) --common;
  return common;
}

int Session::reusable(std::span<const TokenId> tokens) const {
  return impl_->reachable(static_cast<int>(impl_->common_with(tokens)));
}

int Session::keep(std::span<const TokenId> tokens) {
  Impl& s = *impl_;
  const size_t common = s.common_with(tokens);
  if (common < s.tokens.size()) s.go_back_to(static_cast<int>(common));
  return s.n_past();
}

Result<int> Session::set_tokens(std::span<const TokenId> tokens, const PrefillProgressFn& progress) {
  const int reused = keep(tokens);
  if (Status status = append(tokens.subspan(static_cast<size_t>(reused)), progress); !status)
    return status.error();
  return reused;
}

Result<GenerateResult> Session::generate(const GenerateOptions& options,
                                         const std::function<bool(const GeneratedToken&)>& on_token) {
  RequestLoop loop(*impl_->engine);
  const Result<RequestId> request = loop.add(*this, {}, options);
  if (!request) return request.error();
  bool stopped = false;
  for (;;) {
    int n_taken = 0;  // of this step
    for (const RequestEvent& event : loop.step()) {
      if (const auto* token = std::get_if<GeneratedToken>(&event.what); token && !stopped) {
        ++n_taken;
        stopped = !on_token(*token);
        if (stopped) loop.cancel(*request, n_taken);
      }
      if (const auto* result = std::get_if<GenerateResult>(&event.what)) return *result;
      if (const auto* error = std::get_if<Error>(&event.what)) return *error;
    }
  }
}

std::optional<TokenId> Session::Impl::choose(ConstrainedSampler& sampler) {
  const auto position = static_cast<int64_t>(tokens.size());
  if (top != nullptr)
    if (const std::optional<TokenId> token = sampler.sample(*top, position)) return token;
  if (!fetch_logits()) return std::nullopt;
  return sampler.sample(logits, position);
}

bool Session::Impl::fetch_logits() {
  if (top == nullptr) return true;
  const std::span<const float> row = backend->fetch_logits(static_cast<int>(top_index));
  drop_logits();
  logits.assign(row.begin(), row.end());
  return !logits.empty();
}

void Session::Impl::drop_logits() {
  logits.clear();
  if (top != nullptr) std::erase(*unread, this);
  top = nullptr;
}

void Session::Impl::go_back_to(int n) {
  uncommitted->clear();
  while (!checkpoints.empty() && checkpoints.back().memory->n_past() > n) checkpoints.pop_back();
  if (backend->can_truncate(sequence, n)) {
    backend->truncate(sequence, n);
    if (speculation) speculation->truncate(sequence, n);
  } else if (checkpoints.empty() || !backend->restore(sequence, *checkpoints.back().memory)) {
    clear();
  } else if (speculation) {
    speculation->restore(sequence, n_past(), checkpoints.back().drafter);
  }
  tokens.resize(static_cast<size_t>(n_past()));
  drop_logits();
}

const Session::Impl::Point* Session::Impl::point_before(int n) const {
  for (size_t i = checkpoints.size(); i-- > 0;)
    if (checkpoints[i].memory->n_past() <= n) return &checkpoints[i];
  return nullptr;
}

int Session::Impl::reachable(int n) const {
  if (n >= n_past() || backend->can_truncate(sequence, n)) return std::min(n, n_past());
  const Point* const point = point_before(n);
  return point == nullptr ? 0 : point->memory->n_past();
}

// A drafter has memory of its own, which is not shared.
int Session::shareable(std::span<const TokenId> prompt) const {
  const Impl& s = *impl_;
  if (s.speculation || prompt.empty()) return 0;
  const std::span<const TokenId> before = prompt.first(prompt.size() - 1);  // something is left to compute
  const auto common = static_cast<int>(
      std::mismatch(before.begin(), before.end(), s.tokens.begin(), s.tokens.end()).first - before.begin());
  if (s.backend->can_cut()) return common;
  const Impl::Point* const point = s.point_before(common);
  return point == nullptr ? 0 : point->memory->n_past();
}

void Session::share(const Session& other, std::span<const TokenId> prompt) {
  Impl &s = *impl_, &from = *other.impl_;
  const int n = other.shareable(prompt);
  s.clear();
  if (n == 0) return;
  s.backend->share(from.sequence, s.sequence, n);
  if (!s.backend->can_cut() && !s.backend->restore(s.sequence, *from.point_before(n)->memory)) return;
  s.tokens.assign(prompt.begin(), prompt.begin() + n);
}

void Session::checkpoint() {
  impl_->checkpoint();
}

void Session::Impl::checkpoint() {
  if (backend->can_cut() || max_checkpoints == 0) return;
  if (!checkpoints.empty() && checkpoints.back().memory->n_past() == n_past()) return;
  if (checkpoints.size() == max_checkpoints)  // keep the first: the system prompt
    checkpoints.erase(checkpoints.begin() + (max_checkpoints > 1 ? 1 : 0));
  // Keys and values stay where they are. Without memory there is one point less to come back to.
  if (auto memory = backend->checkpoint(sequence, false))
    checkpoints.push_back(
        {std::move(memory), speculation ? speculation->snapshot(sequence) : std::vector<float>{}});
}

void Session::clear() {
  impl_->clear();
}

void Session::Impl::clear() {
  backend->clear(sequence);
  if (speculation) speculation->truncate(sequence, 0);
  uncommitted->clear();
  tokens.clear();
  drop_logits();
  checkpoints.clear();
}

}  // namespace thermo
