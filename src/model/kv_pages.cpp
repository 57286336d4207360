#include "model/kv_pages.h"

#include <algorithm>

#include "base/check.h"

namespace thermo {

PagePool::PagePool(int n_pages) : users_(static_cast<size_t>(n_pages)) {
  free_.reserve(users_.size());
  for (int page = n_pages; page-- > 0;) free_.push_back(page);
}

int PagePool::take() noexcept {
  if (free_.empty()) return -1;
  const int page = free_.back();
  free_.pop_back();
  users_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::drop(int page) noexcept {
  int32_t& users = users_[static_cast<size_t>(page)];
  THERMO_CHECK(users > 0, "a page that nobody has");
  if (--users == 0) free_.push_back(page);  // there is room for all
}

KvPages::KvPages(const SequenceLayout& layout, int n_sequences, int max_rows, std::span<int32_t> tables,
                 CopyPage copy)
    : layout_(layout),
      n_sequences_(n_sequences),
      tables_(tables),
      copy_(std::move(copy)),
      pools_{PagePool(layout.pool_pages(KvKind::Full, n_sequences, max_rows)),
             PagePool(layout.pool_pages(KvKind::Sliding, n_sequences, max_rows))},
      held_(static_cast<size_t>(kKvKinds * n_sequences)) {
  THERMO_CHECK(tables.size() == table_ints(layout, n_sequences), "page tables of another size");
  std::fill(tables_.begin(), tables_.end(), 0);
  for (Held& h : held_) h.changed_end = layout.table_pages();
}

const int32_t* KvPages::table(KvKind kind, int sequence) const noexcept {
  return tables_.data() + index(kind, sequence) * static_cast<size_t>(layout_.table_pages());
}

void KvPages::put(KvKind kind, int sequence, int i, int page) noexcept {
  entry(kind, sequence, i) = page;
  Held& h = held(kind, sequence);
  h.changed_begin = std::min(h.changed_begin, i);
  h.changed_end = std::max(h.changed_end, i + 1);
}

int KvPages::reserve(int sequence, int n_past, int n) noexcept {
  for (const KvKind kind : kEachKvKind)
    if (is_paged(kind)) n = std::min(n, reserve(kind, sequence, n_past, n));
  return n;
}

int KvPages::reserve(KvKind kind, int sequence, int n_past, int n) noexcept {
  Held& h = held(kind, sequence);
  PagePool& pool = pools_[static_cast<size_t>(kind)];
  const int end = std::min(ceil_div(n_past + n, kKvPage), layout_.table_pages());
  int i = n_past / kKvPage;
  if (h.begin == h.end) h.begin = h.end = i;
  for (; i < end; ++i) {
    if (i < h.end) {
      const int page = entry(kind, sequence, i);
      if (!pool.is_shared(page)) continue;
      const int own = pool.take();
      if (own < 0) break;
      copy_(kind, page, own);
      pool.drop(page);
      put(kind, sequence, i, own);
    } else if (!extend(kind, sequence, i + 1)) {
      break;
    }
  }
  return std::clamp(i * kKvPage - n_past, 0, n);
}

bool KvPages::extend(KvKind kind, int sequence, int end) noexcept {
  Held& h = held(kind, sequence);
  while (h.end < end) {
    const int page = pools_[static_cast<size_t>(kind)].take();
    if (page < 0) return false;
    put(kind, sequence, h.end++, page);
  }
  return true;
}

void KvPages::advance(int sequence, int n_past) noexcept {
  if (!is_paged(KvKind::Sliding)) return;
  Held& h = held(KvKind::Sliding, sequence);
  for (const int first = std::min(layout_.first_kept_page(n_past), h.end); h.begin < first; ++h.begin)
    pools_[static_cast<size_t>(KvKind::Sliding)].drop(entry(KvKind::Sliding, sequence, h.begin));
}

void KvPages::cut_to(KvKind kind, int sequence, int end) noexcept {
  Held& h = held(kind, sequence);
  while (h.end > std::max(h.begin, end))
    pools_[static_cast<size_t>(kind)].drop(entry(kind, sequence, --h.end));
  if (h.begin == h.end) h.begin = h.end = 0;
}

void KvPages::cut(int sequence, int n) noexcept {
  for (const KvKind kind : kEachKvKind)
    if (is_paged(kind)) cut_to(kind, sequence, ceil_div(n, kKvPage));
}

bool KvPages::can_cut(int sequence, int n) const noexcept {
  if (!is_paged(KvKind::Sliding) || n == 0) return true;
  const Held& h = held(KvKind::Sliding, sequence);
  return h.begin <= layout_.sliding_begin(n) / kKvPage && n <= h.end * kKvPage;
}

bool KvPages::replace(int sequence, int n, bool with_kv) noexcept {
  const int end = ceil_div(n, kKvPage);
  bool all = true;
  if (is_paged(KvKind::Sliding)) {
    cut_to(KvKind::Sliding, sequence, 0);
    Held& h = held(KvKind::Sliding, sequence);
    h.begin = h.end = std::min(layout_.sliding_begin(n) / kKvPage, end);
    all = extend(KvKind::Sliding, sequence, end);
  }
  if (is_paged(KvKind::Full)) {
    cut_to(KvKind::Full, sequence, with_kv ? 0 : end);
    all = all && extend(KvKind::Full, sequence, end);
  }
  if (!all) cut(sequence, 0);
  return all;
}

bool KvPages::load(int sequence, int position, int n) noexcept {
  if (!is_paged(KvKind::Full)) return true;
  cut_to(KvKind::Full, sequence, ceil_div(position + n, kKvPage));
  return reserve(KvKind::Full, sequence, position, n) == n;
}

void KvPages::share(int from, int to, int n) noexcept {
  THERMO_CHECK(from != to, "a sequence that would share with itself");
  cut(to, 0);
  if (!is_paged(KvKind::Full)) return;
  const int end = ceil_div(n, kKvPage);
  THERMO_CHECK(end <= held(KvKind::Full, from).end, "pages that the sequence does not have");
  for (int i = 0; i < end; ++i) {
    const int page = entry(KvKind::Full, from, i);
    pools_[static_cast<size_t>(KvKind::Full)].share(page);
    put(KvKind::Full, to, i, page);
  }
  held(KvKind::Full, to).end = end;
}

std::vector<int32_t> KvPages::pin(int sequence, int n) {
  std::vector<int32_t> pinned(static_cast<size_t>(ceil_div(n, kKvPage)));
  if (!is_paged(KvKind::Full)) return pinned;
  THERMO_CHECK(static_cast<int>(pinned.size()) <= held(KvKind::Full, sequence).end,
               "pages that the sequence does not have");
  for (size_t i = 0; i < pinned.size(); ++i) {
    pinned[i] = entry(KvKind::Full, sequence, static_cast<int>(i));
    pools_[static_cast<size_t>(KvKind::Full)].share(pinned[i]);
  }
  return pinned;
}

void KvPages::unpin(std::span<const int32_t> pages) noexcept {
  if (!is_paged(KvKind::Full)) return;
  for (const int32_t page : pages) pools_[static_cast<size_t>(KvKind::Full)].drop(page);
}

}  // namespace thermo
