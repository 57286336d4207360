// Drafting for the sequences of an engine: keeps the drafter up to date with every step and commit, makes the
// tree of a round, and learns from what became of it.
//
// A round: draft() -> one uncommitted step of the root and the nodes -> the request loop walks the tree with
// the sampler -> finish_round() -> Engine::commit() along the path.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "experts/telemetry.h"
#include "experts/trace.h"
#include "speculative/drafter.h"
#include "speculative/planner.h"
#include "speculative/telemetry.h"

namespace thermo {

struct SpeculationOptions {
  int budget = 0;                // nodes besides the root in every round; 0: planned
  int max_depth = 0;             // 0: as deep as the drafter goes
  int min_depth = 0;             // a tree that is less deep is not verified
  float min_probability = 0.0f;  // candidates below it are left out
  int max_candidates = 0;        // of a position; 0: as many as are of use
  bool cautious = false;         // short answers are written without drafts, where these are planned
  TraceWriter* trace = nullptr;  // nullptr: none
  int n_sequences = 1;
  int max_rows = 0;         // of a round
  int max_uncommitted = 0;  // rows of a sequence's uncommitted step, whoever made it
};

struct DraftAsk {
  int sequence = 0;
  TokenId root = 0;
  int max_nodes = 0;  // that there is room for: in the step, and in the context
  int max_depth = 0;  // that is of use: the answer may end
  bool ends = false;  // one of them is small because answer or context end
  SampledChoice choice = {};
};

class Speculation {
 public:
  // `target` leaves the states that the drafter reads, and must outlive this.
  Speculation(std::unique_ptr<Drafter> drafter, Backend& target, const SpeculationOptions& options);

  const Drafter& drafter() const { return *drafter_; }

  // Drafts a few times for nobody: a network's first pass takes its memory from the system, which takes as
  // long as twenty drafts of a small one; the others say what a draft takes, and go on until two agree.
  // `with_steps`: after steps of the target, so that the first answer need not find out what those take.
  // Before the first request.
  void warm_up(bool with_steps);

  // A step begins: the states of uncommitted rows are put aside.
  void before_step();
  // After a step. `seconds`: what it took; `experts`: what they did in it.
  void took_step(const StepBatch& batch, double seconds, const ExpertTelemetry& experts);
  // After these of a sequence's uncommitted rows became part of it, which took the target so long. Before its
  // memory is cut or restored the caller says so with the functions below.
  void committed(int sequence, std::span<const int32_t> path, double seconds);

  void truncate(int sequence, int n);
  std::vector<float> snapshot(int sequence) const { return drafter_->snapshot(sequence); }
  void restore(int sequence, int n, std::span<const float> snapshot);

  // Its keys and values in blocks of main memory: those of tokens [begin, end), which are in one block.
  size_t block_bytes() const;
  // nullptr: it has none.
  std::unique_ptr<KvPin> pin_kv(int sequence);
  void save_kv(const KvPin& pin, int begin, int end, std::byte* block);
  // The first n tokens stay; loads follow, and then resume().
  void begin_load(int sequence, int n);
  bool load_kv(int sequence, int begin, int end, const std::byte* block);
  void resume(int sequence, std::span<const TokenId> tokens, std::span<const float> snapshot);

  // A request begins to write.
  void begin_request(int sequence);
  // The first draft of an answer, with the step that read its prompt: whether drafts pay is known a few
  // tokens later then, and no token waited for it. Where drafts are planned, and it is known what steps take.
  void draft_early(const DraftAsk& ask);
  // The trees of a round, of different sequences; tree() has them. None of them may have more nodes than
  // asked for.
  void draft(std::span<const DraftAsk> asks);
  std::span<const DraftNode> tree(int sequence) const;
  // The tree of this sequence is not verified after all.
  void drop_tree(int sequence) { at(sequence).tree.clear(); }
  // Of a round of this sequence: `path` of its rows was accepted, the root first, and then `next` was chosen;
  // -1: nothing.
  void finish_round(int sequence, std::span<const int32_t> path, TokenId next);
  // Only so many of the nodes that this sequence's last round accepted became part of the text.
  void cut_round(int sequence, int n_accepted);
  // What followed a plain step of this sequence.
  void saw(int sequence, TokenId token);

  // Of all sequences: what several wait for together counts once.
  DraftTelemetry telemetry() const;
  // Of one: all that it waited for.
  DraftTelemetry telemetry(int sequence) const;

 private:
  struct Sequence {
    DraftPlanner planner;
    bool planned = false;                          // it decided about this round
    int n_asks = 1;                                // sequences of this round
    int n_drafting = 1;                            // of them, those that were drafted for with it
    bool knows_nothing = false, is_short = false;  // why its last draft was not verified
    Draft draft;
    TokenId early_root = -1;  // of a draft that waits for its round; -1: there is none
    int n_guessed = -1;  // tokens of a draft that was not verified and came true so far; -1: there is none
    std::vector<DraftNode> tree;
    // Its uncommitted rows.
    std::vector<TokenId> tokens;
    int first_row = -1;  // in the last step; -1: their states were put aside
    std::unique_ptr<StateBuffer> aside;
    DraftTelemetry telemetry;
    int n_accepted = 0, n_tried = 0;  // depths of the last round
  };
  // For counters: of the sequence and of all.
  template <class Count>
  void count(Sequence& s, const Count& count);
  Sequence& at(int sequence) { return sequences_[static_cast<size_t>(sequence)]; }
  void drop_guess(Sequence& s);
  RoundCosts costs(const Sequence& s, int n_drafted = 0) const;
  bool is_trusted() const;
  // The text had `token` after `depth - 1` tokens that were drafted.
  int observe(const Sequence& s, int depth, TokenId token);
  DraftRequest request_for(const DraftAsk& ask) const;
  // Asks for all requests_: of some of the sequences that are asked for.
  void run_drafter(std::span<const DraftAsk> asks);
  void trace_draft(int64_t begin_ns, int64_t n_nodes) const;  // of requests_; -1: the tree is made later
  void trace_choice(int sequence) const;
  // For people: "on", "off: ...".
  std::string state_of(const Sequence& s) const;
  void make_tree(Sequence& s, const DraftAsk& ask, bool is_early);
  // Rounds of so many rows that leave nothing. What a step takes; 0: there was none.
  double warm_up_round(int n_rows, bool with_step, bool with_draft);

  std::unique_ptr<Drafter> drafter_;
  Backend& target_;
  SpeculationOptions options_;
  std::vector<Sequence> sequences_;
  StepTimes times_;
  // Of the last step.
  double step_seconds_ = 0.0;
  ExpertTelemetry step_experts_;
  int n_step_groups_ = 1;  // the sequences in it
  int n_step_nodes_ = 0;   // and what was drafted for them
  int last_asked_ = -1;    // the sequence that was drafted for last; -1: none
  StepTimes draft_times_;  // of a pass that drafts for so many sequences
  Calibration calibration_;
  DraftTreeBuilder builder_;
  Draft adjusted_;
  std::vector<DraftRequest> requests_;
  std::vector<Draft> drafts_;
  DraftTelemetry telemetry_;
};

}  // namespace thermo
