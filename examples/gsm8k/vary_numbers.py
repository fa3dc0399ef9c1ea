"""Write variants of GSM8K problems with other numbers: vary_numbers.py TRAIN VARIANTS [--variants 2] [--seed 0]

For example, the first line is a problem of GSM8K with the calculations of its solution, and the second is a variant:

    Natalia sold clips to 48 of her friends in April, and then she sold half as many ...  <<48/2=24>> <<48+24=72>>
    Natalia sold clips to 62 of her friends in April, and then she sold half as many ...  #### 93

The solutions of GSM8K contain their calculations as `<<48/2=24>>`. The script replaces the whole numbers of a question
by others of similar size and repeats the calculations with them. A problem is left out if a number of its calculations
could come from two places, or if the calculations do not lead to the result after `####`. A variant has no solution,
only the result, which is all that GRPO needs.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
CALCULATION = re.compile(r"<<([^=<>]*)=([^<>]*)>>")
YEARS = range(1900, 2101)
DECIMALS = (1, 2, 4, 5, 10, 20, 25, 50, 100)  # denominators of numbers with at most two decimals
ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    question: str
    numbers: frozenset[int]  # the numbers of the question that its calculations use
    calculations: tuple[ast.expr, ...]
    results: tuple[Fraction, ...]

    def variant(self, rng: random.Random) -> dict[str, str] | None:
        """Return the question with other numbers and its result, or None if no attempt gives a sensible problem."""
        for _ in range(ATTEMPTS):
            chosen = {number: other_number(number, rng) for number in sorted(self.numbers)}
            if list(chosen.values()) != sorted(set(chosen.values())) or all(old == new for old, new in chosen.items()):
                continue  # two numbers became equal or changed their order, or nothing changed
            results = calculate(self.calculations, self.results, chosen)
            if results is not None and all(map(is_similar, results, self.results)):
                return {"question": self._with(chosen), "answer": f"#### {decimal(results[-1])}"}
        return None

    def _with(self, chosen: Mapping[int, int]) -> str:
        def replace(match: re.Match[str]) -> str:
            value = number_of(match.group())
            return str(chosen[int(value)]) if value in chosen else match.group()

        return NUMBER.sub(replace, self.question)


def read_problem(row: Mapping[str, str]) -> Problem | None:
    """Return the problem of a row of GSM8K, or None if its calculations do not show where each number comes from."""
    found = [number_of(text) for text in NUMBER.findall(row["question"])]
    texts = CALCULATION.findall(row["answer"])
    try:
        calculations = tuple(ast.parse(text.replace(",", "").strip(), mode="eval").body for text, _ in texts)
        results = tuple(number_of(text) for _, text in texts)
        last = number_of(row["answer"].rsplit("####", 1)[1])
    except (SyntaxError, ValueError, IndexError):
        return None
    if any(value.denominator != 1 for value in found) or not results or results[-1] != last:
        return None
    if len({*found, *results}) != len({*found}) + len(results):
        return None  # a number of the question and a result, or two results, are equal
    nodes = [node for calculation in calculations for node in ast.walk(calculation)]
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    used = frozenset(int(value) for value in found if value in constants)
    same = calculate(calculations, results, {number: number for number in used})
    if len(used) < 2 or same != list(results):
        return None
    return Problem(question=row["question"], numbers=used, calculations=calculations, results=results)


def calculate(
    calculations: tuple[ast.expr, ...], known: tuple[Fraction, ...], chosen: Mapping[int, int]
) -> list[Fraction] | None:
    """Return the results of the calculations after each number of the question is replaced by that in `chosen`.

    A number that is the `known` result of an earlier calculation is replaced by its new result. The result is None if a
    calculation divides by 0 or contains something other than numbers, + - * / and parentheses.
    """
    values: dict[Fraction, Fraction] = {Fraction(old): Fraction(new) for old, new in chosen.items()}
    results = []
    for calculation, result in zip(calculations, known, strict=True):
        try:
            results.append(evaluate(calculation, values))
        except (ZeroDivisionError, ValueError):
            return None
        values[result] = results[-1]
    return results


def evaluate(node: ast.expr, values: Mapping[Fraction, Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = Fraction(str(node.value))
        return values.get(value, value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand, values)
    if isinstance(node, ast.BinOp):
        left, right = evaluate(node.left, values), evaluate(node.right, values)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError(ast.dump(node))


def other_number(number: int, rng: random.Random) -> int:
    """Return a number between half and twice `number`. A multiple of 10 is replaced by a multiple of 10.

    Years and 100 are kept, because they are seldom quantities. Numbers up to 3 are kept, because they often count
    things that the question lists.
    """
    if number <= 3 or number == 100 or number in YEARS:
        return number
    step = 10 if number % 10 == 0 else 1
    return step * rng.randint(max(number // (2 * step), 1), 2 * number // step)


def is_similar(result: Fraction, known: Fraction) -> bool:
    """Whether a result is as plausible as the known one: whole or positive if the known result is."""
    whole = result.denominator == 1 or known.denominator != 1
    return whole and result.denominator in DECIMALS and (result > 0 or known <= 0)


def number_of(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace("$", "").strip())


def decimal(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else str(float(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("variants", type=Path, metavar="VARIANTS")
    parser.add_argument("--variants", type=int, default=2, dest="count", help="variants of each problem (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows = [json.loads(line) for line in options.train.read_text(encoding="utf-8").splitlines()]
    problems = [problem for row in rows if (problem := read_problem(row)) is not None]
    variants = [variant for problem in problems for _ in range(options.count) if (variant := problem.variant(rng))]
    options.variants.write_text("".join(json.dumps(variant) + "\n" for variant in variants), encoding="utf-8")
    print(
        f"{len(rows)} problems, of which {len(problems)} can be varied: {len(variants)} variants in {options.variants}"
    )


if __name__ == "__main__":
    main()
