#!/usr/bin/env python3
"""Renders thousands of templates with python3-jinja2 and with our renderer and compares byte for byte.

    tests/jinja_parity.py BUILD/bin/jinja_render    (or the path in $JINJA_RENDER)

jinja2 is set up as transformers does it for chat templates. A case that fails there must fail here, one that
renders must give the same bytes. Prints the differences and exits 1 when there are any; exits 77 (skipped)
without jinja2. Left out, because we differ on purpose: complex numbers, attributes of numbers, lipsum and self,
infinite constants (an error in jinja2), and macros that read a name which the template sets only later at its
top level (undefined in jinja2 even if the caller gave it). The real templates are taken from $THERMO_TEMPLATES or ../shared/templates, if they are there.
"""

import datetime
import functools
import glob
import itertools
import json
import os
import pathlib
import struct
import subprocess
import sys

try:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes
except ImportError:
    print("skipped: python3-jinja2 is not installed")
    sys.exit(77)


class Generation(jinja2.ext.Extension):
    """The `generation` tag of transformers: renders its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_run")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _run(self, caller):
        return caller()


def make_environment(base):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = base(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols, jinja2.ext.do])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return env


SANDBOX = make_environment(jinja2.sandbox.ImmutableSandboxedEnvironment)
# Methods that change a list or dict are refused by the immutable sandbox; we allow them.
MUTABLE = make_environment(jinja2.sandbox.SandboxedEnvironment)


@functools.lru_cache(maxsize=None)
def compiled(template, env):
    return env.from_string(template)


def render(template, context, env):
    try:
        return True, compiled(template, env).render(**context)
    except Exception as e:  # every failure counts the same
        return False, f"{type(e).__name__}: {e}"


CONTEXT = {
    "x": 5, "y": -3, "z": 0, "f": 2.5, "g": -0.75, "big": 12345678901234567890, "tiny": 1e-7, "huge": 1e22,
    "t": True, "n": None, "no": False,
    "s": "hello", "e": "", "u": "  héllo wörld ñ 日本語 🎉  ", "q": "it's \"q\" \\ \n\t\x07 \u200b end", "html": "<b>&'\"</b>",
    "lines": "one\n\n  two\r\nthree\n", "csv": "a,b,,c", "mixed": "Hello World FOO bar-baz (qux) it's",
    "l": [3, 1, 2], "ls": ["b", "A", "c", "B", "a"], "le": [], "nested": [[1, 2], [3, [4, 5]], []],
    "lm": [0, 1, "", "a", None, True, [], {}], "fl": [1.5, 2, -0.5, 3],
    "d": {"b": 1, "a": 2, "C": 3}, "de": {}, "dn": {"k": {"kk": [1, {"z": "é"}]}, "items": "own", "n": None, "t": True, "fl": 1.0},
    "users": [
        {"name": "bob", "age": 30, "admin": True, "tags": ["x", "y"], "city": {"name": "Oslo"}},
        {"name": "Al", "age": 25, "admin": False, "tags": [], "city": {"name": "Rome"}},
        {"name": "cy", "age": 30, "tags": ["z"], "city": {"name": "oslo"}},
    ],
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}],
}

# Printed as {{ ... }}; one a line.
EXPRESSIONS = (pathlib.Path(__file__).parent / "data/jinja-expressions.txt").read_bytes().decode().split("\n")[:-1]

# Whole templates.
TEMPLATES = [
    "", "\n", "a", "a\n", "a\n\n", "a\r\nb\r\n", "a\rb", "\n\na", "{", "{ {", "}}", "%}", "{}", "{ # a #}",
    "{{ x }}\n", "{{ x }}\n\n", "{{ x }}\n{{ x }}", "  {{ x }}  ", "a {{- x -}} b", "a\n {{- x -}} \n b", "a {{+ x }} b",
    "{% if t %}\na\n{% endif %}\nb", "  {% if t %}  \na\n  {% endif %}  \nb", "x {% if t %} a {% endif %} y",
    "\n  {% if t %}\n  a\n  {% endif %}\n", "a\n  {%+ if t %}b{% endif %}", "{% if t +%}\na{% endif %}", "{% if t -%}\n\n a {%- endif %} b",
    "{%- if t -%} a {%- endif -%} ", "a  {%- if t %}\n\nb{% endif %}", "{# c #}a", "{# c #}\na", "  {# c #}\na", "x {# c #}\na",
    "a {#- c -#} b", "a\n{#- c #}\nb", "{# a\nb #}\n{{ x }}", "{#+ c +#}\na", "  {#+ c #}\na", "{# {{ x }} {% if %} #}a", "{#}#}a", "{##}a", "{#-#} a", "{# open",
    "{% raw %}{{ x }}{% endraw %}", "{% raw %}\n {{ x }} {% if %}\n{% endraw %}\nb", "a {%- raw -%} \n {{ x }} {%- endraw -%} \n b",
    "  {% raw %}a\n  {% endraw %}\nb", "{% raw %}a", "{% raw %}{% raw %}{% endraw %}", "{%raw%}a{%endraw%}b", "{% raw +%}a{% endraw +%}\nb",
    "{% if x == 5 %}five{% elif x == 6 %}six{% else %}other{% endif %}", "{% if z %}a{% elif e %}b{% elif t %}c{% else %}d{% endif %}",
    "{% if missing %}a{% else %}b{% endif %}", "{% if missing.x %}a{% endif %}", "{% if x %}", "{% endif %}", "{% if %}a{% endif %}", "{% else %}",
    "{% for i in l %}{{ i }},{% endfor %}", "{% for i in le %}x{% else %}none{% endfor %}", "{% for i in l %}{{ loop.index }}/{{ loop.length }} {% endfor %}",
    "{% for i in l %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}|{% endfor %}",
    "{% for i in l %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }};{% endfor %}", "{% for i in l %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for i in [1, 1, 2, 2, 1] %}{{ loop.changed(i) }} {% endfor %}", "{% for i in l %}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}", "{% for i in l %}{{ loop }}{% endfor %}",
    "{% for i in l %}{{ loop.nosuch }}{{ loop.nosuch is defined }}{% endfor %}", "{% for i in l %}{% for j in l %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}",
    "{% for i in l %}{% set o = loop %}{% for j in ls %}{{ o.index }}{{ loop.index }} {% endfor %}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}", "{% for k, v in d|items %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}",
    "{% for k, v in d|dictsort %}{{ k }}{{ v }}{% endfor %}", "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }} {% endfor %}", "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a, b in [1] %}{% endfor %}", "{% for a, b in [(1, 2, 3)] %}{% endfor %}", "{% for a, b in ['xy', 'zw'] %}{{ b }}{{ a }}{% endfor %}", "{% for [a, b] in [(1, 2)] %}{{ a }}{{ b }}{% endfor %}",
    "{% for i in 5 %}{% endfor %}", "{% for i in n %}{% endfor %}", "{% for i in missing %}x{% else %}e{% endfor %}", "{% for i in s %}{{ i }}.{% endfor %}", "{% for c in u %}{{ c }}|{% endfor %}",
    "{% for i in range(10) if i is odd %}{{ i }}{{ loop.index }}{{ loop.last }} {% endfor %}", "{% for i in range(10) if i > 20 %}x{% else %}none{% endfor %}",
    "{% for i in range(6) if i % 2 %}{{ loop.length }}{{ loop.revindex }} {% endfor %}", "{% for u in users if u.admin is defined and u.admin %}{{ u.name }}{% endfor %}",
    "{% for i in l if i > 1 and loop is defined %}{{ i }}{% endfor %}", "{% for i in l|sort %}{{ i }}{% endfor %}", "{% for i in 1, 2, 3 %}{{ i }}{% endfor %}", "{% for i in (1, 2) if t %}{{ i }}{% endfor %}",
    "{% for i in range(10) %}{% if i == 3 %}{% continue %}{% endif %}{% if i == 6 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in l %}{% break %}{% else %}e{% endfor %}", "{% for i in l %}{% continue %}{% else %}e{% endfor %}", "{% for i in l %}a{% if loop.last %}{% break %}{% endif %}{% else %}e{% endfor %}",
    "{% for i in l %}{% for j in l %}{% if j == 1 %}{% break %}{% endif %}{{ j }}{% endfor %}{{ i }} {% endfor %}", "{% break %}", "{% continue %}",
    "{% for i in l %}{% with a = i %}{% if a == 1 %}{% break %}{% endif %}{{ a }}{% endwith %}{% endfor %}",
    "{% for i in nested recursive %}[{{ loop(i) if i is sequence else i }}]{% endfor %}", "{% for i in nested recursive %}{{ loop.depth }}{% if i is iterable %}{{ loop(i) }}{% endif %}{% endfor %}", "{% for i in l %}{{ loop(l) }}{% endfor %}",
    "{% set a = 1 %}{{ a }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a = 1, 2 %}{{ a }}", "{% set (a, b) = [1, 2] %}{{ b }}", "{% set a %}x{{ x }}y{% endset %}{{ a }}|{{ a|length }}",
    "{% set a | upper %}abc{% endset %}{{ a }}", "{% set a | replace('b', 'x') | upper %}abc{% endset %}{{ a }}", "{% set x = x + 1 %}{{ x }}", "{% set true = 1 %}", "{% set 1 = 2 %}", "{% set a.b = 1 %}", "{% set d.b = 1 %}", "{% set a b %}",
    "{% for i in l %}{% set x = i %}{{ x }}{% endfor %}{{ x }}", "{% for i in l %}{{ x }}{% set x = i %}{{ x }} {% endfor %}", "{% if t %}{% set a = 1 %}{% endif %}{{ a }}", "{% if no %}{% set x = 1 %}{% endif %}{{ x }}",
    "{% for i in l %}{% if i == 1 %}{% set found = i %}{% endif %}{{ found }}{% endfor %}{{ found }}", "{% for x in l %}{{ x }}{% endfor %}{{ x }}", "{% for i in l %}{% endfor %}{{ i }}",
    "{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "{% set ns = namespace() %}{% set ns.a = 1 %}{{ ns.a }}{{ ns.b }}{{ ns.b is defined }}", "{% set ns = namespace(a=1) %}{{ ns }}{{ ns['a'] }}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% set ns.a = ns.a ~ m.role ~ ' ' %}{% endfor %}{{ ns.a|trim }}", "{% set ns = namespace(last='') %}{% for i in [1, 1, 2] if i != ns.last %}{{ i }}{% set ns.last = i %}{% endfor %}",
    "{% set ns.a = 1 %}", "{% set ns = 5 %}{% set ns.a = 1 %}", "{% set ns = namespace() %}{% set ns.a %}blk{% endset %}{{ ns.a }}",
    "{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, 3) }}|{{ m(1, c=5) }}|{{ m(a=9) }}|{{ m() }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}",
    "{% macro m(a) %}{{ a is defined }}{% endmacro %}{{ m() }}", "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(3) }}", "{% macro m(x=x) %}{{ x }}{% endmacro %}{{ m() }}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, a=3) }}",
    "{{ x }}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% set x = 9 %}{{ m() }}", "{% macro m() %}{{ w }}{% endmacro %}{% set w = 9 %}{{ m() }}", "{% macro m() %}{% set x = 1 %}{{ x }}{% endmacro %}{{ m() }}{{ x }}", "{% for i in l %}{{ m(i) }}{% endfor %}{% macro m(a) %}{{ a }}{% endmacro %}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{% for i in l %}{{ m(i) }}{% endfor %}", "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}", "{% macro m() %} a {% endmacro %}{{ m()|trim }}", "{% macro m() %}<{% endmacro %}{{ m() ~ '<' }}{{ m() + '<' }}{{ m()|length }}",
    "{% macro m(a) -%}\n  [{{ a }}]\n{%- endmacro %}\n{{ m(1) }}\n{{ m(2) }}", "{% for i in l %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}", "{% macro m(a, a2=1, b) %}{% endmacro %}", "{% macro m(1) %}{% endmacro %}", "{% macro m %}{% endmacro %}", "{% macro m() %}a{% endmacro %}{{ m.name }}{{ m is callable }}",
    "{% macro outer() %}[{{ caller() }}]{% endmacro %}{% call outer() %}in{{ x }}{% endcall %}", "{% macro outer() %}[{{ caller(1) }}{{ caller(2) }}]{% endmacro %}{% call(v) outer() %}<{{ v }}>{% endcall %}", "{% macro m() %}a{% endmacro %}{% call m() %}b{% endcall %}", "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}", "{% call 5 %}{% endcall %}",
    "{% macro m(k) %}{% for c in k %}{{ caller(c) }}{% endfor %}{% endmacro %}{% call(c) m(l) %}{{ c * x }},{% endcall %}", "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in l %}{% call m() %}{{ i }}{{ loop.index }}{% endcall %}{% endfor %}",
    "{% filter upper %}abc{{ s }}{% endfilter %}", "{% filter replace('a', 'b')|upper %}aaa{% endfilter %}", "{% filter trim %}  a  {% endfilter %}|", "{% filter nosuch %}a{% endfilter %}", "{% set a = 1 %}{% filter upper %}{% set a = 2 %}{{ a }}{% endfilter %}{{ a }}",
    "{% with %}{% set a = 1 %}{{ a }}{% endwith %}{{ a }}", "{% with a = 1, b = x %}{{ a }}{{ b }}{% endwith %}", "{% with x = 1, b = x %}{{ x }}{{ b }}{% endwith %}{{ x }}", "{% with a = 1 %}{% set a = 2 %}{{ a }}{% endwith %}{{ a }}",
    "{% generation %}a{{ x }}{% endgeneration %}b", "{% for i in l %}{% generation %}{{ i }}{{ loop.index }}{% set q = 1 %}{% endgeneration %}{{ q is defined }}{% endfor %}", "  {%- generation -%} a {%- endgeneration -%} b", "{% generation %}\na\n{% endgeneration %}\nb", "{% generation %}a",
    "{% do l|length %}a", "{% print x %}", "{% print x, y %}", "{% block a %}in{{ x }}{% endblock %}", "{% block a %}1{% endblock a %}2", "{% autoescape false %}{{ html }}{% endautoescape %}",
    "{% include 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}", "{% extends 'x' %}", "{% nosuch %}", "{% %}", "{% if x", "{{ x", "{{ x }", "{{ x %}", "{% if x }}", "{% for %}", "{% for i l %}{% endfor %}", "{% for i in l %}", "{% endfor %}", "{% for i in l %}{% endif %}", "{% for i.x in l %}{% endfor %}",
    "{{ {'a': {'b': 1}} }}", "{{ {'a': {'b': 1}}}}", "{{ '}}' }}", "{{ \"{{ }}\" }}", "{% set a = '%}' %}{{ a }}", "{{ '{%' }}", "{{\n  x\n  +\n  1\n}}", "{%\n if t\n%}a{%\n endif\n%}", "{{x}}{{y}}", "{{-x-}}", "{{- -x -}}", "{{ -x}}", "{%-if t-%}a{%-endif-%}",
    "{{ x }}{# c #}{{ y }}", "{{ 'a\nb' }}", "{{ 'a\\\nb' }}", "{{ x -}}\n\n  a", "a\n\n  {{- x }}", "{{ x }}\n  {%- if t %} a{% endif %}", "a\n\t {% if t %}\n b\n\t {% endif %}\n", "a {% if t %}\n", "{% if t %}{% if t %}\n\n{% endif %}\n{% endif %}\n|", "\u00a0{% if t %}a{% endif %}", "\u2003\n\u2003{% if t %}a{% endif %}",
    "a\n{% set a = 1 %}\n{% set b = 2 %}\n{{ a }}{{ b }}\n", "{%- set a = 1 -%}\n\n{{- a -}}\n\nb", "{{ x }}   {%+ if t %}  a  {%+ endif %}  b", "   {%- if t %}   \n   a   {%- endif %}   \n   b",
    "{{ loop }}", "{{ loop is defined }}", "{{ caller is defined }}", "{{ caller() }}", "{{ varargs }}",
    "{% set c = cycler('a', 'b', 'c') %}{% for i in range(5) %}{{ c.next() }}{% endfor %}{{ c.current }}{% set _ = c.reset() %}{{ c.current }}", "{% set j = joiner(', ') %}{% for i in l %}{{ j() }}{{ i }}{% endfor %}",
    "{% set g = ls|map('upper') %}{% for a in g %}{{ a }}{% endfor %}|{% for a in g %}{{ a }}{% endfor %}", "{% set g = ls|select %}{{ g|first }}{{ g|first }}{{ g|list }}", "{% if le|select %}yes{% else %}no{% endif %}", "{% if messages|selectattr('role', 'equalto', 'tool') %}yes{% endif %}", "{% for i in ls|map('upper') %}{{ loop.last }}{{ loop.length }} {% endfor %}",
    "{% for g in users|groupby('age') %}{{ g.grouper }}:{{ g.list|length }} {% endfor %}", "{% for age, us in users|groupby('age') %}{{ age }}={{ us|map(attribute='name')|join('+') }} {% endfor %}",
    "{% for row in range(7)|batch(3, '-') %}{{ row|join }} {% endfor %}", "{% set l2 = l + [4] %}{{ l2 }}{{ l }}", "{% set d2 = dict(d, q=1) %}{{ d2 }}{{ d }}",
    "{{ messages[0]['content'] if messages[0]['role'] == 'system' else '' }}", "{% if messages[0]['role'] == 'system' %}{% set sys = messages[0]['content'] %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{{ sys }}{{ rest|length }}",
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + '<|end|>\n' }}{% endfor %}", "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}",
    "{% if x %}{{ undefined_function() }}{% endif %}", "{% if no %}{{ undefined_function() }}{% endif %}ok", "{{ raise_exception() }}", "{% if no %}{{ x|nosuchfilter }}{% endif %}ok", "{% if no %}{{ raise_exception('a') }}{% endif %}ok",
    "{% set a = {'x': 1} %}{{ a.x }}{{ a['x'] }}{{ a.y }}", "{% set a = [] %}{{ a or 'empty' }}", "{% set date = strftime_now('%d %b %Y') %}{{ date|length }}", "{{ bos_token }}a", "{{ bos_token + 'a' }}", "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ add_generation_prompt }}",
    "{% set a = namespace(x=namespace(y=1)) %}{{ a.x.y }}{% set b = a.x %}{% set b.y = 2 %}{{ a.x.y }}", "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}", "{% set f = range %}{{ f(3)|list }}", "{% set m = s.upper %}{{ m() }}", "{% set g = d.get %}{{ g('a') }}{{ g('q', 1) }}",
]

# For the environment that allows changes to lists and dicts.
MUTATIONS = [
    "{% set a = [1] %}{{ a.append(2) }}{{ a }}", "{% set a = [] %}{% for i in l %}{% set _ = a.append(i) %}{% endfor %}{{ a }}", "{% set a = [3, 1] %}{% do a.sort() %}{{ a }}", "{% set a = [3, 1] %}{% do a.sort(reverse=true) %}{{ a }}", "{% set a = [1] %}{% do a.extend([2, 3]) %}{{ a }}",
    "{% set a = [1, 2, 3] %}{{ a.pop() }}{{ a.pop(0) }}{{ a }}", "{% set a = [] %}{{ a.pop() }}", "{% set a = [1, 2] %}{% do a.insert(1, 'x') %}{% do a.insert(-9, 'y') %}{% do a.insert(99, 'z') %}{{ a }}", "{% set a = [1, 2, 1] %}{% do a.remove(1) %}{{ a }}", "{% set a = [1] %}{{ a.remove(5) }}", "{% set a = [1, 2] %}{% do a.reverse() %}{{ a }}", "{% set a = [1] %}{% do a.clear() %}{{ a }}",
    "{% set a = {} %}{% do a.update(x=1) %}{% do a.update({'y': 2}) %}{{ a }}", "{% set a = {'x': 1} %}{{ a.pop('x') }}{{ a }}{{ a.pop('x', 5) }}", "{% set a = {} %}{{ a.pop('x') }}", "{% set a = {} %}{{ a.setdefault('x', 1) }}{{ a.setdefault('x', 2) }}{{ a }}", "{% set a = {'x': 1, 'y': 2} %}{{ a.popitem() }}{{ a }}", "{% set a = {'x': 1} %}{% do a.clear() %}{{ a }}", "{% set a = [1] %}{% set b = a %}{% do b.append(2) %}{{ a }}", "{% set a = {} %}{% for i in range(40) %}{% do a.update({i: i * i}) %}{% endfor %}{{ a[39] }}{{ a.pop(20) }}{{ a[21] }}{{ a|length }}",
]

TOOL = {"type": "function", "function": {"name": "f", "description": "é <b> & 'q'", "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "number", "default": 1.0, "enum": [1, 2.5, None]}}, "required": ["a"]}}}
ARGUMENTS = {"a": "x\ny", "n": 3, "l": [1, 2], "b": True, "z": None, "o": {"k": "ü"}, "fl": 0.1, "e": 1e-7}


def conversations():
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": ARGUMENTS}}
    empty_call = {"function": {"name": "g", "arguments": {}}}
    user = {"role": "user", "content": " hi "}
    yield []
    yield [user]
    yield [{"role": "user", "content": ""}]
    yield [{"role": "user", "content": "  multi\n\nline <|im_end|> 日本 🎉\t "}]
    yield [{"role": "system", "content": "sys \n"}, user]
    yield [{"role": "system", "content": ""}, user]
    yield [{"role": "system", "content": "  "}, user]
    yield [user, {"role": "system", "content": "late"}]
    yield [user, {"role": "assistant", "content": "old"}, {"role": "user", "content": "q"}]
    yield [user, {"role": "assistant", "content": "<think>\nr\n</think>\n\nanswer"}, {"role": "user", "content": "q"}]
    yield [user, {"role": "assistant", "content": "r</think>answer</think>\nmore"}]
    yield [user, {"role": "assistant", "content": "a", "reasoning_content": " r0 \n"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "b", "reasoning_content": "r1"}]
    yield [user, {"role": "assistant", "content": "a", "reasoning": "r0"}, {"role": "user", "content": "q"}]
    yield [user, {"role": "assistant", "content": "a", "reasoning_content": ""}]
    yield [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    yield [user, {"role": "assistant", "content": None, "tool_calls": [call, empty_call]}, {"role": "tool", "content": "res1"}, {"role": "tool", "content": "res2"}]
    yield [user, {"role": "assistant", "content": "text", "reasoning_content": "r", "tool_calls": [empty_call, call]}, {"role": "tool", "content": "res"}, {"role": "assistant", "content": "done"}, {"role": "user", "content": "next"}]
    yield [user, {"role": "assistant", "content": "x", "tool_calls": [{"name": "bare", "arguments": {"a": 1}}]}]
    yield [user, {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "s", "arguments": "{\"a\": 1}"}}]}]
    yield [user, {"role": "assistant", "content": "x", "tool_calls": []}]
    yield [user, {"role": "assistant"}]
    yield [{"role": "tool", "content": "first"}, user]
    yield [{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}]
    yield [user, {"role": "user", "content": "<tool_response>\nx\n</tool_response>"}, {"role": "assistant", "content": "y", "reasoning_content": "z"}]
    yield [{"role": "user", "content": [{"type": "text", "text": "part "}, {"type": "text", "text": "two"}]}]
    yield [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}, {"type": "video"}]}]
    yield [{"role": "system", "content": [{"type": "image"}]}, user]
    yield [{"role": "user", "content": [{"type": "other"}]}]
    yield [{"role": "user", "content": 5}]
    yield [{"role": "user", "content": {"a": 1}}]
    yield [{"role": "developer", "content": "dev"}, user]
    yield [{"role": "assistant", "content": "only"}]
    yield [{"content": "no role"}]
    yield [{"role": "user"}]
    yield [m for i in range(20) for m in ({"role": "user", "content": f"u{i}"}, {"role": "assistant", "content": f"a{i}", "reasoning_content": f"r{i}"})] + [user]


def template_of_gguf(path):
    """The chat template of a GGUF file: after its key come the type (string), the length and the text."""
    with open(path, "rb") as file:
        head = file.read(1 << 24)
    key = b"tokenizer.chat_template" + struct.pack("<I", 8)
    at = head.find(key) + len(key)
    if at < len(key):
        return None
    (size,) = struct.unpack_from("<Q", head, at)
    return head[at + 8 : at + 8 + size].decode()


def real_template_cases():
    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.environ.get("THERMO_TEMPLATES", os.path.join(here, "..", "..", "shared", "templates"))
    paths = sorted(glob.glob(os.path.join(folder, "*.jinja")))
    if not paths:
        print(f"note: no templates in {folder}; the real templates are not compared")
    flags = [{}, {"enable_thinking": True}, {"enable_thinking": False}, {"enable_thinking": None}, {"add_vision_id": True}, {"render_assistant_messages_raw": True}, {"preserve_thinking": True}]
    tools = [{}, {"tools": None}, {"tools": []}, {"tools": [TOOL]}, {"tools": [TOOL, TOOL["function"]]}]
    sources = [template_of_gguf(path) for path in glob.glob(os.path.join(here, "..", "models", "*.gguf"))]
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            sources.append(file.read())
    for source in filter(None, sources):
        for messages, flag, tool, prompt in itertools.product(conversations(), flags, tools, (True, False)):
            context = {"messages": messages, "add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
            yield source, {**context, **flag, **tool}, SANDBOX


def all_cases():
    for line in EXPRESSIONS:
        yield "{{ " + line + " }}", CONTEXT, SANDBOX
    # The same values as conditions, set values and arguments, where other code paths run.
    for line in EXPRESSIONS:
        yield "{% if " + line + " %}T{% else %}F{% endif %}", CONTEXT, SANDBOX
        yield "{% set v = " + line + " %}\n[{{ v|string|length > 0 and v is defined }}]", CONTEXT, SANDBOX
    for template in TEMPLATES:
        yield template, CONTEXT, SANDBOX
        yield template + "\n", CONTEXT, SANDBOX
        yield "  " + template + "\n  tail", CONTEXT, SANDBOX
    for template in MUTATIONS:
        yield template, CONTEXT, MUTABLE
    yield from operator_cases()
    yield from whitespace_cases()
    yield from real_template_cases()


def operator_cases():
    """Every binary operator, filter and test over every pair of values."""
    values = ["1", "0", "-2", "2.5", "true", "none", "'ab'", "''", "[1, 2]", "[]", "{'a': 1}", "(1, 2)", "missing", "range(2)"]
    operators = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
    for a, operator, b in itertools.product(values, operators, values):
        if (a, operator, b) == ("-2", "**", "2.5"):
            continue  # a complex number
        yield "{{ " + f"{a} {operator} {b}" + " }}", {}, SANDBOX
    filters = "abs capitalize count d default e first float int items join last length list lower max min reverse|list round safe sort string sum title tojson trim unique|list upper wordcount select|list reject|list dictsort urlencode indent center(5) batch(2)|list slice(2)|list".split()
    for value, name in itertools.product(values, filters):
        yield "{{ " + f"({value})|{name}" + " }}", {}, SANDBOX
    tests = "boolean callable defined even false float integer iterable lower mapping none number odd sequence string true undefined upper escaped".split()
    for value, name in itertools.product(values, tests):
        yield "{{ (" + value + ") is " + name + " }}", {}, SANDBOX
    for value, index in itertools.product(values, values + ["0:1", ":", "::-1", "-1:", ":5:2"]):
        yield "{% set v = " + value + " %}{{ v[" + index + "] }}", {}, SANDBOX


def whitespace_cases():
    """Tags of each kind with every control sign between every kind of space."""
    spaces = ["", " ", "\n", "  \n  ", "a ", " a\n"]
    tags = ["{%%%s if t %s%%}", "{{%s x %s}}", "{#%s c %s#}", "{%%%s raw %s%%}r{%%%s endraw %s%%}"]
    for before, after, (left, right) in itertools.product(spaces, spaces, itertools.product(["", "-", "+"], repeat=2)):
        for tag in tags:
            signs = (left, right) * (tag.count("%s") // 2)
            text = tag % signs
            yield before + text + after + "b" + ("{% endif %}" if "if t" in tag else ""), CONTEXT, SANDBOX


def main():
    program = sys.argv[1] if len(sys.argv) == 2 else os.environ.get("JINJA_RENDER")
    if not program:
        print(__doc__)
        return 2
    cases = list(all_cases())
    requests = "".join(json.dumps({"template": t, "context": c}) + "\n" for t, c, _ in cases)
    ours = subprocess.run([program], input=requests.encode(), stdout=subprocess.PIPE, check=True).stdout.decode()
    replies = [json.loads(line) for line in ours.split("\n") if line]
    if len(replies) != len(cases):
        print(f"FAILED: {len(cases)} templates sent, {len(replies)} replies")
        return 1
    n_bad = n_rendered = 0
    for (template, context, env), reply in zip(cases, replies):
        ok, expected = render(template, context, env)
        n_rendered += ok
        raised = not ok and expected.startswith("TemplateError: ")
        if ok:
            same = reply["ok"] and reply["text"] == expected
        else:
            same = not reply["ok"] and (not raised or expected.split(": ", 1)[1] in reply["error"])
        if same or is_unstable(expected):
            continue
        n_bad += 1
        if n_bad <= 60:
            shown = template if len(template) < 200 else template[:60] + "... " + json.dumps(context)[:300]
            print(f"template: {shown!r}\n  jinja2: {expected!r}\n  ours:   {reply.get('text', reply.get('error'))!r}")
    print(f"{len(cases)} templates, {n_rendered} of them render: {n_bad} differences")
    return 1 if n_bad else 0


def is_unstable(expected):
    """Python prints addresses for these."""
    return " object at 0x" in expected or " at 0x" in expected


if __name__ == "__main__":
    sys.exit(main())
