"""Answers with a format: JSON schemas, grammars, and reasoning that is cut short. The embedded model at temperature 2
writes nonsense, but nonsense of the right form."""
import json
import re

from harness import USAGE, ProgramTest, run, temporary_folder

PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
          "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
                         "tags": {"type": "array", "items": {"enum": ["big", "small"]}, "maxItems": 3},
                         "born": {"type": "string", "format": "date"}}}


def wild(seed, *options):
    return ("run", "-p", "Tell me about Paris.", "--temp", "2", "--top-k", "0", "--top-p", "1", "--seed", seed, "-n", "400", *options)


class Schemas(ProgramTest):
    def check_person(self, person):
        self.assertLessEqual(set(person), set(PERSON["properties"]))
        self.assertLessEqual(set(PERSON["required"]), set(person))
        self.assertTrue(isinstance(person["name"], str) and len(person["name"]) <= 12)
        self.assertTrue(type(person["age"]) is int and 0 <= person["age"] <= 150)
        self.assertLessEqual(len(person["tags"]), 3)
        self.assertLessEqual(set(person["tags"]), {"big", "small"})

    def test_hold_at_temperature_two(self):
        for seed in range(4):
            reply = json.loads(self.answer(*wild(seed, "-j", json.dumps(PERSON), "--json", "--reasoning-budget", "20")))
            choice = reply["choices"][0]
            if choice["finish_reason"] == "stop":
                self.check_person(json.loads(choice["message"]["content"]))

    def test_hold_with_a_draft_and_give_the_same_text(self):
        options = ("-j", json.dumps(PERSON), "--reasoning", "off", "-q")
        plain = self.answer(*wild(3, *options))
        self.check_person(json.loads(plain))
        self.assertEqual(self.answer(*wild(3, *options, "--draft", "lookup")), plain)
        greedy = ("run", "-p", "What is 17 + 25?", "--temp", "0", "-n", "60", "-q", "-j", '{"type": "object"}', "--reasoning", "off")
        self.assertEqual(self.answer(*greedy, "--draft", "lookup"), self.answer(*greedy))

    def test_come_from_files_and_hold_in_raw_texts(self):
        folder = temporary_folder(self)
        (folder / "schema.json").write_text('{"enum": [17, 42]}')
        answer = self.answer("run", "-p", "What is 17 + 25?", "--temp", "0", "-jf", folder / "schema.json")
        self.assertIn(json.loads(answer), (17, 42))
        raw = self.answer("run", "--raw", "-p", "A list:", "--temp", "2", "-n", "300", "--seed", "1", "-q",
                          "-j", '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}')
        self.assertIn(len(json.loads(raw)), (2, 3, 4))

    def test_are_refused_with_their_path(self):
        self.assertIn("#/properties/a: the type \"strng\" is not known",
                      self.refusal(USAGE, "run", "-p", "x", "-j", '{"properties": {"a": {"type": "strng"}}}'))
        self.assertIn("not JSON", self.refusal(USAGE, "run", "-p", "x", "-j", "{"))
        self.assertIn("exclude each other", self.refusal(USAGE, "run", "-p", "x", "-j", "{}", "--grammar", "root ::= [a]"))

    def test_name_what_they_do_not_enforce(self):
        result = run("run", "-p", "x", "--temp", "0", "-n", "40", "-j", '{"type": "integer", "multipleOf": 5}')
        self.assertEqual(result.returncode, 0)
        self.assertIn("#/multipleOf is not enforced", result.stderr)


class Grammars(ProgramTest):
    def test_hold(self):
        for seed in range(3):
            text = self.answer(*wild(seed, "--grammar", 'root ::= ("é" | [a-c]{2} "-"){2,5} "!"', "-q", "--reasoning", "off"))
            self.assertRegex(text, r"^((é|[a-c]{2}-){2,5})!\n$")

    def test_begin_after_the_reasoning(self):
        reply = json.loads(self.answer("run", "-p", "Is 5 a prime?", "--temp", "0", "--grammar", 'root ::= "yes" | "no"',
                                       "--reasoning", "on", "--json"))
        message = reply["choices"][0]["message"]
        self.assertIn(message["content"], ("yes", "no"))
        self.assertTrue(message["reasoning_content"])
        self.assertEqual(reply["choices"][0]["finish_reason"], "stop")

    def test_come_from_files_and_say_where_they_are_wrong(self):
        folder = temporary_folder(self)
        (folder / "list.gbnf").write_text('# a list\nroot ::= item ("," item)*\nitem ::= [a-z]{1,3}\n')
        text = self.answer(*wild(5, "--grammar-file", folder / "list.gbnf", "-q", "--reasoning", "off"))
        self.assertRegex(text.strip(), r"^[a-z]{1,3}(,[a-z]{1,3})*,?$")
        self.assertIn("line 1, column 10: rule 'item' is not defined",
                      self.refusal(USAGE, "run", "-p", "x", "--grammar", "root ::= item"))

    def test_hold_in_every_answer_of_a_chat(self):
        text = self.answer("chat", "--temp", "2", "--grammar", 'root ::= "<" [0-9]{1,3} ">"', "-q", "--reasoning", "off",
                           stdin="One?\nTwo?\n")
        self.assertEqual(len(re.findall(r"<[0-9]{1,3}>", text)), 2, text)


class Reasoning(ProgramTest):
    def test_ends_when_its_budget_is_used_up(self):
        ask = ("run", "-p", "Write a Python function merge_sort.", "--temp", "0", "-n", "200", "--reasoning", "on", "--json")
        reply = json.loads(self.answer(*ask, "--reasoning-budget", "5", "--reasoning-budget-message", "\nEnough.\n"))
        message = reply["choices"][0]["message"]
        self.assertTrue(message["reasoning_content"].endswith("\nEnough."), message)
        self.assertTrue(message["content"])
        none = json.loads(self.answer(*ask[:-3], "--json", "--reasoning-budget", "0"))
        self.assertFalse(none["choices"][0]["message"].get("reasoning_content"))


if __name__ == "__main__":
    import unittest
    unittest.main()
