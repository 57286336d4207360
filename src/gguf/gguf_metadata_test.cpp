// What a file says about itself: typed access to its keys.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gguf/gguf_writer.h"
#include "gguf/testing/raw_gguf.h"

namespace thermo {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Optional;
using ::testing::StartsWith;

class GgufMetadata : public ::testing::Test {
 protected:
  GgufFile open() {
    bytes_ = writer_.to_bytes();
    return GgufFile(bytes_, "meta.gguf");
  }
  GgufWriter writer_;
  std::vector<std::byte> bytes_;
};

TEST_F(GgufMetadata, TakesIntegersOfAnyTypeWhoseValueFits) {
  writer_.set("u8", uint8_t{200});
  writer_.set("i8", int8_t{100});
  writer_.set("u16", uint16_t{60000});
  writer_.set("i16", int16_t{30000});
  writer_.set("u32", uint32_t{4000000000});
  writer_.set("i32", int32_t{2000000000});
  writer_.set("u64", uint64_t{1} << 63);
  writer_.set("i64", int64_t{1} << 62);
  const GgufFile file = open();
  EXPECT_EQ(file.find_uint("u8"), 200U);
  EXPECT_EQ(file.find_uint("i8"), 100U);
  EXPECT_EQ(file.find_uint("u16"), 60000U);
  EXPECT_EQ(file.find_uint("i16"), 30000U);
  EXPECT_EQ(file.find_uint("u32"), 4000000000U);
  EXPECT_EQ(file.find_uint("i32"), 2000000000U);
  EXPECT_EQ(file.find_uint("u64"), uint64_t{1} << 63);
  EXPECT_EQ(file.require_uint("i64"), uint64_t{1} << 62);
  EXPECT_EQ(file.find_int("u8"), 200);
  EXPECT_EQ(file.find_int("u32"), 4000000000);
  EXPECT_EQ(file.find_int("i64"), int64_t{1} << 62);
}

TEST_F(GgufMetadata, RefusesIntegersThatDoNotFit) {
  writer_.set("negative", int32_t{-3});
  writer_.set("large", uint32_t{70000});
  writer_.set("huge", ~uint64_t{0});
  writer_.set_array("list", std::vector<int32_t>{1, -1});
  const GgufFile file = open();
  EXPECT_EQ(file.find_int("negative"), -3);
  EXPECT_THAT(
      error_of([&] { file.find_uint("negative"); }),
      AllOf(StartsWith("meta.gguf: "), HasSubstr("'negative'"), HasSubstr("-3"), HasSubstr("from 0 to")));
  EXPECT_THAT(error_of([&] { file.find_uint("large", 65535); }), HasSubstr("0 to 65535"));
  EXPECT_EQ(file.find_uint("large", 70000), 70000U);
  EXPECT_THAT(error_of([&] { file.find_int("huge"); }), HasSubstr("below 2^63"));
  EXPECT_THAT(error_of([&] { file.find_uints("list"); }), HasSubstr("element 1 of metadata key 'list'"));
}

TEST_F(GgufMetadata, TakesFloatsOfBothWidths) {
  writer_.set("f32", 0.5F);
  writer_.set("f64", 0.25);
  writer_.set("int", 1);
  const GgufFile file = open();
  EXPECT_EQ(file.find_float("f32"), 0.5);
  EXPECT_EQ(file.require_float("f64"), 0.25);
  EXPECT_THAT(error_of([&] { file.find_float("int"); }),
              AllOf(HasSubstr("is i32"), HasSubstr("expected a float")));
}

TEST_F(GgufMetadata, ReadsBoolsAndStrings) {
  writer_.set("yes", true);
  writer_.set("no", false);
  writer_.set("text", std::string_view("a\0b", 3));
  writer_.set("empty", "");
  const GgufFile file = open();
  EXPECT_EQ(file.find_bool("yes"), true);
  EXPECT_EQ(file.find_bool("no"), false);
  EXPECT_EQ(file.find_string("text"), std::string_view("a\0b", 3));
  EXPECT_EQ(file.require_string("empty"), "");
}

TEST_F(GgufMetadata, TakesAnyNonZeroByteAsTrue) {
  const Raw raw = Raw().header(0, 1).key("flag", GgufType::Bool).num(uint8_t{2});
  EXPECT_EQ(GgufFile(raw.bytes(), "flag").find_bool("flag"), true);
}

TEST_F(GgufMetadata, ReadsArrays) {
  writer_.set_array("ints", std::vector<int16_t>{-1, 2});
  writer_.set_array("uints", std::vector<uint8_t>{1, 255});
  writer_.set_array("bools", std::vector<bool>{true, false, true});
  writer_.set_array("strings", std::vector<std::string_view>{"a", "", "ccc"});
  writer_.set_array("nothing", std::vector<int32_t>{});
  const GgufFile file = open();
  EXPECT_THAT(file.require_ints("ints"), ElementsAre(-1, 2));
  EXPECT_THAT(file.find_uints("uints"), Optional(ElementsAre(1, 255)));
  EXPECT_THAT(file.require_bool_each("bools", 3), ElementsAre(true, false, true));
  EXPECT_THAT(file.require_strings("strings"), ElementsAre("a", "", "ccc"));
  EXPECT_TRUE(file.require_ints("nothing").empty());
}

TEST_F(GgufMetadata, CutsArraysOfAnyType) {
  writer_.set_array("words", std::vector<std::string>{"a", "", "ccc", "d"});
  writer_.set_array("floats", std::vector<float>{0.5F, 1.5F, 2.5F});
  const GgufFile file = open();
  EXPECT_EQ(describe_value(first_elements(*file.find("words"), 3)), R"(["a", "", "ccc"])");
  EXPECT_EQ(describe_value(first_elements(*file.find("words"), 0)), "[]");
  EXPECT_EQ(describe_value(first_elements(*file.find("floats"), 2)), "[0.5, 1.5]");
}

TEST_F(GgufMetadata, TreatsAnAbsentKeyAsNoErrorUnlessRequired) {
  const GgufFile file = open();
  EXPECT_FALSE(file.find_uint("k"));
  EXPECT_FALSE(file.find_int("k"));
  EXPECT_FALSE(file.find_float("k"));
  EXPECT_FALSE(file.find_bool("k"));
  EXPECT_FALSE(file.find_string("k"));
  EXPECT_FALSE(file.find_strings("k"));
  EXPECT_FALSE(file.find_uint_each("k", 3));
  EXPECT_EQ(file.find("k"), nullptr);
  for (const std::string& message :
       {error_of([&] { file.require_uint("k"); }), error_of([&] { file.require_strings("k"); }),
        error_of([&] { file.require_bool_each("k", 2); })})
    EXPECT_THAT(message, AllOf(StartsWith("meta.gguf: "), HasSubstr("'k' is missing, expected")));
}

TEST_F(GgufMetadata, NamesExpectedAndFoundTypeOfAMismatch) {
  writer_.set("text", "hello");
  writer_.set_array("list", std::vector<int32_t>{1, 2, 3});
  const GgufFile file = open();
  EXPECT_THAT(error_of([&] { file.find_uint("text"); }),
              AllOf(HasSubstr("'text' is string (\"hello\")"), HasSubstr("expected an unsigned integer")));
  EXPECT_THAT(error_of([&] { file.find_int("list"); }), HasSubstr("is array of 3 i32"));
  EXPECT_THAT(error_of([&] { file.find_bool("text"); }), HasSubstr("expected a bool"));
  EXPECT_THAT(error_of([&] { file.find_string("list"); }), HasSubstr("expected a string"));
  EXPECT_THAT(error_of([&] { file.find_strings("list"); }), HasSubstr("expected an array of strings"));
  EXPECT_THAT(error_of([&] { file.find_ints("text"); }), HasSubstr("expected an array of integers"));
}

TEST_F(GgufMetadata, TakesAScalarForEachOrAnArrayOfExactlyN) {
  writer_.set("one", uint32_t{4});
  writer_.set_array("three", std::vector<int32_t>{1, 2, 3});
  writer_.set_array("bools", std::vector<bool>{true, false, false});
  writer_.set("text", "x");
  const GgufFile file = open();
  EXPECT_THAT(file.require_uint_each("one", 3), ElementsAre(4, 4, 4));
  EXPECT_THAT(file.require_uint_each("three", 3), ElementsAre(1, 2, 3));
  EXPECT_THAT(file.require_bool_each("bools", 3), ElementsAre(true, false, false));
  for (const size_t n : {0U, 2U, 4U})
    EXPECT_THAT(
        error_of([&] { file.find_uint_each("three", n); }),
        AllOf(HasSubstr("'three' is array of 3 i32"), HasSubstr(fmt::format("array of exactly {}", n))));
  EXPECT_THAT(error_of([&] { file.find_uint_each("text", 3); }), HasSubstr("is string"));
  EXPECT_THAT(error_of([&] { file.find_uint_each("one", 3, 3); }), HasSubstr("0 to 3"));
}

TEST_F(GgufMetadata, ListsEverythingInFileOrderForPeople) {
  writer_.set("z", "text\n\x1b[0m\xff h\xc3\xa9");
  writer_.set("a", uint8_t{65});
  writer_.set("f", 1e-6F);
  writer_.set("b", true);
  writer_.set_array("list", std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9});
  writer_.set_array("words", std::vector<std::string>{"x", "y"});
  writer_.set("long", std::string(500, 'l'));
  const GgufFile file = open();
  std::vector<std::string> lines;
  for (const GgufEntry& entry : file.metadata())
    lines.push_back(
        fmt::format("{} {} {}", entry.key, describe_type(entry.value), describe_value(entry.value, 12)));
  EXPECT_THAT(
      lines,
      ElementsAre("z string \"text\\n\\x1b[0m\\xff h...\" (14 bytes)", "a u8 65", "f f32 1e-06",
                  "b bool true", "list array of 9 i32 [1, 2, 3, 4, 5, 6, 7, 8, ... 9 in all]",
                  "words array of 2 string [\"x\", \"y\"]", "long string \"llllllllllll...\" (500 bytes)"));
}

TEST(EscapeText, KeepsUtf8AndEscapesTheRest) {
  EXPECT_EQ(escape_text("h\xc3\xa9 \xe4\xb8\xad \xf0\x9f\x98\x80"),
            "h\xc3\xa9 \xe4\xb8\xad \xf0\x9f\x98\x80");
  EXPECT_EQ(escape_text("\xc3"), "\\xc3");
  EXPECT_EQ(escape_text("\xc0\xaf"), "\\xc0\\xaf");           // overlong
  EXPECT_EQ(escape_text("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // surrogate
  EXPECT_EQ(escape_text("\xc2\x9b"), "\\xc2\\x9b");           // a terminal control
  EXPECT_EQ(escape_text(std::string_view("\0\x7f\t", 3)), "\\x00\\x7f\\t");
  EXPECT_EQ(escape_text("abc", 2), "ab...");
  EXPECT_EQ(escape_text("a\xc3\xa9", 2), "a...");
}

}  // namespace
}  // namespace thermo
