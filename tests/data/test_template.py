"""Templates that need unbounded memory or time are stopped; dates come from the given day."""

from __future__ import annotations

import datetime
import pickle
import time

import pytest

from padfree.data import template as module
from padfree.data.chat_renderer import ChatRenderer
from padfree.data.conversation import Conversation
from padfree.data.records import RowError
from padfree.data.template import compiled, rendered
from padfree.testing.tokenizers import TEMPLATES, tiny_tokenizer
from tests.refused import refused

DAY = datetime.date(2020, 2, 3)
MESSAGES = [{"role": "user", "content": "Hi"}]
DOUBLED = (
    "{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    "{{{{ ns.x {end} }}}}"
)
LARGE = "{% set x = 'ab' * 8000000 %}"

BOMBS = {
    "multiplied": "{{ 'a' * 10**10 }}",
    "multiplied number": "{{ 10000000000 * 'a' }}",
    "multiplied list": "{{ ([1] * 10**10)|length }}",
    "power": "{{ 10**(10**10) }}",
    "squares": DOUBLED.format(start="3", step="ns.x * ns.x", end=""),
    "plus": DOUBLED.format(start="'ab'", step="ns.x + ns.x", end=""),
    "concatenated": DOUBLED.format(start="'ab'", step="ns.x ~ ns.x", end=""),
    "longer lists": DOUBLED.format(start="[1]", step="ns.x + ns.x", end="|length"),
    "lists of lists": DOUBLED.format(start="[1]", step="[ns.x, ns.x]", end="|tojson"),
    "objects of objects": DOUBLED.format(start="{'a': 1}", step="{'a': ns.x, 'b': ns.x}", end="|string"),
    "equal trees": DOUBLED.format(start="[1]", step="(ns.x, ns.x)", end="== 1"),
    "replace": DOUBLED.format(start="'ab'", step="ns.x.replace('a', ns.x)", end=""),
    "replace filter": DOUBLED.format(start="'ab'", step="ns.x|replace('a', ns.x)", end=""),
    "join": DOUBLED.format(start="'ab'", step="ns.x.join([ns.x, ns.x])", end=""),
    "join filter": DOUBLED.format(start="'ab'", step="[ns.x, ns.x]|join(ns.x)", end=""),
    "set block": DOUBLED.format(start="'ab'", step="x", end="").replace(
        "{% set ns.x", "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x"
    ),
    "width": "{{ '%010000000000d' % 1 }}",
    "starred width": "{{ '%*d' % (10**10, 1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "nested format": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "format filter": "{{ '%10000000000s'|format('a') }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "mapped center": "{{ ['a']|map('center', 10**10)|list }}",
    "indent": "{{ 'a'|indent(10**10, true) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'x' * 100000}) }}",
    "json": "{{ messages|tojson(indent=10**10) }}",
    "round": "{{ 1.5|round(10**9) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "range": "{{ range(10**10)|list }}",
    "output": "{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxx{% endfor %}{% endfor %}",
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "short loops": "{% for a in range(99) %}" * 8 + "{% endfor %}" * 8,
    "recursive loop": (
        "{% for i in range(100000) recursive %}{% if loop.depth == 1 %}{{ loop(range(100000)) }}{% endif %}{% endfor %}"
    ),
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "searches": LARGE + "{% for i in range(100000) %}{% if 'q' in x %}{% endif %}{% endfor %}",
    "words": "{{ lipsum(n=100000) }}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_cannot_take_unbounded_memory_or_time(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.2)
    renderer = ChatRenderer(tiny_tokenizer(), BOMBS[bomb])
    began = time.thread_time()
    with pytest.raises(RowError, match=r"^the chat template raised an error: .*; change the row, or set .*$"):
        renderer.render(MESSAGES)
    assert time.thread_time() - began < 30


def test_a_long_conversation_is_no_bomb() -> None:
    messages = [{"role": "user", "content": "word " * 400_000}]
    assert len(ChatRenderer(tiny_tokenizer("chatml")).render(messages)) > 2_000_000


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (5, r"^data\.chat_template: the tokenizer's template is 5; give a Jinja template as text$"),
        (2.5, r"^data\.chat_template: the tokenizer's template is 2\.5; give a Jinja template as text$"),
        (["a"], r"^data\.chat_template: the tokenizer's template is a list of 1; give a Jinja template as text$"),
        (
            {"default": 5},
            r"^data\.chat_template: the tokenizer's template is an object; give a Jinja template as text$",
        ),
        (
            {"other": "x"},
            r"^data\.chat_template: is not set, and .* without a default \(.*other.*\); write",
        ),
        ("{% for %}", r"^data\.chat_template: TemplateSyntaxError: .*; correct the template$"),
        ("{{ ['a']|random }}", r"^data\.chat_template: TemplateAssertionError: No filter named 'random'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"^data\.chat_template: RecursionError: .*; correct the"),
        ("x" * 2_000_000, r"^data\.chat_template: the template has 2000000 characters; shorten it to at most 1048576"),
    ],
)
def test_what_is_no_template_is_one_line(template: object, words: str) -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = template  # type: ignore[assignment]
    with pytest.raises(ValueError, match=words) as raised:
        ChatRenderer(tokenizer)
    assert "\n" not in str(raised.value)


def test_the_text_is_that_of_transformers_also_for_what_is_checked() -> None:
    template = (
        "{%- set ns = namespace(a='', n=0) -%}{%- for m in messages -%}{%- set ns.a = ns.a + m.content ~ loop.index -%}"
        "{%- set ns.n = ns.n * 2 + 1 -%}{%- if loop.last -%}last{%- endif -%}{{ loop.length }}{{ loop.revindex }}"
        "{%- for k, v in m.items() if k != 'role' -%}{{ '%s=%5s' % (k, v) }}{%- endfor -%}{%- endfor -%}"
        "{{ ns.a * 2 }}{{ ns.n ** 2 }}{{ [1, {'a': ns.a}]|tojson }}{{ 'a,b'.replace(',', '--') }}{{ 'x'.ljust(3) }}|"
        "{{ messages|map(attribute='role')|join('+') }}{{ '{:>4}'.format('z') }}{% macro f(x) %}<{{ x }}>{% endmacro %}"
        "{{ f('q') }}{{ messages[::-1]|length }}{{ 'abc'|indent(2, true) }}"
        "{% for c in 'xyz' %}{{ c }}{% break %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Ho\n"}]
    assert ChatRenderer(tokenizer).render(messages) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("value", ["[1]", "{'a': 1}", "none", "true", "messages", "messages[0]", "(1, 2)"])
