#include "engine/session.h"

#include <fmt/format.h>

#include <algorithm>

namespace thermo {
namespace {

// Of tokens that are in one block.
KvRange kv_range(int begin, int end) {
  return {.position = begin, .slot = begin % SequenceLayout::kBlockTokens, .n = end - begin};
}

// Keys and values of the model and of the drafter, if it has any.
class PinnedSequence final : public KvSource {
 public:
  PinnedSequence(Backend& backend, Speculation* speculation, int sequence)
      : backend_(backend), speculation_(speculation), model_(backend.pin_kv(sequence)) {
    if (speculation != nullptr) drafter_ = speculation->pin_kv(sequence);
  }

  void save_kv(int begin, int end, std::byte* block) override {
    backend_.save_kv(*model_, kv_range(begin, end), block);
    if (drafter_) speculation_->save_kv(*drafter_, begin, end, block + backend_.block_bytes());
  }
  // A drafter's positions may be a few fewer.
  int n_whole() const override {
    const int n = drafter_ ? std::min(model_->n_tokens(), drafter_->n_tokens()) : model_->n_tokens();
    return n / kKvPage * kKvPage;
  }
  void keep_whole() override {
    const int n = n_whole();
    model_->shorten(n);
    if (drafter_) drafter_->shorten(n);
  }

