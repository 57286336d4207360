// The inside of a Session: its tokens, its memory, the points it can go back to.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "engine/prefix_cache.h"
#include "engine/speculation.h"
#include "model/backend.h"
#include "sampling/constrained_sampler.h"

namespace thermo {

// What a caller is told when the device cannot go on.
Error device_fault(const Backend& backend);
// And when there are no pages of keys and values for its rows.
Error no_pages(const Backend& backend);

struct Session::Impl {
  Engine* engine = nullptr;
  Backend* backend = nullptr;
  Speculation* speculation = nullptr;  // nullptr: nothing is drafted
  int sequence = 0;
  std::function<void()> release;
  std::vector<Impl*>* unread = nullptr;         // the engine's; this session is in it while `top` is set
  std::vector<int32_t>* uncommitted = nullptr;  // the engine's, of this sequence

  std::vector<TokenId> tokens;
  // After the last token: the row, or its top while the row is still on the device.
  std::vector<float> logits;
  const TopLogits* top = nullptr;
  size_t top_index = 0;                    // of that row in the step's output
  std::vector<SequencePoint> checkpoints;  // increasing lengths; the empty beginning is always reachable
  PrefixCache* cache = nullptr;            // has them instead, and what other sessions held
  bool side = false;                       // what it keeps in the cache is worth little
  std::vector<Row> rows;                   // of the chunk being run
  size_t max_checkpoints = 0;
  bool in_request = false;

  int n_past() const { return backend->n_past(sequence); }
  bool has_logits() const { return !logits.empty() || top != nullptr; }
  void drop_logits();
  // Brings the row here, if it is not. False after a device fault.
  bool fetch_logits();
  // Whether so many tokens more fit.
  Status check_room(size_t n_tokens) const;
  // Adds the rows of the next tokens. `ends`, `each`: the last one, or each one wants logits.
  static void add_rows(std::span<const TokenId> ids, bool ends, bool each, std::vector<Row>& rows);
  // After a step that computed them: the session holds these tokens, and logits if rows[i] are its own.
  void took_step(std::span<const TokenId> ids, const StepOutput& output, std::optional<size_t> i);
  // After a commit of uncommitted rows with these tokens. `logits`: the i-th of the last step's output that
  // are the session's now; nullopt: nobody will ask for them.
  void took_path(std::span<const TokenId> ids, std::optional<size_t> i);
  std::optional<TokenId> choose(ConstrainedSampler& sampler);
  // The newest point from which the first n tokens can be continued.
  void go_back_to(int n);
  // The longest common beginning of the session and a prompt.
  size_t n_same(std::span<const TokenId> prompt) const;
  // Of the session and a prompt: the longest common beginning that leaves something to compute, so that there
  // are logits.
  size_t common_with(std::span<const TokenId> prompt) const;
  // The newest checkpoint of at most n tokens; nullptr: there is none.
  const SequencePoint* point_before(int n) const;
  // How many tokens go_back_to(n) would leave.
  int reachable(int n) const;
  // Makes it hold the most of these tokens that can be had: the first n_own from its own memory, or `limit`
  // from the cache.
  void hold(std::span<const TokenId> prompt, size_t n_own, size_t limit);
  // False: there is no memory for it.
  bool checkpoint();
  void clear();

  // The memory of the sequence, of the model and of the drafter: a block has the model's part first.
  class Memory final : public SequenceAccess {
   public:
    explicit Memory(Impl& session) : s_(session) {}

    std::unique_ptr<KvSource> pin_kv() override;
    bool load_kv(int begin, int end, const std::byte* block) override;
    SequencePoint checkpoint(std::unique_ptr<Checkpoint> reuse) override;
    bool restore(std::span<const TokenId> restored, const SequencePoint* point) override;

   private:
    Impl& s_;
  };
};

}  // namespace thermo