def test_pythons_repr_is_not_printed(value: str) -> None:
    with pytest.raises(RowError, match=r"TemplateReprError: the template prints .* as Python's repr"):
        ChatRenderer(tiny_tokenizer(), "{{ " + value + " }}").render(MESSAGES)


DATED = "{{ strftime_now('%d %b %Y') }} " + TEMPLATES["chatml"]
OPTIONAL = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }} "
)


def test_the_day_is_given_and_kept() -> None:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer, DATED, day=DAY)
    assert renderer.depends_on_day
    assert renderer.render(MESSAGES).startswith("03 Feb 2020 ")
    assert pickle.loads(pickle.dumps(renderer)).render(MESSAGES).startswith("03 Feb 2020 ")
    today = ChatRenderer(tokenizer, DATED)
    assert today.render(MESSAGES).startswith(today.day.strftime("%d %b %Y"))
    later = ChatRenderer(tokenizer, DATED, day=datetime.date(2021, 1, 1))
    conversation = Conversation(messages=({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}))
    texts = [one.samples(conversation, loss_on="assistant", turns="auto")[0].text for one in (renderer, later)]
    assert [text[:11] for text in texts] == ["03 Feb 2020", "01 Jan 2021"]


def test_whether_a_template_depends_on_the_day() -> None:
    tokenizer = tiny_tokenizer("chatml")
    assert not ChatRenderer(tokenizer).depends_on_day
    optional = OPTIONAL + TEMPLATES["chatml"]
    assert ChatRenderer(tokenizer, optional).depends_on_day
    assert not ChatRenderer(tokenizer, optional, {"date_string": "today"}).depends_on_day
    only_with_tools = "{% if tools %}{{ strftime_now('%Y') }}{% endif %}" + TEMPLATES["chatml"]
    assert ChatRenderer(tokenizer, only_with_tools).depends_on_day
    in_a_macro = "{% macro day() %}{{ strftime_now('%Y') }}{% endmacro %}{{ day() }}" + TEMPLATES["chatml"]
    assert ChatRenderer(tokenizer, in_a_macro).depends_on_day


def test_a_template_that_asks_for_the_day_in_some_rows_only_is_refused_there() -> None:
    template = "{% if 'date' in messages[0].content %}{{ strftime_now('%Y') }}{% endif %}" + TEMPLATES["chatml"]
    renderer = ChatRenderer(tiny_tokenizer(), template)
    assert not renderer.depends_on_day
    assert "Hi" in renderer.render(MESSAGES)
    with pytest.raises(RowError, match="reads the current date"):
        renderer.render([{"role": "user", "content": "What date is it?"}])


def test_arguments_are_plain_values() -> None:
    with refused("template_arguments.date"):
        ChatRenderer(tiny_tokenizer("chatml"), arguments={"date": DAY})


def test_a_template_is_compiled_once_for_each_day() -> None:
    assert compiled(DATED, DAY) is compiled(DATED, DAY)
    assert rendered(compiled(DATED, DAY), {}, MESSAGES)[0].startswith("03 Feb 2020")
