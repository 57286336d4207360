#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/json.h"
#include "safetensors/dflash_checkpoint.h"
#include "safetensors/safetensors_file.h"

namespace thermo {
namespace {

std::vector<std::byte> container(const std::string& directory, size_t n_data) {
  const uint64_t n = directory.size();
  std::vector<std::byte> bytes(sizeof(n) + directory.size() + n_data);
  std::memcpy(bytes.data(), &n, sizeof(n));
  std::memcpy(bytes.data() + sizeof(n), directory.data(), directory.size());
  return bytes;
}

std::string refusal(const std::string& directory, size_t n_data = 64) {
  const std::vector<std::byte> bytes = container(directory, n_data);
  try {
    read_safetensors(bytes, "x.safetensors");
  } catch (const LoadError& error) {
    return error.what();
  }
  return "";
}

TEST(Safetensors, ReadsTensorsInOrderOfTheirNames) {
  const std::vector<std::byte> bytes =
      container(R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[3,4],"data_offsets":[8,32]},)"
                R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  )",
                40);
  const auto tensors = read_safetensors(bytes, "x");
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].dtype, DType::F32);
  EXPECT_EQ(tensors[1].dtype, DType::BF16);
  EXPECT_EQ(tensors[1].shape, (std::vector<uint64_t>{3, 4}));
  EXPECT_EQ(tensors[1].bytes.size(), 24u);
  EXPECT_EQ(tensors[1].bytes.data(), tensors[0].bytes.data() + 8);
}

// Each entry was looked for among all before it: 40,000 took seconds, a hostile file hours.
TEST(Safetensors, ReadsOrRefusesLargeDirectoriesAtOnce) {
  const auto directory = [](int n) {
    std::string text = "{";
    for (int i = 0; i < n; ++i)
      text += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) +
              R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
    return text + "}";
  };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(read_safetensors(container(directory(90'000), 8), "x").size(), 90'000u);
  EXPECT_NE(refusal(directory(1'000'000)).find("an object of more than 100000 members"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));  // of minutes
}

TEST(Safetensors, RefusesWhatIsDamaged) {
  const auto one = [](const std::string& fields) { return R"({"t":{)" + fields + "}}"; };
  for (const std::string& directory :
       {std::string("{"), std::string("[]"), std::string("{}"), std::string(R"({"t":3})"),
        one(R"("shape":[2],"data_offsets":[0,8])"), one(R"("dtype":"F4","shape":[2],"data_offsets":[0,8])"),
        one(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"),
        one(R"("dtype":"F32","shape":[2],"data_offsets":[0,12])"),
        one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
        one(R"("dtype":"F32","shape":[2],"data_offsets":[60,68])"),
        one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
        one(R"("dtype":"F32","shape":[2.5],"data_offsets":[0,8])"),
        one(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])"),
        one(R"("dtype":"F32","shape":[1,1,1,1,2],"data_offsets":[0,8])"),
        std::string(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                    R"("b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}})"),
        std::string(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                    R"("a":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})")})
    EXPECT_NE(refusal(directory), "") << directory;
  std::vector<std::byte> bytes = container("{}", 0);
  bytes[5] = std::byte{1};  // a directory longer than the file
  EXPECT_THROW(read_safetensors(bytes, "x"), LoadError);
  EXPECT_THROW(read_safetensors(std::span(bytes).first(5), "x"), LoadError);
  // Names are somebody else's.
  EXPECT_EQ(refusal("{\"a\\u001b[31m\":3}").find('\x1b'), std::string::npos);
}

