"""Render chat templates with limits on memory and time.

A template comes with a model from the Hub, so it is untrusted code. The sandbox of transformers protects Python's
internals, but it does not stop `{{ 'a' * 10**10 }}`. Here every operation that can make a large value from small ones
has a limit.

The rendered text equals that of `apply_chat_template` with two exceptions:

- `strftime_now` formats a given day instead of the current time.
- Printing a list, an object, null or a boolean raises an error. Jinja would write Python's repr.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import lru_cache, wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from padfree.errors import UserError, shown_error

Span = tuple[int, int]

MAX_SOURCE = 1 << 20
MAX_VALUE = 1 << 24  # characters or elements of one value
MAX_NODES = 1 << 17  # values inside a list or an object
MAX_BITS = 1 << 12  # bits of an integer
MAX_INTEGER = 10_000  # largest integer argument of a filter: a width, an indentation, a number of items
MAX_SECONDS = 20.0
OUTPUT_PER_INPUT = 64
OUTPUT_ALLOWANCE = 1 << 20
"""A rendered text has at most OUTPUT_ALLOWANCE + OUTPUT_PER_INPUT * (characters of the conversation) characters."""

_SHRINKING = frozenset(
    (
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "splitlines",
        "partition",
        "rpartition",
        "startswith",
        "endswith",
        "lower",
        "upper",
        "title",
        "capitalize",
        "casefold",
        "swapcase",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "items",
        "keys",
        "values",
        "get",
        "removeprefix",
        "removesuffix",
    )
)
"""The methods of str, list, dict and numbers whose results are never larger than their operands.