 private:
  Backend& backend_;
  Speculation* speculation_;
  std::unique_ptr<KvPin> model_, drafter_;
};

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

void Session::Impl::add_rows(std::span<const TokenId> ids, bool ends, bool each, std::vector<Row>& rows) {
  for (size_t i = 0; i < ids.size(); ++i)
    rows.push_back({.token = ids[i],
                    .parent = static_cast<int32_t>(i) - 1,
                    .want_logits = each || (ends && i + 1 == ids.size())});
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
    Impl::add_rows(chunk, ends, false, s.rows);
    const SequenceRows group{.sequence = s.sequence, .rows = s.rows, .need = LogitsNeed::Top};
    Result<StepOutput> output = s.engine->step({.groups = {&group, 1}});
    if (!output) return output.error();
    s.took_step(chunk, *output, ends ? std::optional<size_t>(0) : std::nullopt);
    done += chunk.size();
  }
  tell(tokens.size());
  return {};
}

size_t Session::Impl::n_same(std::span<const TokenId> prompt) const {
  return static_cast<size_t>(std::mismatch(prompt.begin(), prompt.end(), tokens.begin(), tokens.end()).first -
                             prompt.begin());
}

size_t Session::Impl::common_with(std::span<const TokenId> prompt) const {
  size_t common = n_same(prompt);
  if (common == prompt.size() && common > 0 && (common < tokens.size() || !has_logits())) --common;
  return common;
}

int Session::reusable(std::span<const TokenId> tokens) const {
  const int own = impl_->reachable(static_cast<int>(impl_->common_with(tokens)));
  if (impl_->cache == nullptr || tokens.empty()) return own;
  return std::max(own, impl_->cache->match(tokens, static_cast<int>(tokens.size()) - 1).n);
}

int Session::keep(std::span<const TokenId> tokens) {
  if (tokens.empty())
    clear();
  else
    impl_->hold(tokens, impl_->common_with(tokens), tokens.size() - 1);
  return impl_->n_past();
}

bool Session::hold(std::span<const TokenId> tokens) {
  impl_->hold(tokens, impl_->n_same(tokens), tokens.size());
  return static_cast<size_t>(impl_->n_past()) == tokens.size();
}

void Session::use_cache(PrefixCache* cache, bool side) {
  impl_->cache = cache;
  impl_->side = side;
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

void Session::Impl::hold(std::span<const TokenId> prompt, size_t n_own, size_t limit) {
  const int n_cached = cache == nullptr ? 0 : cache->match(prompt, static_cast<int>(limit)).n;
  if (n_cached <= reachable(static_cast<int>(n_own))) {
    if (n_own < tokens.size()) go_back_to(static_cast<int>(n_own));
    return;
  }
  uncommitted->clear();
  drop_logits();
  checkpoints.clear();
  const int n_stay = std::min(n_cached, static_cast<int>(n_same(prompt)));
  if (speculation) speculation->begin_load(sequence, n_stay);
  Memory memory(*this);
  if (!cache->load(prompt, n_cached, n_stay, side, memory)) return clear();
  tokens.assign(prompt.begin(), prompt.begin() + n_cached);
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

const SequencePoint* Session::Impl::point_before(int n) const {
  for (size_t i = checkpoints.size(); i-- > 0;)
    if (checkpoints[i].memory->n_past() <= n) return &checkpoints[i];
  return nullptr;
}

int Session::Impl::reachable(int n) const {
  if (n >= n_past() || backend->can_truncate(sequence, n)) return std::min(n, n_past());
  const SequencePoint* const point = point_before(n);
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
  if (s.cache != nullptr) return s.cache->match(prompt, common).n;
  const SequencePoint* const point = s.point_before(common);
  return point == nullptr ? 0 : point->memory->n_past();
}

void Session::share(const Session& other, std::span<const TokenId> prompt) {
  Impl &s = *impl_, &from = *other.impl_;
  const int n = other.shareable(prompt);
  s.clear();
  if (n == 0) return;
  s.backend->share(from.sequence, s.sequence, n);
  if (!s.backend->can_cut() && s.cache != nullptr) {
    Impl::Memory memory(s);
    if (!s.cache->load(prompt, n, n, s.side, memory)) return s.clear();
    s.tokens.assign(prompt.begin(), prompt.begin() + n);
    return;
  }
  if (!s.backend->can_cut() && !s.backend->restore(s.sequence, *from.point_before(n)->memory)) return;
  s.tokens.assign(prompt.begin(), prompt.begin() + n);
}

bool Session::checkpoint() {
  return impl_->checkpoint();
}

bool Session::Impl::checkpoint() {
  if (cache != nullptr) {
    Memory memory(*this);
    return cache->store(tokens, side, memory);
  }
  if (backend->can_cut()) return true;
  if (max_checkpoints == 0) return false;
  if (!checkpoints.empty() && checkpoints.back().memory->n_past() == n_past()) return true;
  if (checkpoints.size() == max_checkpoints)  // keep the first: the system prompt
    checkpoints.erase(checkpoints.begin() + (max_checkpoints > 1 ? 1 : 0));
  // Keys and values stay where they are.
  SequencePoint point = Memory(*this).checkpoint(nullptr);
  if (point.memory == nullptr) return false;
  checkpoints.push_back(std::move(point));
  return true;
}

std::unique_ptr<KvSource> Session::Impl::Memory::pin_kv() {
  return std::make_unique<PinnedSequence>(*s_.backend, s_.speculation, s_.sequence);
}

bool Session::Impl::Memory::load_kv(int begin, int end, const std::byte* block) {
  return s_.backend->load_kv(s_.sequence, kv_range(begin, end), block) &&
         (!s_.speculation ||
          s_.speculation->load_kv(s_.sequence, begin, end, block + s_.backend->block_bytes()));
}

SequencePoint Session::Impl::Memory::checkpoint(std::unique_ptr<Checkpoint> reuse) {
  return {s_.backend->checkpoint(s_.sequence, false, std::move(reuse)),
          s_.speculation ? s_.speculation->snapshot(s_.sequence) : std::vector<float>{}};
}

bool Session::Impl::Memory::restore(std::span<const TokenId> restored, const SequencePoint* point) {
  if (point != nullptr && !s_.backend->restore(s_.sequence, *point->memory)) return false;
  if (s_.speculation)
    s_.speculation->resume(s_.sequence, restored, point ? point->drafter : std::vector<float>{});
  return true;
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
