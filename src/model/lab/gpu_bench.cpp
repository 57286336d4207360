// Whole-model measurements on the GPU without the engine around it:
//   gpu_bench MODEL.gguf [--split PERCENT] [--no-fetch] [--no-cpu] [--no-ahead] [--no-swaps] [--ctx N]
//   [--prefill N] [--deep N] [--steps N] [--no-graphs] [--draft DRAFTER.gguf] [--profile]
//   [--sequences N] [--rows N]
//   [--only decode|logits|rows|draft|prefill|deep|repeat|one|big|uncommitted|sequences]
// --sequences: steps of a row of each, after --prefill tokens. --rows: of --only rows, one row and N alone.
// --profile: a profiler sees the last step of each row count, number of sequences or prompt, and the last
// draft.
#include <cuda_profiler_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "base/units.h"
#include "device/device_info.h"
#include "experts/lane_split.h"
#include "gguf/gguf_file.h"
#include "model/dense_parts.h"
#include "model/drafter_network.h"
#include "model/gpu/gpu_model.h"

using namespace thermo;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<Row> chain(int n, int seed, int n_vocab, bool all_logits = false) {
  std::vector<Row> rows;
  for (int i = 0; i < n; ++i)
    rows.push_back({.token = (seed * 7919 + i * 104729) % n_vocab,
                    .parent = i - 1,
                    .want_logits = all_logits || i + 1 == n});
  return rows;
}

