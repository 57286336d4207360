#include "engine/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "sampling/sampler.h"

namespace thermo {
namespace {

constexpr size_t kMaxCheckpoints = 8;  // of one session; a 35B-A3B checkpoint is 63 MiB

}  // namespace

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

Status Session::append(std::span<const TokenId> tokens, const PrefillProgressFn& progress) {
  return impl_->append(tokens, LogitsNeed::Top, progress);
}

Status Session::Impl::append(std::span<const TokenId> ids, LogitsNeed need,
                             const PrefillProgressFn& progress) {
  if (ids.empty()) return {};
  const int n_ctx = engine->n_ctx();
  if (ids.size() > static_cast<size_t>(n_ctx - n_past()))
    return Error{ErrorCode::ContextFull, fmt::format("{} tokens do not fit: the context holds {} and {} are "
                                                     "taken; use a larger context or a shorter prompt",
                                                     ids.size(), n_ctx, n_past())};
  const int total = static_cast<int>(ids.size());
  for (int done = 0; done < total;) {
    if (progress && !progress(done, total))
      return Error{ErrorCode::Cancelled, "stopped while reading the prompt"};
    const int n = std::min(engine->n_batch(), total - done);
    rows.clear();
    for (int i = 0; i < n; ++i)
      rows.push_back({.token = ids[static_cast<size_t>(done + i)],
                      .parent = i - 1,
                      .want_logits = done + i + 1 == total});
    const SequenceRows group{.sequence = sequence, .rows = rows, .need = need};
    Result<StepOutput> output = engine->step({.groups = {&group, 1}});
    if (!output) return output.error();
    tokens.insert(tokens.end(), ids.begin() + done, ids.begin() + done + n);
    done += n;
    drop_logits();
    if (!output->rows.empty()) take_logits(*output, 0);
  }
  if (progress) progress(total, total);
  return {};
}

Result<int> Session::set_tokens(std::span<const TokenId> tokens, const PrefillProgressFn& progress) {
  Impl& s = *impl_;
  const size_t limit = std::min(tokens.size(), s.tokens.size());
  size_t common = 0;
  while (common < limit && tokens[common] == s.tokens[common]) ++common;
  // At least one token is evaluated, so that there are logits.
  if (common == tokens.size() && common > 0 && (common < s.tokens.size() || !s.has_logits())) --common;
  if (common < s.tokens.size()) s.go_back_to(static_cast<int>(common));
  const int reused = s.n_past();
  if (Status status = append(tokens.subspan(static_cast<size_t>(reused)), progress); !status)
    return status.error();
  return reused;
}

Result<GenerateResult> Session::generate(const GenerateOptions& options,
                                         const std::function<bool(const GeneratedToken&)>& on_token) {
  Impl& s = *impl_;
  const int n_vocab = s.engine->config().n_vocab;
  if (!s.has_logits()) return Error{ErrorCode::InvalidArgument, "nothing to continue: the prompt is empty"};
  if (Status status = validate(options.sampling, n_vocab); !status) return status.error();
  Sampler sampler(options.sampling, n_vocab, options.stop_tokens);
  sampler.accept_prompt(s.tokens);
  GenerateResult result{.reason = FinishReason::Length, .n_generated = 0, .seed = sampler.seed()};
  while (options.max_tokens < 0 || result.n_generated < options.max_tokens) {
    const std::optional<TokenId> chosen = s.choose(sampler);
    if (!chosen) return device_fault(*s.backend);
    const TokenId token = *chosen;
    if (std::find(options.stop_tokens.begin(), options.stop_tokens.end(), token) !=
        options.stop_tokens.end()) {
      result.reason = FinishReason::Stop;
      return result;
    }
    sampler.accept(token);
    ++result.n_generated;
    GeneratedToken generated{token, {}};
    if (options.sampling.n_probs) {
      if (!s.fetch_logits()) return device_fault(*s.backend);
      generated.logprobs = top_logprobs(s.logits, token, *options.sampling.n_probs);
    }
    const bool go_on = on_token(generated);
    if (s.n_past() == s.engine->n_ctx()) {
      result.reason = FinishReason::ContextFull;
      return result;
    }
    // Evaluated even when the caller stops here, so that the session holds every token it reported.
    const LogitsNeed need = options.sampling.n_probs ? LogitsNeed::Row : sampler.need();
    if (Status status = s.append({&token, 1}, need, {}); !status) return status.error();
    if (!go_on) {
      result.reason = FinishReason::Cancelled;
      return result;
    }
  }
  return result;
}

std::optional<TokenId> Session::Impl::choose(Sampler& sampler) {
  const auto position = static_cast<int64_t>(tokens.size());
  if (top != nullptr)
    if (const std::optional<TokenId> token = sampler.sample(*top, position)) return token;
  if (!fetch_logits()) return std::nullopt;
  return sampler.sample(logits, position);
}

bool Session::Impl::fetch_logits() {
  if (top == nullptr) return true;
  const std::span<const float> row = backend->fetch_logits(top_index);
  drop_logits();
  logits.assign(row.begin(), row.end());
  return !logits.empty();
}

void Session::Impl::drop_logits() {
  logits.clear();
  if (top != nullptr) std::erase(*unread, this);
  top = nullptr;
}

void Session::Impl::take_logits(const StepOutput& output, int i) {
  const RowLogits& row = output.rows[static_cast<size_t>(i)];
  logits.assign(row.logits.begin(), row.logits.end());
  if (row.top == nullptr) return;
  top = row.top;
  top_index = i;
  unread->push_back(this);
}

void Session::Impl::go_back_to(int n) {
  uncommitted->clear();
  if (engine->config().n_recurrent_layers() == 0) {
    backend->truncate(sequence, n);
  } else {
    while (!checkpoints.empty() && checkpoints.back().n_past > n) checkpoints.pop_back();
    if (checkpoints.empty())
      backend->clear(sequence);
    else
      backend->restore(sequence, checkpoints.back());
  }
  tokens.resize(static_cast<size_t>(n_past()));
  drop_logits();
}

void Session::checkpoint() {
  Impl& s = *impl_;
  if (s.engine->config().n_recurrent_layers() == 0) return;  // attention memory can be cut anywhere
  if (!s.checkpoints.empty() && s.checkpoints.back().n_past == s.n_past()) return;
  if (s.checkpoints.size() == kMaxCheckpoints)
    s.checkpoints.erase(s.checkpoints.begin() + 1);  // keep the first: the system prompt
  s.checkpoints.push_back(s.backend->checkpoint(s.sequence));
}

void Session::clear() {
  impl_->backend->clear(impl_->sequence);
  impl_->uncommitted->clear();
  impl_->tokens.clear();
  impl_->drop_logits();
  impl_->checkpoints.clear();
}

}  // namespace thermo