// A folder that is removed with the test.
class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / ("thermocline-" + std::to_string(::getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path_ / name) << text; }
  void write(const std::string& name, const std::vector<std::byte>& bytes) const {
    std::ofstream(path_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  void remove(const std::string& name) const { std::filesystem::remove(path_ / name); }

 private:
  std::filesystem::path path_;
};

Json config() {
  return {{"architectures", {"DFlashDraftModel"}},
          {"num_hidden_layers", 2},
          {"hidden_size", 64},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"head_dim", 32},
          {"intermediate_size", 96},
          {"max_position_embeddings", 4096},
          {"rms_norm_eps", 1e-6},
          {"vocab_size", 128},
          {"block_size", 8},
          {"dflash_config", {{"mask_token_id", 127}, {"target_layer_ids", {1, 3}}}},
          {"layer_types", {"sliding_attention", "full_attention"}},
          {"sliding_window", 2048},
          {"rope_theta", 1e7},
          {"rope_scaling",
           {{"rope_type", "yarn"}, {"factor", 64.0}, {"original_max_position_embeddings", 4096}}}};
}

const std::string kDirectory =
    R"({"fc.weight":{"dtype":"BF16","shape":[2,4],"data_offsets":[0,16]},)"
    R"("layers.1.self_attn.q_proj.weight":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}})";

std::string refusal_of(const Folder& folder) {
  try {
    open_dflash_checkpoint(folder.path());
  } catch (const LoadError& error) {
    return error.what();
  }
  return "";
}

TEST(DflashCheckpoint, IsHandedOutAsAGgufFile) {
  const Folder folder;
  folder.write("config.json", config().dump());
  folder.write("model.safetensors", container(kDirectory, 24));
  ASSERT_TRUE(is_checkpoint(folder.path()));
  ASSERT_TRUE(is_checkpoint(folder.path() + "/model.safetensors"));
  ASSERT_FALSE(is_checkpoint(folder.path() + "/config.json"));
  for (const std::string& path : {folder.path(), folder.path() + "/model.safetensors"}) {
    const GgufFile opened = open_dflash_checkpoint(path);
    EXPECT_EQ(opened.require_string("general.architecture"), "dflash");
    EXPECT_EQ(opened.require_ints("dflash.target_layers"), (std::vector<int64_t>{2, 4}));
    EXPECT_EQ(opened.require_uint("tokenizer.ggml.mask_token_id"), 127u);
    EXPECT_EQ(opened.require_bool_each("dflash.attention.sliding_window_pattern", 2),
              (std::vector<bool>{true, false}));
    EXPECT_EQ(opened.require_string("dflash.rope.scaling.type"), "yarn");
    EXPECT_EQ(opened.find("dflash.attention.causal"), nullptr);
    const GgufTensor& fc = opened.require_tensor("fc.weight");
    EXPECT_EQ(fc.dims, (std::array<uint64_t, 4>{4, 2, 1, 1}));
    EXPECT_EQ(fc.dtype, DType::BF16);
    EXPECT_NE(opened.find_tensor("blk.1.attn_q.weight"), nullptr);
    EXPECT_TRUE(opened.fault().empty());
  }
}

TEST(DflashCheckpoint, IsNotEveryFolderWithAConfig) {
  const Folder folder;
  folder.write("config.json", config().dump());
  folder.write("drafter.gguf", std::string("GGUF"));
  EXPECT_FALSE(is_checkpoint(folder.path()));
  folder.write("model.safetensors.index.json", std::string("{}"));
  EXPECT_TRUE(is_checkpoint(folder.path()));
}

TEST(DflashCheckpoint, MayHaveANameThatNoFileHas) {
  const std::string name = std::string(300, 'x') + ".safetensors";
  EXPECT_TRUE(is_checkpoint(name));
  EXPECT_THROW(open_dflash_checkpoint(name), LoadError);
}

TEST(DflashCheckpoint, MayBeInSeveralFiles) {
  const Folder folder;
  folder.write("config.json", config().dump());
  folder.write("model.safetensors.index.json",
               R"({"weight_map":{"fc.weight":"a.safetensors","norm.weight":"b.safetensors"}})");
  folder.write("a.safetensors", container(kDirectory, 24));
  folder.write("b.safetensors",
               container(R"({"norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8));
  const GgufFile opened = open_dflash_checkpoint(folder.path());
  EXPECT_EQ(opened.n_parts(), 2);
  EXPECT_EQ(opened.require_tensor("output_norm.weight").part, 1);
  folder.remove("b.safetensors");
  EXPECT_NE(refusal_of(folder), "");
  folder.write("model.safetensors.index.json", R"({"weight_map":{"fc.weight":"../a.safetensors"}})");
  EXPECT_NE(refusal_of(folder).find("no file of this folder"), std::string::npos);
}

