#include "cli/options/refused_options.h"

namespace thermo {
namespace {

struct Refusal {
  std::string_view names;   // space separated; a trailing * stands for any ending
  std::string_view advice;  // after "NAME: "
};

constexpr Refusal kRefusals[] = {
    {"-ot --override-tensor",
     "placement is dynamic here; say how much device memory experts may take with --expert-cache"},
    {"-sm --split-mode -ts --tensor-split", "there is one device here; choose it with --device"},
    {"--rpc", "there is no remote backend; run thermocline on the machine that holds the model"},
    {"--lora* --control-vector*",
     "adapters are not supported; merge it into the model and convert that to GGUF"},
    {"-mm -mmu --mmproj* --image --audio", "only text models are supported; leave it out"},
    {"--embedding --embeddings --rerank --reranking --pooling",
     "this program generates text only; use a model "
     "server made for embeddings"},
    {"--models-dir --models-preset --models-max", "one model runs at a time; name it with -m"},
    {"--keep", "the context never shifts; give it more tokens with -c"},
    {"--mirostat* --typical --typical-p --xtc-* --top-nsigma --top-n-sigma --dynatemp-* --samplers "
     "--sampling-seq "
     "--sampler-seq --adaptive-*",
     "not offered here; use --temp, --top-k, --top-p and --min-p"},
    {"--rope-freq-* -gan --grp-attn-n -gaw --grp-attn-w",
     "the frequencies of positions come from the model file; stretch them with --rope-scaling and "
     "--rope-scale"},
    {"-dio --direct-io",
     "weights are copied into ordinary memory at load; use --no-repack to "
     "read them through the file mapping instead"},
    {"-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch",
     "one set of threads reads prompts and writes answers; use -C, -Cr, --cpu-strict, --prio or --poll for "
     "both"},
    {"-nkvo --no-kv-offload --kv-offload --no-op-offload --op-offload --no-host -bf",
     "the cache is where the layers are computed; leave it out"},
    {"-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -devd --device-draft "
     "--spec-draft-device",
     "the drafter runs where the model does; leave it out"},
    {"-hfd -hfrd --hf-repo-draft --spec-draft-hf",
     "drafters are not downloaded; fetch the file and give its path with --draft"},
    {"--lookup*", "use --draft lookup"},
    {"-td --threads-draft --spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch",
     "the drafter uses the threads of the model; use -t for both"},
    {"-cd --ctx-size-draft --spec-draft-ctx-size", "the drafter's context is the model's; use -c for both"},
    {"-md --model-draft --spec-* --draft* -ctkd -ctvd",
     "not offered here; `run`, `chat`, `serve`, `plan` and `bench` have --draft and --draft-budget"},
    {"-mu --model-url -dr --docker-repo",
     "models come from Hugging Face: -hf owner/repo:Q4_K_M; or give a path with -m"},
    {"-np --parallel -cb --cont-batching --no-cont-batching -ns --sequences",
     "one conversation runs at a time here; `thermocline serve` runs several"},
    {"--ssl-*", "the server speaks plain HTTP; put a proxy that speaks TLS (nginx, Caddy) in front of it"},
    {"--ui --webui --ui-path --path", "the server has no web pages; use a client for the OpenAI API"},
    {"--slot-save-path",
     "the server writes conversations to files by itself; say how much disk space it may use with "
     "--cache-disk"},
    {"-sps --slot-prompt-similarity",
     "a request always goes to the slot that shares the longest prefix with it; leave it out"},
    {"-cnv --conversation -i --interactive -if --interactive-first -mli --multiline-input",
     "use `thermocline chat` for a conversation"},
    {"-no-cnv --no-conversation", "use `thermocline run --raw` to continue a text without the chat template"},
    {"-st --single-turn", "that is what `thermocline run` does; use it"},
    {"--prompt-cache*", "prompts are not kept between runs; `thermocline chat` reuses them within one"},
    {"--no-jinja --legacy", "templates are always rendered as Jinja; use --raw to have none"},
    {"-r --reverse-prompt", "use --stop to end at a text"},
    {"--in-prefix --in-prefix-bos --in-suffix",
     "the chat template writes the markers; change it with "
     "--chat-template-file"},
    {"--log-disable", "use --quiet, or --verbosity 0"},
    {"--reasoning-effort", "an option of `serve`; use --reasoning on or off, or --reasoning-budget"},
    {"--grammar --grammar-file -j --json-schema -jf --json-schema-file",
     "an option of `run` and `chat`; requests to a server bring their own format: grammar or json_schema"},
    {"--override-kv", "metadata is read from the file; change the file"},
    {"--swa-full --cache-reuse --kv-unified -kvu --defrag-thold -dt",
     "the cache has one layout here; leave it out"},
};

bool matches(std::string_view pattern, std::string_view argument) {
  if (pattern.ends_with('*')) return argument.starts_with(pattern.substr(0, pattern.size() - 1));
  return pattern == argument;
}

}  // namespace

std::optional<std::string> refusal_advice(std::string_view argument) {
  for (const Refusal& refusal : kRefusals) {
    std::string_view rest = refusal.names;
    while (!rest.empty()) {
      size_t space = rest.find(' ');
      if (matches(rest.substr(0, space), argument))
        return std::string(argument) + ": " + std::string(refusal.advice);
      rest = space == std::string_view::npos ? std::string_view{} : rest.substr(space + 1);
    }
  }
  return std::nullopt;
}

}  // namespace thermo
