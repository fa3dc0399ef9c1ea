"""The files of examples/cluster and the script of `padfree launch --slurm` start commands that padfree accepts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
import yaml

from padfree.cli.main import main
from padfree.cli.on_host import checked_recipe
from padfree.testing.models import save_with_tokenizer
from tests.refused import refused

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def started(script: str, folder: Path, variables: Mapping[str, str]) -> list[str]:
    """The arguments that a script gives to torchrun."""
    program(folder, "torchrun", 'for word in "$@"; do printf "%s\\0" "$word"; done')
    program(folder, "srun", 'exec "$@"')
    program(folder, "scontrol", "echo first; echo second")
    found = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.split("\0")[:-1]


def checked(words: list[str], tmp_path: Path) -> Any:
    """Check the arguments of torchrun and, with a model that is here, the settings of the command."""
    arguments: Any = torch.distributed.run.parse_args(words)
    assert (arguments.module, arguments.training_script) == (True, "padfree")
    command: list[str] = arguments.training_script_args
    model = save_with_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    here = {"model.path": str(model), "data.path": str(tmp_path / "rows.jsonl")}
    names = [word.partition("=")[0] for word in command]
    assert here.keys() <= set(names), "the example names its model and data"
    checked_recipe(
        [f"{name}={here[name]}" if name in here else word for name, word in zip(names, command, strict=True)]
    )
    with refused("parallel.replicated"):
        checked_recipe([word.replace("parallel.replicate=", "parallel.replicated=") for word in command])
    return arguments


def test_every_example_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"torchrun.sh", "slurm.sh", "skypilot.yaml", "kubernetes.yaml"}


def test_skypilot(tmp_path: Path) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task["workdir"] == "."
    variables = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_TASK_ID": "sky-1",
    }
    words = started(task["run"], tmp_path, {**task["envs"], **variables})
    arguments = checked(words, tmp_path)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.max_restarts) == ("2", "8", 3)
    assert (arguments.rdzv_endpoint, arguments.rdzv_id) == ("10.0.0.1:29500", "sky-1")
    (mount,) = task["file_mounts"]
    assert all(task["envs"][name].startswith(f"{mount}/") for name in ("DATA", "RUN"))


def test_kubernetes(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    arguments = checked(container["args"], tmp_path)
    assert int(arguments.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(arguments.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    name, port = arguments.rdzv_endpoint.split(":")
    assert name == f"{job['metadata']['name']}-0.{pod['subdomain']}", "the first pod of an indexed job"
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert [int(port)] == [each["port"] for each in service["spec"]["ports"]]
    seconds = {each["name"]: each["value"] for each in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(seconds) < pod["terminationGracePeriodSeconds"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    shared = next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == "shared")
    given = dict(word.split("=", 1) for word in arguments.training_script_args if "." in word.partition("=")[0])
    assert all(given[name].startswith(f"{shared}/") for name in ("model.path", "data.path", "run.folder"))


SETTINGS = ("sft", "model.path=m", "data.path=d", "run.folder=/shared/runs/first", "parallel.replicate=4")


def test_slurm(tmp_path: Path) -> None:
    script = shlex.join([str(FOLDER / "slurm.sh"), *SETTINGS])
    variables = {"SLURM_JOB_NODELIST": "x", "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    arguments = checked(started(f"bash {script}", tmp_path, variables), tmp_path)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.rdzv_endpoint) == ("4", "8", "first:29500")


# padfree launch --slurm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    rows = tmp_path / "the rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{a}+1=", "response": str(a + 1)}) + "\n" for a in range(4)))
    return [
        *("sft", f"model.path={model}", f"data.path={rows}", f"run.folder={tmp_path / 'run'}"),
        *("run.steps=1", "run.device=cpu", "batch.max_tokens=64"),
    ]


def launch(*options: str, words: list[str]) -> list[str]:
    return ["launch", "--slurm", *options, "--", *words]


def test_the_script_has_the_directives_of_the_example(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.sh"
    options = ("--nodes", "4", "--processes", "8", "--restarts", "3", "--sbatch", "cpus-per-task=64")
    capsys.readouterr()
    assert main(launch(str(path), *options, "--dry-run", words=words)) == 0
    text = capsys.readouterr().out
    assert not path.exists()
    assert main(launch(str(path), *options, words=words)) == 0
    assert capsys.readouterr().out == f"sbatch {path}\n"
    assert path.read_text() == text
    assert main(launch(str(path), *options, words=words)) == 1, "it exists"

    def directives(script: str) -> set[str]:
        return {line for line in script.splitlines() if line.startswith("#SBATCH")}

    assert directives(text) == directives((FOLDER / "slurm.sh").read_text())
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


# [slurm] in a recipe

JOB = """
[slurm]
nodes = 2
processes = 4
restarts = 3
setup = ["export FIRST='1 2'"]