// Each member was looked for among all before it: a file of a few megabytes took minutes.
TEST(DflashCheckpoint, RefusesLargeJsonAtOnce) {
  const Folder folder;
  folder.write("model.safetensors", container(kDirectory, 24));
  std::string many = "{";
  for (int i = 0; i < 1'000'000; ++i) many += '"' + std::to_string(i) + "\":0,";
  const std::string text = config().dump();
  folder.write("config.json", many + text.substr(1));
  EXPECT_NE(refusal_of(folder).find("an object of more than"), std::string::npos);
  folder.write("config.json", text + std::string(20'000'000, ' '));
  EXPECT_NE(refusal_of(folder).find("expected at most"), std::string::npos);
  folder.write("config.json", text);
  folder.remove("model.safetensors");
  folder.write("model.safetensors.index.json", R"({"weight_map":)" + many + R"("x":0}})");
  EXPECT_NE(refusal_of(folder).find("an object of more than"), std::string::npos);
}

TEST(DflashCheckpoint, RefusesOtherDraftersAndDamage) {
  const Folder folder;
  folder.write("model.safetensors", container(kDirectory, 24));
  EXPECT_NE(refusal_of(folder), "");  // no config.json
  const auto with = [&](const Json& changed) {
    folder.write("config.json", changed.dump());
    return refusal_of(folder);
  };
  EXPECT_EQ(with(config()), "");
  for (const char* key : {"num_hidden_layers", "hidden_size", "vocab_size", "rms_norm_eps", "rope_theta"}) {
    Json changed = config();
    changed.erase(key);
    EXPECT_NE(with(changed), "") << key;
    changed[key] = "x";
    EXPECT_NE(with(changed), "") << key;
  }
  for (const char* name : {"DSparkDraftModel", "LlamaForCausalLMEagle3"}) {
    Json changed = config();
    changed["architectures"] = {name};
    EXPECT_NE(with(changed).find("not supported"), std::string::npos);
  }
  Json other = config();
  other.erase("dflash_config");
  other.erase("block_size");
  EXPECT_NE(with(other).find("not a DFlash drafter"), std::string::npos);
  Json factor = config();
  factor["rope_scaling"]["attention_factor"] = "much";
  EXPECT_NE(with(factor).find("attention_factor"), std::string::npos);
  factor["rope_scaling"]["attention_factor"] = 1.25;
  EXPECT_EQ(with(factor), "");
  EXPECT_EQ(open_dflash_checkpoint(folder.path()).require_float("dflash.rope.scaling.attention_factor"),
            1.25);
  for (const char* key : {"mscale", "mscale_all_dim"}) {
    Json scale = config();
    scale["rope_scaling"][key] = 1.0;
    EXPECT_NE(with(scale).find(key), std::string::npos);
  }
  Json part = config();
  part["partial_rotary_factor"] = 1.0;
  EXPECT_EQ(with(part), "");
  part["partial_rotary_factor"] = 0.5;
  EXPECT_NE(with(part).find("partial_rotary_factor"), std::string::npos);
  Json types = config();
  types["layer_types"] = {"full_attention"};
  EXPECT_NE(with(types), "");
  folder.write("config.json", std::string("{"));
  EXPECT_NE(refusal_of(folder), "");
  folder.write("config.json", config().dump());
  folder.write("model.safetensors",
               container(R"({"fc.weight":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}})", 8));
  EXPECT_NE(refusal_of(folder).find("F8_E4M3"), std::string::npos);
}

}  // namespace
}  // namespace thermo
