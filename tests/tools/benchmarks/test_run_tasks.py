"""Tasks of lm-evaluation-harness: the numbers of its own backend for transformers models, in float32 on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from padfree.testing.models import save_with_tokenizer
from padfree.tools.benchmarks.harness_model import cut, generation_of
from padfree.tools.benchmarks.packed_scores import packs
from padfree.tools.benchmarks.run_tasks import TaskOptions, numbers_of, run_tasks
from padfree.tools.talk.find_model import find_model
from tests.refused import refused

REASON = "make test-doors installs lm_eval and runs these tests"

CHAT = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
ROWS = [
    {
        "question": f"{index} plus {index * 3} is",
        "choices": [str(index), f"about {index * 4}", str(index * 4)],
        "label": index % 3,
        "answer": str(index),
        "text": f"count to {index} " * (index * 2 + 1),
    }
    for index in range(7)
]
DATA = """dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
    train: {path}
test_split: test
fewshot_split: train
"""
CHOOSE = """task: {name}
output_type: multiple_choice
doc_to_text: "question: {{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
READ = """task: {name}
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
WRITE = """task: {name}
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: {until}
  max_gen_toks: 24
  do_sample: false
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context of 96 tokens whose predictions differ, and three tasks."""
    pytest.importorskip("lm_eval", reason=REASON)
    made = tmp_path_factory.mktemp("tasks")
    model = save_with_tokenizer(made / "model", writes_back=True, max_position_embeddings=96, initializer_range=0.4)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = DATA.format(path=made / "rows.jsonl")
    (made / "yaml").mkdir()
    for name, text in (("own_choose", CHOOSE), ("own_read", READ), ("own_write", WRITE)):
        (made / "yaml" / f"{name}.yaml").write_text(text.format(name=name, until='["q", "zz"]') + data)
    return made


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))


def own_backend(folder: Path, options: TaskOptions) -> dict[str, Any]:
    """The results of the package's backend, one request at a time."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "model"), "dtype": "float32"},
        batch_size=1,
        device="cpu",
        tasks=list(options.tasks),
        task_manager=TaskManager(include_path=list(options.include), include_defaults=False),
        bootstrap_iters=options.bootstrap,
        num_fewshot=options.fewshot,
        limit=options.limit,
        apply_chat_template=options.chat,
        fewshot_as_multiturn=options.chat,
        system_instruction=options.system,
        log_samples=True,
    )
    return dict(found)


def answers(found: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answers in sample["resps"] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{}, {"fewshot": 2}, {"chat": True, "fewshot": 1, "system": "add"}, {"chat": True, "limit": 3}],
    ids=["plain", "fewshot", "chat", "limit"],
)
def test_the_numbers_of_the_package(folder: Path, change: dict[str, Any]) -> None:
    options = TaskOptions(
        tasks=("own_choose", "own_read", "own_write"),
        include=(str(folder / "yaml"),),
        samples=True,
        bootstrap=10,
    )
    options = replace(options, **change)
    ours = run_tasks(find_model(str(folder / "model")), options)
    theirs = own_backend(folder, options)
    for task in ("own_choose", "own_read"):
        expected = np.array([float(one[0] if isinstance(one, (tuple, list)) else one) for one in answers(theirs, task)])
        found = np.array([float(one[0] if isinstance(one, (tuple, list)) else one) for one in answers(ours, task)])
        assert len(found) == (21 if task == "own_choose" else 7) * (options.limit or 7) // 7
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-5)
    greedy = [bool(one[1]) for one in answers(theirs, "own_choose")]
    assert [bool(one[1]) for one in answers(ours, "own_choose")] == greedy
    assert answers(ours, "own_write") == answers(theirs, "own_write")
    one, other = numbers_of(ours), numbers_of(theirs)
    assert one.keys() == other.keys()
    for name in one:
        if "own_read" in name:
            assert one[name] == pytest.approx(other[name], rel=1e-5)
        else:
            assert one[name] == other[name], name
    assert ours["n-shot"] == theirs["n-shot"]
    assert ours["n-samples"] == theirs["n-samples"]


@pytest.mark.slow
def test_the_tasks_tell_models_apart(folder: Path) -> None:
    """The comparison above compares something: texts have several lengths, some are cut, log-likelihoods differ."""
    options = TaskOptions(tasks=("own_choose", "own_write"), include=(str(folder / "yaml"),), samples=True)
    found = run_tasks(find_model(str(folder / "model")), options)
    texts = answers(found, "own_write")
    assert len(set(texts)) > 3
    assert not any("q" in text or "zz" in text for text in texts)
    assert len({len(text) for text in texts}) > 1
    assert len({round(float(one[0]), 3) for one in answers(found, "own_choose")}) > 15


@pytest.mark.slow
def test_the_command(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "padfree", "eval", str(folder / "model"), "--tasks", "own_choose"]
    command += ["--include-path", str(folder / "yaml"), "--json", str(tmp_path / "found.json"), "--limit", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "found.json").read_text())
    lines = dict(line.split() for line in done.stdout.splitlines())
    assert lines.keys() == {f"own_choose/{name}" for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")}
    assert float(lines["own_choose/acc"]) == pytest.approx(written["own_choose/acc"])
    assert written["n-samples"] == {"own_choose": {"original": 7, "effective": 4}}


def test_wrong_tasks_are_refused(folder: Path, tmp_path: Path) -> None:
    files = find_model(str(folder / "model"))
    with refused("--tasks", "is not a task"):
        run_tasks(files, TaskOptions(tasks=("no_such_task_at_all",)))
    with refused("--include-path"):
        run_tasks(files, TaskOptions(tasks=("own_choose",), include=(str(tmp_path / "missing"),)))
    (tmp_path / "bad.yaml").write_text(
        WRITE.format(name="own_bad", until="[]\n  top_p: 0.5") + DATA.format(path=folder / "rows.jsonl")
    )
    with refused("--tasks", "top_p=0.5"):
        run_tasks(files, TaskOptions(tasks=("own_bad",), include=(str(tmp_path),)))


def test_arguments_of_a_generation() -> None:
    read = generation_of({"until": "\n", "max_new_tokens": 5, "do_sample": False, "temperature": 0.7, "top_p": 1.0})
    assert (read.until, read.max_new_tokens, read.temperature) == (("\n",), 5, 0.0)
    read = generation_of({"until": ["a", ""], "temperature": 0.5})
    assert (read.until, read.max_new_tokens, read.temperature) == (("a",), 256, 0.5)
    assert generation_of({"do_sample": True}).temperature == 1.0
    for name, value in (("top_p", 0.9), ("top_k", 50), ("repetition_penalty", 1.1), ("num_beams", 4), ("what", 1)):
        with refused("--tasks", name):
            generation_of({name: value})


def test_texts_are_cut_before_the_first_stop() -> None:
    assert cut("ab\ncd;ef", ["\n", ";"]) == "ab"
    assert cut("ab;c\nd", ["\n", ";"]) == "ab"
    assert cut("abc", ["\n"]) == "abc"


def test_packs_hold_every_sequence_once() -> None:
    lengths = [5, 90, 3, 40, 41, 20, 120]
    found = list(packs(lengths, 100))
    assert found == [[6], [1], [4, 3], [5, 0, 2]]
    assert list(packs([], 10)) == []
