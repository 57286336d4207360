// Which sequence has which page of keys and values: pools of pages that all sequences share, and a table for
// each sequence. Bookkeeping only, the same for the processor and a GPU; the owner of the memory copies pages
// when it is told to.
//
// A page may belong to several sequences that begin with the same tokens. The first one that writes to it
// gets a copy. Pages of sliding layers belong to one sequence and go back to their pool when no row can see
// them any more, so a sequence keeps only a few of them, however long it is.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/sequence_layout.h"

namespace thermo {

// Free pages, and how many sequences have each of the others.
class PagePool {
 public:
  explicit PagePool(int n_pages);

  int size() const noexcept { return static_cast<int>(users_.size()); }
  int n_free() const noexcept { return static_cast<int>(free_.size()); }
  int take() noexcept;  // -1: none is left
  void share(int page) noexcept { ++users_[static_cast<size_t>(page)]; }
  void drop(int page) noexcept;
  bool is_shared(int page) const noexcept { return users_[static_cast<size_t>(page)] > 1; }

 private:
  std::vector<int32_t> users_;
  std::vector<int32_t> free_;  // the next one last
};

class KvPages {
 public:
  // Copies a page within the pool of its kind.
  using CopyPage = std::function<void(KvKind kind, int from, int to)>;

  // `tables`: table_ints() integers that outlive it. `max_rows`: of a step.
  KvPages(const SequenceLayout& layout, int n_sequences, int max_rows, std::span<int32_t> tables,
          CopyPage copy);
  static size_t table_ints(const SequenceLayout& layout, int n_sequences) {
    return static_cast<size_t>(kKvKinds * n_sequences * layout.table_pages());
  }

  // Makes positions n_past .. n_past + n - 1 the sequence's own. Returns how many of them it got.
  int reserve(int sequence, int n_past, int n) noexcept;
  // The sequence has n_past tokens now: sliding pages that nobody will see go back.
  void advance(int sequence, int n_past) noexcept;
  // Leaves the pages of the first n tokens.
  void cut(int sequence, int n) noexcept;
  // Whether a sequence that is cut to n tokens can go on.
  bool can_cut(int sequence, int n) const noexcept;
  // Before a copy of a sequence of n tokens is written: the pages that it needs, in place of what the
  // sequence has. False: there are too few, and the sequence has none. Without `with_kv` the pages of Full
  // layers stay.
  bool replace(int sequence, int n, bool with_kv) noexcept;
  // Before positions [position, position + n) of Full layers are written, which become the end of the
  // sequence: their pages. False: there are too few. Sliding layers are left as they are.
  bool load(int sequence, int position, int n) noexcept;
  // `to` has the first n tokens of `from` in Full layers, and nothing else.
  void share(int from, int to, int n) noexcept;
  // For KvPin: the pages of the first n tokens in Full layers, which do not change until they are let go.
  std::vector<int32_t> pin(int sequence, int n);
  void unpin(std::span<const int32_t> pages) noexcept;

  const PagePool& pool(KvKind kind) const noexcept { return pools_[static_cast<size_t>(kind)]; }
  const int32_t* table(KvKind kind, int sequence) const noexcept;
  PageTables tables(int sequence) const noexcept {
    return {table(KvKind::Full, sequence), table(KvKind::Sliding, sequence)};
  }
  // Full pages that the sequence has.
  int n_pages(int sequence) const noexcept { return held(KvKind::Full, sequence).end; }

  // Calls f(first, n) for the integers of the tables that have changed since the last call.
  template <class F>
  void for_each_change(F&& f) noexcept {
    for (size_t i = 0; i < held_.size(); ++i) {
      Held& h = held_[i];
      if (h.changed_end > h.changed_begin)
        f(i * static_cast<size_t>(layout_.table_pages()) + static_cast<size_t>(h.changed_begin),
          static_cast<size_t>(h.changed_end - h.changed_begin));
      h.changed_begin = layout_.table_pages();
      h.changed_end = 0;
    }
  }

 private:
  // Entries [begin, end) of a table are pages.
  struct Held {
    int begin = 0, end = 0;
    int changed_begin = 0, changed_end = 0;
  };
  size_t index(KvKind kind, int sequence) const noexcept {
    return static_cast<size_t>(kind) * static_cast<size_t>(n_sequences_) + static_cast<size_t>(sequence);
  }
  Held& held(KvKind kind, int sequence) noexcept { return held_[index(kind, sequence)]; }
  const Held& held(KvKind kind, int sequence) const noexcept { return held_[index(kind, sequence)]; }
  int32_t& entry(KvKind kind, int sequence, int i) noexcept {
    return tables_[index(kind, sequence) * static_cast<size_t>(layout_.table_pages()) +
                   static_cast<size_t>(i)];
  }
  void put(KvKind kind, int sequence, int i, int page) noexcept;
  int reserve(KvKind kind, int sequence, int n_past, int n) noexcept;
  bool extend(KvKind kind, int sequence, int end) noexcept;
  void cut_to(KvKind kind, int sequence, int end) noexcept;
  bool is_paged(KvKind kind) const noexcept { return layout_.n_layers(kind) > 0; }

  const SequenceLayout& layout_;
  int n_sequences_;
  std::span<int32_t> tables_;  // [kind][sequence][table_pages]
  CopyPage copy_;
  std::array<PagePool, kKvKinds> pools_;
  std::vector<Held> held_;  // [kind][sequence]
};

// Keys and values of a sequence's first tokens in Full layers, as they are now and whatever becomes of the
// sequence: it copies a page before it changes it.
class KvPin {
 public:
  // `pages` must outlive it.
  KvPin(KvPages& pages, int sequence, int n) : pages_(pages), table_(pages.pin(sequence, n)), n_tokens_(n) {}
  ~KvPin() { pages_.unpin(table_); }
  KvPin(const KvPin&) = delete;
  KvPin& operator=(const KvPin&) = delete;

  int n_tokens() const noexcept { return n_tokens_; }
  const int32_t* table() const noexcept { return table_.data(); }
  // Lets go of the pages after the first n tokens.
  void shorten(int n) noexcept {
    const auto n_kept = static_cast<size_t>(ceil_div(n, kKvPage));
    pages_.unpin(std::span<const int32_t>(table_).subspan(n_kept));
    table_.resize(n_kept);
    n_tokens_ = n;
  }

 private:
  KvPages& pages_;
  std::vector<int32_t> table_;
  int n_tokens_;
};

}  // namespace thermo