[slurm.sbatch]
time = "24:00:00"
exclusive = ""
"""


@pytest.fixture
def recipe(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with the section `slurm`, outside of a job."""
    for name in ("SLURM_JOB_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    given = dict(word.split("=", 1) for word in words[1:]) | {"batch.samples": "4"}
    sections: dict[str, list[str]] = {}
    for name, value in given.items():
        section, _, setting = name.partition(".")
        shown = value if value.isdecimal() else json.dumps([value] if name == "data.path" else value)
        sections.setdefault(section, []).append(f"{setting} = {shown}")
    path = tmp_path / "my recipe.toml"
    path.write_text("".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items()) + JOB)
    return path


def test_a_recipe_writes_the_script_of_its_job(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sbatch"
    assert main(["sft", str(recipe), "run.seed=3", "--dry-run"]) == 0
    shown, _, dry = capsys.readouterr().out.partition(f"\nbatch script {path}:\n\n")
    assert "layout: 8 processes = " in shown
    assert "WORLD_SIZE" not in os.environ
    assert not path.exists()
    assert main(["sft", str(recipe), "run.seed=3"]) == 0
    assert capsys.readouterr().out == f"the job is described in {path}; submit it with: sbatch {path}\n"
    text = path.read_text()
    assert text == dry
    assert not (tmp_path / "run").exists(), "nothing was trained"
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    assert lines == [
        *("job-name=padfree", "nodes=2", "ntasks-per-node=1", "gpus-per-node=4", "signal=TERM@120", "requeue"),
        *("time=24:00:00", "exclusive"),
    ]
    program(tmp_path, "srun", 'shift 3; echo "$FIRST"; pwd; for word in "$@"; do printf "%s\\0" "$word"; done')
    program(tmp_path, "scontrol", "echo first; echo second")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7"}
    found = subprocess.run(["bash", str(path)], env=variables, cwd="/", capture_output=True, text=True, check=True)
    first, folder, rest = found.stdout.split("\n", 2)
    assert (first, folder) == ("1 2", str(tmp_path))
    arguments: Any = torch.distributed.run.parse_args(rest.split("\0")[:-1])
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.max_restarts) == ("2", "4", 3)
    assert arguments.training_script_args == ["sft", str(recipe), "run.seed=3"]