A chat template may call them without a check of the size of the result.
"""
_WIDTH = re.compile(r"\d{5,}|\*")
_UNUSABLE_FILTERS = ("random",)
_UNUSABLE_GLOBALS = ("lipsum",)


class TemplateBoundError(TemplateError):
    """Raised if a template exceeds a limit on memory or time."""


class TemplateReprError(TemplateError):
    """Raised if a template prints a value that is not text."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment with limits on memory and time.

    `day`: the date that `strftime_now` formats. `clock_reads`: how many times one rendering has called `strftime_now`.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, theirs: Any, day: datetime.date) -> None:
        super().__init__(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(extension) for extension in theirs.extensions.values()],
            finalize=_printable,
        )
        self.filters = {
            name: _bounded_filter(name, function)
            for name, function in theirs.filters.items()
            if name not in _UNUSABLE_FILTERS
        }
        self.filters |= {"_steps": self._steps, "_whole": _whole, "_sized": _sized}
        self.globals = {name: value for name, value in theirs.globals.items() if name not in _UNUSABLE_GLOBALS}
        self.globals["strftime_now"] = self._strftime_now
        self.concat = _joined  # type: ignore[method-assign]
        self._moment = datetime.datetime(day.year, day.month, day.day)
        self.clock_reads = 0
        self._deadline = 0.0
        self._count = 0

    def begin(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self.clock_reads = 0

    def _generate(self, source: nodes.Template, *arguments: Any, **keywords: Any) -> str:
        return super()._generate(_with_checks(source), *arguments, **keywords)

    def _strftime_now(self, form: str) -> str:
        self.clock_reads += 1
        return self._moment.strftime(form)

    def _tick(self) -> None:
        self._count += 1
        if self._count % 256 == 0:
            self._check_time()

    def _check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateBoundError(f"rendering takes more than {MAX_SECONDS:.0f} seconds")

    def _steps(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """Return the iterable of a template's loop. A long iterable is wrapped, so that its loop checks the time limit.

        The wrapper yields the same values.
        """
        self._check_time()
        if isinstance(iterable, (Undefined, str)) or (isinstance(iterable, Sized) and len(iterable) < 256):
            return iterable
        return self._watched(iterable)

    def _watched(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for one in iterable:
            self._tick()
            yield one

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._tick()
        if operator == "+":
            return _sized(left + right)
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
            _check_product("%", (right,) if not isinstance(right, tuple) else right)
        elif operator in ("*", "**"):
            _check_number(operator, left, right)
        return _sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as jinja2 has it)
        __self._tick()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps `str.format`
        if isinstance(owner, (str, list, tuple, dict, int, float)):
            name = __obj.__name__
            if name in ("format", "format_map"):
                _check_widths(str(owner))
            if name not in _SHRINKING:
                _check_product(name, (owner, *args, *kwargs.values()))
        elif isinstance(__obj, LoopContext):
            args = tuple(__self._watched(one) for one in args)
        elif not isinstance(__obj, Macro):
            for value in args:
                _whole(value)
        return _sized(super().call(__context, __obj, *args, **kwargs))


def _with_checks(template: nodes.Template) -> nodes.Template:
    """Add filters that check time and memory to the syntax tree of a Jinja template.

    The iterables of loops, string concatenations (`~`), and list, tuple and dict literals pass through these filters.
    """

    def checked(node: Any, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)

    def visit(node: Any) -> Any:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, visit(value))
            elif isinstance(value, list):
                setattr(node, field, [visit(one) if isinstance(one, nodes.Node) else one for one in value])
        if isinstance(node, nodes.For):
            node.iter = checked(node.iter, "_steps")
        elif isinstance(node, nodes.Concat):
            return checked(node, "_sized")
        elif isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return checked(node, "_whole")
        return node

    visit(template)
    return template


def _printable(value: Any) -> Any:
    if value is None or isinstance(value, (bool, list, tuple, dict)):
        kind = {"NoneType": "null", "bool": "a boolean", "dict": "an object"}.get(type(value).__name__, "a list")
        raise TemplateReprError(f"the template prints {kind} as Python's repr")
    return value


def _size(value: Any) -> int:
    if isinstance(value, bool) or value is None:
        return 1
    if isinstance(value, int):
        return abs(value)
    return max(len(value), 1) if isinstance(value, (str, list, tuple, dict)) else 1


def _sized(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) > MAX_VALUE:
            raise TemplateBoundError(f"the template makes a text of more than {MAX_VALUE} characters")
    elif isinstance(value, (list, tuple)):
        if len(value) > MAX_NODES:
            raise TemplateBoundError(f"the template makes a list of more than {MAX_NODES} values")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateBoundError(f"the template makes an integer of more than {MAX_BITS} bits")
    return value


def _whole(value: Any) -> Any:
    """Return `value`. Raise a `TemplateBoundError` if it contains too many values, counted through all nested lists.

    A list that occurs several times inside `value` counts each time, although it takes no extra memory.
    """
    if isinstance(value, (list, tuple, dict)):
        waiting: list[Any] = [value]
        count = 0
        while waiting:
            one = waiting.pop()
            inside = one.values() if isinstance(one, dict) else one
            count += len(one)
            if count > MAX_NODES:
                raise TemplateBoundError(f"the template makes a list of more than {MAX_NODES} values")
            waiting += [part for part in inside if isinstance(part, (list, tuple, dict))]
    return value


def _check_product(name: str, values: Iterable[Any]) -> None:
    product = 1
    for value in values:
        product *= max(_size(value), 1)
        if isinstance(value, dict):  # `str.translate` can replace each character with a whole text
            product *= max((_size(one) for one in value.values()), default=1)
        if product > MAX_VALUE:
            raise TemplateBoundError(f"the operation {name} can make a text of more than {MAX_VALUE} characters")


def _check_number(operator: str, left: Any, right: Any) -> None:
    numbers = [isinstance(value, (int, float)) for value in (left, right)]
    if not all(numbers):
        _check_product(operator, (left, right))
    elif operator == "**" and type(left) is type(right) is int and left.bit_length() * max(right, 0) > MAX_BITS:
        raise TemplateBoundError(f"the template makes an integer of more than {MAX_BITS} bits")


def _check_widths(form: str) -> None:
    if _WIDTH.search(form) is not None:
        raise TemplateBoundError(f"the template formats a value with a width of more than {MAX_INTEGER} characters")


def _joined(parts: Iterable[str]) -> str:
    parts = list(parts)
    if sum(map(len, parts)) > MAX_VALUE:
        raise TemplateBoundError(f"the template makes a text of more than {MAX_VALUE} characters")
    return "".join(parts)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Jinja filter so that its arguments and its result are checked."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_INTEGER and args and value is not args[0]:
                raise TemplateBoundError(f"the filter {name} has the argument {value}, which is over {MAX_INTEGER}")
        if name in ("replace", "join", "indent", "xmlattr"):
            _check_product(name, [value for value in (*args, *kwargs.values()) if isinstance(value, (str, int, list))])
        elif name in ("tojson", "string", "pprint", "list", "sort", "unique", "sum"):
            for value in args:
                _whole(value)
        elif name == "format":
            _check_widths(str(args[0]))
            _check_product(name, args[1:])
        return _sized(function(*args, **kwargs))

    return bounded


@lru_cache(maxsize=64)
def compiled(source: str, day: datetime.date) -> Any:
    """Compile a Jinja template. Raise a `UserError` if its text is not a valid template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if len(source) > MAX_SOURCE:
        raise UserError(
            "data.chat_template",
            f"the template has {len(source)} characters",
            f"shorten it to at most {MAX_SOURCE} characters",
        )
    environment = BoundedEnvironment(_compile_jinja_template("").environment, day)
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError, SyntaxError) as error:
        raise UserError("data.chat_template", f"{shown_error(error)}", "correct the template") from None


@lru_cache(maxsize=64)
def compared_texts(source: str) -> frozenset[str]:
    """Return the string literals in a template's comparisons and filter arguments, e.g. `user` in `role == 'user'`."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    comparisons = _compile_jinja_template("").environment.parse(source).find_all((nodes.Compare, nodes.Filter))
    sides = [
        side
        for node in comparisons
        for side in ([node.expr, *node.ops] if isinstance(node, nodes.Compare) else node.args)
    ]
    constants = [constant.value for side in sides for constant in _constants(side)]
    return frozenset(value for value in constants if isinstance(value, str))


def _constants(side: nodes.Node) -> Iterator[nodes.Const]:
    """Yield the constants in one operand of a comparison.

    An operand is a constant (`role == 'user'`), or a list or tuple of constants (`role in ['user', 'tool']`). Other
    operands, such as the subscript in `tool['function']`, have no constants.
    """
    if isinstance(side, nodes.Operand):
        yield from _constants(side.expr)
    elif isinstance(side, nodes.Const):
        yield side
    elif isinstance(side, (nodes.List, nodes.Tuple)):
        for one in side.items:
            yield from _constants(one)


def rendered(
    template: Any, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], *, spans: bool = False
) -> tuple[str, list[Span]]:
    """Render a template. Return the text and, if `spans` is True, its ranges inside `{% generation %}` markers.

    Errors that the template raises are not caught.
    """
    blocks: list[str] = []
    found: list[Span] = []
    environment = template.environment
    environment.begin()
    stream = template.generate(messages=messages, **variables)
    if spans:
        with environment.activate_tracker(blocks, found):
            _collect(stream, blocks, messages, variables)
    else:
        _collect(stream, blocks, messages, variables)
    return "".join(blocks), found


def _collect(stream: Iterable[str], blocks: list[str], messages: Any, variables: Mapping[str, Any]) -> None:
    size, allowed = 0, OUTPUT_ALLOWANCE
    for block in stream:
        blocks.append(block)
        size += len(block)
        if size > allowed:
            allowed = OUTPUT_ALLOWANCE + OUTPUT_PER_INPUT * (_length(messages) + _length(variables))
            if size > allowed:
                raise TemplateBoundError(f"the template renders more than {allowed} characters")


def _length(value: Any) -> int:
    """Return the number of characters in all strings inside a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _length(one) for key, one in value.items())
    return sum(map(_length, value)) if isinstance(value, (list, tuple)) else 8
