#include "engine/speed_model.h"

#include <algorithm>
#include <cmath>

namespace thermo {
namespace {

// Fitted to 17 runs on one machine (an H200 and 16 cores, also as 8 and 4 cores and as cards of 8 to 24 GB),
// and to later ones of dense 27B and of prompts; see docs/memory.md.
constexpr double kProductsPerLayer = 8.0;  // one after the other, each with all threads
constexpr double kDecodeShare = 0.92;      // of what memory or the kernels give: borders between products
constexpr double kSerialPerLayer = 4e-6;   // norms, routing, sums between them
constexpr double kPrefillShare = 0.80;     // of the kernels' speed; what is not a product
constexpr double kCardReadShare = 0.55;    // of the card's bandwidth that decoding reaches
constexpr double kCardDenseShare = 0.74;   // the same with the large matrices of dense models
constexpr double kCardPerLayer = 15.5e-6;  // hand-overs between launches
constexpr double kCardMacsPerSm = 0.7e12;  // multiply-adds of a prompt, for each multiprocessor
constexpr double kCardWideMacs = 2.0e12;   // the same of dense matrices by warpgroups
constexpr double kCardPromptRead = 0.32;   // of the bandwidth, where each weight is read for a few rows
constexpr double kHandOver = 18e-6;        // of a layer with cold experts: mailbox, there and back
constexpr double kLaneShare = 0.87;        // of the kernels' speed that the processor's lane reaches
constexpr double kLaneProducts = 2.0;      // of a layer
constexpr double kColdUses = 0.9;          // of what evenly used experts would be: the used ones become hot
constexpr double kCarried = 0.3;  // of the link's bytes, and of the cold ones at most: sent in time and used
constexpr double kStreamShare = 0.98;  // of the link's speed that the experts of a prompt get

TypeWork& of_type(std::vector<TypeWork>& types, DType dtype) {
  const auto at =
      std::find_if(types.begin(), types.end(), [&](const TypeWork& t) { return t.dtype == dtype; });
  return at != types.end() ? *at : types.emplace_back(TypeWork{.dtype = dtype});
}

double macs(const Matrix& m) {
  return m.n_rows * static_cast<double>(m.n_cols);
}

// Positions that a row of a prompt sees, on average.
double mean_seen(int window) {
  const double n = kPromptRows, most = window == 0 ? n : std::min<double>(window, n);
  return most - most * (most - 1.0) / (2.0 * n);
}

void add_block(TokenWork& work, const Block& block, const BlockWeights& weights, int head_dim) {
  for (const TensorSpec& spec : block.tensors) {
    const Matrix& m = weights[spec.role];
    if (spec.form != TensorForm::Matrix || m.empty()) continue;
    TypeWork& type = of_type(work.types, m.dtype);
    type.core_bytes += m.n_bytes();
    if (block.kind != BlockKind::Head) type.core_macs += macs(m);  // only a prompt's last row needs logits
  }
  if (block.kind == BlockKind::Attention)
    work.attention_macs += 2.0 * block.n_head * head_dim * mean_seen(block.window);
  if (weights.experts.empty()) return;
  const Ffn& expert = weights.experts.front();
  const int n_used = block.route.n_expert_used;
  for (const Matrix* m : {&expert.gate, &expert.up, &expert.down}) {
    if (m->empty()) continue;
    TypeWork& type = of_type(work.types, m->dtype);
    type.expert_bytes += static_cast<uint64_t>(n_used) * m->n_bytes();
    type.expert_macs += n_used * macs(*m);
  }
  work.expert_share = static_cast<double>(n_used) / static_cast<double>(weights.experts.size());
}

const TypeRates& rates_of(const MachineRates& machine, DType dtype) {
  const auto at = machine.types.find(dtype);
  return at != machine.types.end() ? at->second : machine.types.begin()->second;
}

// Bytes a second of weights from memory: not more than it was seen to deliver.
double one_row_rate(const MachineRates& machine, DType dtype) {
  return std::min(rates_of(machine, dtype).one_row, machine.read);
}

// Between the measured numbers of rows, on a scale of powers.
double macs_per_second(const TypeRates& rates, double bytes_per_mac, double n_rows) {
  const double one = rates.one_row / bytes_per_mac;
  const auto between = [](double a, double b, double t) {
    return a * std::pow(b / a, std::clamp(t, 0.0, 1.0));
  };
  if (n_rows <= kFewRows)
    return between(one, std::max(one, rates.few_rows),
                   std::log2(std::max(1.0, n_rows)) / std::log2(kFewRows));
  return between(rates.few_rows, std::max(rates.few_rows, rates.many_rows),
                 std::log2(n_rows / kFewRows) / std::log2(static_cast<double>(kManyRows) / kFewRows));
}

double bytes_per_mac(DType dtype) {
  const DTypeInfo& info = dtype_info(dtype);
  return static_cast<double>(info.block_bytes) / static_cast<double>(info.block_elements);
}

}  // namespace

TokenWork token_work(const ModelConfig& config, const Weights& weights) {
  TokenWork work;
  work.n_layers = config.n_layer;
  for_each_main_block(config, weights, [&](const Block& block, const BlockWeights& w) {
    add_block(work, block, w, config.head_dim);
  });
  for (size_t b = 0; b < weights.output.size(); ++b)
    add_block(work, config.network.output[b], weights.output[b], config.head_dim);
  const double heads = static_cast<double>(config.n_recurrent_layers()) * config.ssm_n_head_v;
  const double cells = heads * config.ssm_dim * config.ssm_dim;
  work.state_bytes = static_cast<uint64_t>(2.0 * sizeof(float) * cells);
  work.state_macs = 3.0 * cells;  // decay and read, update, query
  return work;
}

SpeedEstimate expected_speed(const TokenWork& work, const MachineRates& machine, int n_batch, bool cached) {
  const double gain = cached ? machine.cache_gain : 1.0;
  const int n_rows = std::min(n_batch, kPromptRows);
  double decode = 0.0, prefill = 0.0;
  for (const TypeWork& type : work.types) {
    const TypeRates& rates = rates_of(machine, type.dtype);
    decode +=
        static_cast<double>(type.core_bytes + type.expert_bytes) / (one_row_rate(machine, type.dtype) * gain);
    const double density = bytes_per_mac(type.dtype);
    prefill += type.core_macs / macs_per_second(rates, density, n_rows);
    if (type.expert_macs > 0.0)
      prefill += type.expert_macs / macs_per_second(rates, density, n_rows * work.expert_share);
  }
  const double between = work.n_layers * (kProductsPerLayer * machine.small_s + kSerialPerLayer);
  decode += static_cast<double>(work.state_bytes) / (machine.read * gain);
  prefill +=
      (work.state_macs + work.attention_macs) / rates_of(machine, DType::F32).many_rows + between / n_rows;
  return {.prefill = kPrefillShare / prefill, .decode = 1.0 / (decode / kDecodeShare + between)};
}

namespace {

// What a token waits for the processor's lane: it computes the cold experts that the link did not bring in
// time, while a token takes `rest` besides.
double lane_seconds(double cold, double s_per_byte, double rest, int n_layers, const MachineRates& machine,
                    const CardRates& card) {
  const double fixed = n_layers * kLaneProducts * machine.small_s;
  if (card.parts) return cold * s_per_byte + fixed;
  // Both read main memory.
  const double carried = std::min(kCarried * card.link, std::max(0.0, machine.read - 1.0 / s_per_byte));
  const double all = (rest + fixed + cold * s_per_byte) / (1.0 + carried * s_per_byte);
  return std::max(all - rest, (1.0 - kCarried) * cold * s_per_byte + fixed);
}

}  // namespace

SpeedEstimate expected_speed(const TokenWork& work, const MachineRates& machine, const CardRates& card) {
  const double dense_macs = card.warpgroups ? kCardWideMacs : kCardMacsPerSm;  // a second
  double core = 0.0, experts = 0.0, multiply = 0.0, processor = 0.0;
  for (const TypeWork& type : work.types) {
    core += static_cast<double>(type.core_bytes);
    experts += static_cast<double>(type.expert_bytes);
    multiply += type.core_macs / dense_macs + type.expert_macs / kCardMacsPerSm;
    processor += static_cast<double>(type.expert_bytes) / one_row_rate(machine, type.dtype);
  }
  const bool split = experts > 0.0 && card.hot_share < 1.0;
  const double cold = split ? (card.parts ? 1.0 : kColdUses) * (1.0 - card.hot_share) * experts : 0.0;
  const double read_share = experts > 0.0 ? kCardReadShare : kCardDenseShare;
  double decode = (core + experts - cold + static_cast<double>(work.state_bytes)) / (read_share * card.read) +
                  work.n_layers * (kCardPerLayer + (split ? kHandOver : 0.0));
  if (split)
    decode += lane_seconds(cold, processor / experts / kLaneShare, decode, work.n_layers, machine, card);
  // A chunk of a prompt uses nearly all experts; copies of the cold ones run beside the products.
  const double all_experts = experts > 0.0 ? experts / work.expert_share : 0.0;
  const int n_rows = std::min(card.n_batch, kPromptRows);
  double chunk =
      n_rows * multiply / card.n_multiprocessors + (core + all_experts) / (kCardPromptRead * card.read);
  if (split) chunk = std::max(chunk, (1.0 - card.hot_share) * all_experts / (kStreamShare * card.link));
  return {.prefill = n_rows / chunk, .decode = 1.0 / decode};
}

}  // namespace thermo