def test_a_script_is_not_overwritten_by_another(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", str(recipe)]) == 0
    before = (tmp_path / "run.sbatch").read_text()
    assert main(["sft", str(recipe)]) == 0, "the same script"
    capsys.readouterr()
    assert main(["sft", str(recipe), "slurm.nodes=4"]) == 1
    line = f"padfree sft: slurm: {tmp_path / 'run.sbatch'} exists and is another script; remove it, or"
    assert capsys.readouterr().err.startswith(line)
    assert (tmp_path / "run.sbatch").read_text() == before
    assert main(["sft", str(recipe), "run.step=1", "slurm.nodes=4"]) == 1, "settings are checked first"
    assert main(["sft", str(recipe), "run.folder=/dev/null/run"]) == 1
    assert capsys.readouterr().err.count("\n") == 2


def test_a_job_cannot_read_a_recipe_from_a_pipe(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.write(writing, recipe.read_bytes())
    os.close(writing)
    capsys.readouterr()
    assert main(["sft", f"/dev/fd/{reading}"]) == 1
    os.close(reading)
    assert capsys.readouterr().err.startswith(f"padfree sft: config: /dev/fd/{reading} is a FIFO, not a file; give a")
    assert not (tmp_path / "run.sbatch").exists()


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "WORLD_SIZE"])
def test_the_job_itself_trains(
    variable: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    assert main(["sft", str(recipe), "--dry-run"]) == 0
    assert "layout: 1 processes" in (shown := capsys.readouterr().out)
    assert "batch script" not in shown
    if variable == "SLURM_JOB_ID":
        assert main(["sft", str(recipe)]) == 0
        assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert not (tmp_path / "run.sbatch").exists()


def test_options_of_sbatch_replace_the_defaults(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "1", "--processes", "2", "--dry-run"]
    for given in ("job-name=first", "time=24:00:00", "exclusive", "gpus-per-node=h200:2"):
        options += ["--sbatch", given]
    capsys.readouterr()
    assert main(launch("job.sh", *options, words=words)) == 0
    lines = [line.removeprefix("#SBATCH --") for line in capsys.readouterr().out.splitlines() if "#SBATCH" in line]
    assert lines == [
        *("job-name=first", "nodes=1", "ntasks-per-node=1", "gpus-per-node=h200:2", "signal=TERM@120", "requeue"),
        *("time=24:00:00", "exclusive"),
    ]


@pytest.mark.slow
def test_the_script_runs(words: list[str], tmp_path: Path) -> None:
    """With programs that replace srun and scontrol: a real torchrun and a real run."""
    path = tmp_path / "job.sh"
    assert main(launch(str(path), "--nodes", "1", "--processes", "1", words=words)) == 0
    program(tmp_path, "srun", 'exec "$@"')
    program(tmp_path, "scontrol", "echo localhost")
    found = subprocess.run(
        ["bash", str(path)],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "PADFREE_CACHE": str(tmp_path / "cache"),
            "SLURM_JOB_NODELIST": "x",
            "SLURM_JOB_ID": "7",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert sys.executable in path.read_text()


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (["--slurm", "job.sh", "--processes", "8"], "--nodes"),
        (["--slurm", "job.sh", "--nodes", "2"], "--processes"),
        (["--slurm", "job.sh", "--nodes", "0", "--processes", "8"], "--nodes"),
        (["--slurm", "job.sh", "--nodes", "2", "--processes", "8", "--sbatch=--time=1"], "--sbatch"),
        (["--slurm", "job.sh", "--nodes", "2", "--processes", "8", "--folder", "/nowhere"], "--folder"),
        (["--slurm", "job.sh", "--nodes", "2", "--processes", "8", "--address", "a"], "--slurm"),
        (["--slurm", "job.sh", "--hosts", "a"], "--hosts"),
        ([], "--hosts"),
        (["--hosts", "a", "--dry-run"], "--dry-run"),
        (["--slurm", "/nowhere/job.sh", "--nodes", "2", "--processes", "8"], "--slurm"),
    ],
)
def test_refused_options(
    options: list[str],
    setting: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["launch", *options, "--", *words]) == 1
    assert capsys.readouterr().err.startswith(f"padfree launch: {setting}")
    assert not (tmp_path / "job.sh").exists()


def test_wrong_settings_and_commands_write_nothing(words: list[str], tmp_path: Path) -> None:
    options = (str(tmp_path / "job.sh"), "--nodes", "2", "--processes", "8")
    assert main(launch(*options, words=[*words, "run.step=1"])) == 1
    assert main(launch(*options, words=["chat", "x"])) == 1
    assert not (tmp_path / "job.sh").exists()