void step(GpuModel& model, const std::vector<Row>& rows, bool uncommitted = false,
          LogitsNeed need = LogitsNeed::Row) {
  const SequenceRows group{.sequence = 0, .rows = rows, .uncommitted = uncommitted, .need = need};
  model.step({.groups = {&group, 1}});
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  int n_ctx = 4096, prefill = 2048, deep = 0, steps = 100, n_sequences = 1, only_rows = 0;
  bool graphs = true, profile = false;
  double split = -1.0;  // share of the experts' bytes in GPU memory; negative: resident
  SplitOptions experts;
  std::string only, draft;
  for (int i = 2; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--no-graphs")
      graphs = false;
    else if (flag == "--no-fetch")
      experts.fetch = false;
    else if (flag == "--no-cpu")
      experts.cpu = false;
    else if (flag == "--no-ahead")
      experts.read_ahead = false;
    else if (flag == "--no-swaps")
      experts.swaps = false;
    else if (flag == "--profile")
      profile = true;
    else if (i + 1 >= argc)
      return 2;
    else if (flag == "--ctx")
      n_ctx = std::atoi(argv[++i]);
    else if (flag == "--prefill")
      prefill = std::atoi(argv[++i]);
    else if (flag == "--deep")
      deep = std::atoi(argv[++i]);
    else if (flag == "--steps")
      steps = std::atoi(argv[++i]);
    else if (flag == "--sequences")
      n_sequences = std::atoi(argv[++i]);
    else if (flag == "--rows")
      only_rows = std::atoi(argv[++i]);
    else if (flag == "--split")
      split = std::atof(argv[++i]) / 100.0;
    else if (flag == "--only")
      only = argv[++i];
    else if (flag == "--draft")
      draft = argv[++i];
  }
  const auto wants = [&](const char* what) { return only.empty() || only.find(what) != std::string::npos; };
  if (deep > 0) n_ctx = std::max(n_ctx, deep + 512);

  const double start = now();
  const GgufFile file(argv[1]);
  ThreadPool pool;
  ModelConfig config = read_model_config(file);
  if (const int n_parts = dense_parts(config, file); split >= 0.0 && n_parts > 0) cut_dense(config, n_parts);
  std::unique_ptr<GgufFile> draft_file;
  DflashConfig dflash;
  if (!draft.empty()) {
    draft_file = std::make_unique<GgufFile>(draft);
    dflash = read_dflash_config(*draft_file, config);
    insert_taps(config.network, config.n_layer, dflash.states);
  }
  const Weights weights = Weights::load(config, file, false, pool, {});
  ModelOptions options;
  options.n_batch = std::max(prefill, 64);
  options.graphs = graphs;
  options.n_sequences = n_sequences;
  options.sequence = {.n_ctx = n_ctx, .max_draft_rows = 64, .k_type = KvType::F16, .v_type = KvType::F16};
  if (split >= 0.0) {
    uint64_t total = 0;
    for (const LayerWeights& layer : weights.layers)
      for (const BlockWeights& block : layer.blocks)
        for (const Ffn& expert : block.experts) total += expert.n_bytes();
    experts.split = true;
    experts.budget_bytes = static_cast<uint64_t>(split * static_cast<double>(total));
    options.experts = experts;
    options.isa = best_isa();
  }
  for (const GpuMemoryItem& item : GpuModel::plan(config, weights, options, use_device(0).n_multiprocessors))
    fmt::print("plan {:16} {}\n", item.name, format_bytes(item.bytes));
  const uint64_t bytes_per_token = weights.bytes_per_token;
  GpuModel model(std::move(config), weights, options, pool, {});
  const int n_vocab = model.config().n_vocab;
  fmt::print("load {:.2f} s, {} a token\n", now() - start, format_bytes(bytes_per_token));
  std::fflush(stdout);

  ExpertTelemetry before;
  const auto show_lanes = [&] {
    if (model.experts() == nullptr) return;
    const ExpertTelemetry t = model.expert_telemetry();
    const double tokens = static_cast<double>(std::max<uint64_t>(1, t.tokens - before.tokens));
    const auto per_token = [&](uint64_t now, uint64_t old) {
      return static_cast<double>(now - old) / tokens;
    };
    fmt::print(
        "  hit {:.1f} %, per token: {:.1f} of {:.1f} of {:.1f} parcels used, {:.1f} kept, cpu {:.1f} MB "
        "{:.0f} us, fetched {:.1f} "
        "MB, streamed "
        "{:.1f} MB, moved "
        "{:.2f}, stall {:.0f} us (worst layer {:.0f} us), foreseen {:.0f} %, ahead {:.1f} MB\n",
        100.0 * per_token(t.hot_pairs, before.hot_pairs) / per_token(t.pairs, before.pairs),
        per_token(t.parcels_used, before.parcels_used), per_token(t.parcels_came, before.parcels_came),
        per_token(t.parcels, before.parcels), per_token(t.parcels_kept, before.parcels_kept),
        per_token(t.cpu_bytes, before.cpu_bytes) * 1e-6, per_token(t.cpu_ns, before.cpu_ns) * 1e-3,
        per_token(t.fetched_bytes, before.fetched_bytes) * 1e-6,
        per_token(t.streamed_bytes, before.streamed_bytes) * 1e-6, per_token(t.moved, before.moved),
        per_token(t.stall_ns, before.stall_ns) * 1e-3, static_cast<double>(t.max_stall_ns) * 1e-3,
        100.0 * static_cast<double>(t.foreseen - before.foreseen) /
            static_cast<double>(std::max<uint64_t>(1, t.cold_experts - before.cold_experts)),
        per_token(t.ahead_bytes, before.ahead_bytes) * 1e-6);
    const LaneSplit& lanes = model.experts()->lanes();
    for (const int cold : {1, 2, 3, 4, 8, 15}) {
      fmt::print("  {} cold: fetches {};", cold, lanes.fetch(cold));
      for (int f = 0; f <= std::min(cold, 4); ++f)
        fmt::print(" {}: {:.0f} us (cpu {:.0f}, gpu {:.0f})", f, lanes.layer_us(cold, f),
                   lanes.cpu_us(cold - f), lanes.gpu_us(f));
      fmt::print("\n");
    }
    before = t;
  };
  const auto time_steps = [&](int n_rows, int count, bool uncommitted, LogitsNeed need = LogitsNeed::Row) {
    std::vector<double> wall, device;
    for (int i = 0; i < count + 5; ++i) {
      const std::vector<Row> rows = chain(n_rows, i, n_vocab, uncommitted);
      const bool last = profile && i + 1 == count + 5;
      const double t = now();
      if (last) cudaProfilerStart();
      step(model, rows, uncommitted, need);
      if (last) cudaProfilerStop();
      if (i >= 5) {
        wall.push_back((now() - t) * 1e3);
        device.push_back(model.last_step_ms());
      }
      if (uncommitted) model.commit(0, {});
    }
    return std::pair(median(wall), median(device));
  };
  if (wants("one")) {
    step(model, chain(1, 1, n_vocab));
    step(model, chain(1, 2, n_vocab));
    fmt::print("one step: fault '{}'\n", model.fault());
  }
  if (only == "big") step(model, chain(prefill, 1, n_vocab));
  if (only == "uncommitted") step(model, chain(prefill, 1, n_vocab), true);
  if (wants("decode")) {
    step(model, chain(64, 1, n_vocab));
    before = model.expert_telemetry();
    const auto [wall, device] = time_steps(1, steps, false);
    fmt::print("decode at {}: {:.3f} ms wall ({:.0f} tok/s), {:.3f} ms device ({:.0f} tok/s, {:.0f} GB/s)\n",
               model.n_past(0), wall, 1e3 / wall, device, 1e3 / device,
               static_cast<double>(bytes_per_token) / device / 1e6);
    show_lanes();
    std::fflush(stdout);
  }
  if (wants("logits")) {
    for (const auto& [need, name] :
         {std::pair(LogitsNeed::Row, "row"), {LogitsNeed::Top, "top"}, {LogitsNeed::Best, "best"}}) {
      const auto [wall, device] = time_steps(1, steps, false, need);
      fmt::print("decode, logits as {:4}: {:.3f} ms wall, {:.3f} ms device\n", name, wall, device);
    }
    std::fflush(stdout);
  }
  if (wants("rows")) {
    double one = 0;
    for (const int n : {1, 2, 4, 8, 16, 32, 64}) {
      if (only_rows > 0 && n != 1 && n != only_rows) continue;
      const auto [wall, device] = time_steps(n, 15, true, LogitsNeed::Best);  // a draft to verify
      if (n == 1) one = device;
      fmt::print("rows {:3}: {:.3f} ms wall, {:.3f} ms device, {:.2f} of one\n", n, wall, device,
                 device / one);
    }
    // A draft has 64 rows at most; beyond that rows are committed.
    for (const int n : {64, 96, 128, 192, 256}) {
      if (only_rows > 0 || n > prefill || 10 * n > n_ctx) continue;
      model.clear(0);
      const auto [wall, device] = time_steps(n, 5, false);
      fmt::print("rows {:3}, committed: {:.3f} ms wall, {:.3f} ms device, {:.2f} of one\n", n, wall, device,
                 device / one);
    }
    model.clear(0);
    std::fflush(stdout);
  }
  if (n_sequences > 1 && wants("sequences")) {
    std::vector<SequenceRows> groups;
    std::vector<std::vector<Row>> rows;
    for (int sequence = 0; sequence < n_sequences; ++sequence) {
      const std::vector<Row> prompt = chain(prefill, sequence, n_vocab);
      const SequenceRows group{.sequence = sequence, .rows = prompt};
      model.step({.groups = {&group, 1}});
    }
    std::vector<double> wall, device;
    for (int i = 0; i < 20; ++i) {
      rows.clear();
      groups.clear();
      for (int sequence = 0; sequence < n_sequences; ++sequence)
        rows.push_back(chain(1, i * n_sequences + sequence, n_vocab));
      for (int sequence = 0; sequence < n_sequences; ++sequence)
        groups.push_back(
            {.sequence = sequence, .rows = rows[static_cast<size_t>(sequence)], .need = LogitsNeed::Best});
      const double t = now();
      if (profile && i == 19) cudaProfilerStart();
      model.step({.groups = groups});
      if (profile && i == 19) cudaProfilerStop();
      wall.push_back((now() - t) * 1e3);
      device.push_back(model.last_step_ms());
    }
    fmt::print("{} sequences at {}: {:.3f} ms wall, {:.3f} ms device\n", n_sequences, model.n_past(0),
               median(wall), median(device));
    for (int sequence = 0; sequence < n_sequences; ++sequence) model.clear(sequence);
    std::fflush(stdout);
  }
  if (draft_file && wants("draft")) {
    // A round: seven rows were accepted, then a block is filled.
    ModelOptions own = options;
    own.n_batch = 256;
    own.sequence.max_draft_rows = dflash.block;
    const Weights draft_weights = Weights::of_drafter(dflash.model, *draft_file, weights, false, pool);
    GpuModel drafter(dflash.model, draft_weights, own, pool, {}, &model);
    step(model, chain(7, 1, n_vocab), true);
    std::vector<Row> rows;
    for (int slot = 0; slot < dflash.block; ++slot)
      rows.push_back({.token = slot == 0 ? 1 : dflash.mask, .parent = slot - 1, .want_logits = slot > 0});
    const auto time_drafts = [&] {
      std::vector<double> wall, device;
      for (int i = 0; i < 40; ++i) {
        const double t = now();
        if (profile && i == 39) cudaProfilerStart();
        drafter.append_features(0, model.states());
        step(drafter, rows, true, LogitsNeed::Few);
        if (profile && i == 39) cudaProfilerStop();
        wall.push_back((now() - t) * 1e3);
        device.push_back(drafter.last_step_ms());
      }
      fmt::print("draft of {} at {}: {:.3f} ms wall, {:.3f} ms device without features {}\n",
                 dflash.block - 1, drafter.n_past(0), median(wall), median(device), drafter.fault());
      std::fflush(stdout);
    };
    time_drafts();
    if (deep > 0) {
      step(model, chain(own.n_batch, 2, n_vocab));
      while (drafter.n_past(0) + own.n_batch <= deep) drafter.append_features(0, model.states());
      step(model, chain(7, 1, n_vocab), true);
      profile = false;
      time_drafts();
    }
  }
  if (wants("prefill")) {
    for (const int n : {128, 512, prefill}) {
      if (n > prefill || n > n_ctx) continue;
      std::vector<double> wall, device;
      for (int i = 0; i < 4; ++i) {
        model.clear(0);
        const std::vector<Row> rows = chain(n, i, n_vocab);
        const double t = now();
        if (profile && i == 3) cudaProfilerStart();
        step(model, rows);
        if (profile && i == 3) cudaProfilerStop();
        if (i > 0) {
          wall.push_back(now() - t);
          device.push_back(model.last_step_ms() * 1e-3);
        }
      }
      fmt::print("prefill {}: {:.0f} tok/s wall, {:.0f} tok/s device ({:.2f} ms)\n", n, n / median(wall),
                 n / median(device), median(device) * 1e3);
      show_lanes();
      std::fflush(stdout);
    }
  }
  if (deep > 0 && wants("deep")) {
    model.clear(0);
    const double t = now();
    for (int done = 0; done < deep; done += prefill)
      step(model, chain(std::min(prefill, deep - done), done, n_vocab));
    fmt::print("prefill of {} in chunks of {}: {:.0f} tok/s\n", deep, prefill, deep / (now() - t));
    const auto [wall, device] = time_steps(1, 50, false);
    fmt::print("decode at {}: {:.3f} ms wall ({:.0f} tok/s), {:.3f} ms device\n", model.n_past(0), wall,
               1e3 / wall, device);
  }
  if (!model.fault().empty()) fmt::print("FAULT {}\n", model.fault());
  return model.fault().empty() ? 0 : 7;
}
