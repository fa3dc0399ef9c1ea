"""Arithmetic word problems with a calculator: `rollout.environment = "padfree.rollout.environment.calculator:episode"`.

    prompt      Ann has 48 clips, and half as many pens. How many in all?
    policy      48/2=<<48/2=            and ends its turn
    calculator  24>>
    policy      24 pens. <<48+24=       and ends its turn
    calculator  72>>
    policy      #### 72                 ends without a calculation: the episode is over

The notation is that of GSM8K's solutions. Only the tokens of the policy are trained, not those of the calculator. A
calculation that is not arithmetic gets the reply `error>>`. With a chat template, a reply is a user message.
`rollout.reward` computes the reward, for example `number_after_hashes`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from padfree.rollout.environment.episode_policy import Policy
from padfree.rollout.environment.trajectory import Trajectory
from padfree.rollout.prompts import Prompt

QUESTION = re.compile(r"<<([^<>=]+)=\s*$")
MOST_CALLS = 16
ARITHMETIC = re.compile(r"[\d+\-*/(). ]{1,100}")
"""Matches the expressions that the calculator evaluates. The limit of 100 characters keeps the numbers small."""
DIGITS = 6
"""Number of decimal places to which results are rounded."""

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
    """Play one episode: the policy generates, and the calculator answers, until the policy asks no more questions."""
    calls = wrong = 0
    while True:
        turn = await policy.generate()
        question = QUESTION.search(turn.text)
        if not turn.ended or question is None or calls == MOST_CALLS:
            break
        calls += 1
        answer = calculate(question[1])
        wrong += answer is None
        if not policy.reply(f"{'error' if answer is None else answer}>>"):
            break
    return policy.trajectory(metrics={"calls": calls, "wrong_calls": wrong})


def calculate(question: str) -> str | None:
    """Return the value of an expression of decimal numbers and `+ - * / ( )`, rounded to DIGITS places.

    Return None if the expression is invalid.

    48/2 -> 24      1/3 -> 0.333333      1,000*2.5 -> 2500      2**9 -> None
    """
    plain = question.replace(",", "").strip()
    if ARITHMETIC.fullmatch(plain) is None:
        return None
    try:
        value = _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError):
        return None
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**DIGITS)
    whole, rest = divmod(scaled, 10**DIGITS)
    text = f"{whole}.{rest:0{DIGITS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 and scaled else text


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ArithmeticError(type(node).__name__)
