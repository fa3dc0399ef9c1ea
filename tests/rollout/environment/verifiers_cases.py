"""Environments of the verifiers package, made of its own classes. Nothing here knows padfree."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def exact(completion: Any, answer: str, **kwargs: Any) -> float:
    return float(completion[-1]["content"] == answer)


def short(completion: Any, **kwargs: Any) -> float:
    return 1.0 / (1 + len(completion[-1]["content"] or ""))


async def letters(completion: Any, **kwargs: Any) -> float:
    return float(sum(len(message["content"] or "") for message in completion if message["role"] == "assistant"))


def single(rows: int = 2) -> Any:
    data = [{"question": f"{index} and 1?", "answer": str(index + 1)} for index in range(rows)]
    rubric = vf.Rubric(funcs=[exact, short, letters], weights=[1.0, 0.5, 0.0])
    held_out = Dataset.from_list([{"question": "7 and 1?", "answer": "8"}])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(data), eval_dataset=held_out, system_prompt="add.", rubric=rubric)


class Countdown(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
    """The model guesses a number; the environment says whether it is higher or lower."""

    async def setup_state(self, state: Any) -> Any:
        state["guesses"] = 0
        return state

    @vf.stop
    async def solved(self, state: Any) -> bool:
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["guesses"] += 1
        guess = messages[-1]["content"]
        hint = "more" if guess.isdigit() and int(guess) < int(state["answer"]) else "less"
        return [{"role": "user", "content": hint}]


def turns_left(state: Any, **kwargs: Any) -> float:
    return 1.0 - state["guesses"] / 4


def guessing() -> Any:
    rubric = vf.Rubric(funcs=[exact, turns_left], weights=[1.0, 0.25])
    return Countdown(dataset=Dataset.from_list([{"question": "guess", "answer": "5"}]), rubric=rubric, max_turns=4)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: a number
        b: a number
    """
    return a + b


def calculating() -> Any:
    data = Dataset.from_list([{"question": "2 and 3?", "answer": "5"}])
    return vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[exact]), max_turns=3)


def best(completions: Any, **kwargs: Any) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]


def compared() -> Any:
    data = Dataset.from_list([{"question": "2 and 3?", "answer": "5"}, {"question": "3 and 3?", "answer": "6"}])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[exact, best], weights=[1.0, 0.5]))


def load_environment(kind: str = "single", **arguments: Any) -> Any:
    kinds = {"single": single, "guessing": guessing, "calculating": calculating, "compared": compared}
    return kinds[kind](**arguments)
