"""Extreme values for every setting, and special files: each is accepted or refused by name."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
from pathlib import Path

import pytest

from padfree.cli.flags import setting_names
from padfree.config import Config, load_config
from padfree.config.hub import check_name
from padfree.config.inputs import check_regular
from padfree.config.output_sections import check_folder, check_output
from padfree.config.reader import LARGEST_COUNT
from padfree.estimate.cost_file import read_cost
from padfree.record.run_folder import check_run_folder
from padfree.tasks.reading import read_template
from tests.refused import refused

RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"
HOSTILE = [
    *("inf", "-inf", "nan", "1e308", "-1e308", "1e-320", "-0.0", "0", "-1", "0.0", "1e400", "1" + "0" * 400),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "9007199254740991", "9007199254740992"),
    *("4294967296", "0x7fffffffffffffff", "true", "''", "'x'", "[]", "{}", "[inf]", "[nan, nan]", "[[[]]]", "1_0"),
    *("[9223372036854775808]", "2024-01-01", "'" + "x" * 5000 + "'", '"\\u0000"', "'\n'", "{a={b={}}}", "none", "null"),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "rl-local"])
def test_every_setting_with_every_hostile_value(recipe: str) -> None:
    accepted = 0
    for name in setting_names(Config):
        for value in HOSTILE:
            try:
                config = load_config(RECIPES / f"{recipe}.toml", [f"{name}={value}"])
            except ValueError as error:
                line = str(error)
                assert "\n" not in line, (name, value)
                assert len(line) < 900, (name, value)
                assert line.partition(":")[0].partition(".")[0] in config_sections(), (name, value, line)
            else:
                accepted += 1
                found: object = config
                for part in name.split("."):
                    found = getattr(found, part)
                for number in found if isinstance(found, tuple) else (found,):
                    assert not isinstance(number, float) or number > -math.inf, (name, value)  # nor NaN
                    assert not isinstance(number, int) or name == "run.seed" or abs(number) <= LARGEST_COUNT
    assert accepted > 100, "zeros, ones and names are right in many places"


def config_sections() -> set[str]:
    return {name.partition(".")[0] for name in setting_names(Config)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbfmodel.path = 'm'\r\n", None),
        ("model.path = 'm'".encode("utf-16"), r"is UTF-16; save it as UTF-8$"),
        (b"model.path = 'm'\nmodel.path = 'n'\n", "is not TOML: Cannot overwrite a value"),
        (b"model.path = 'm\0'\n", "is not TOML: "),
        (b"model.path = '\xff'\n", "is not TOML: "),
        (b"#" * ((1 << 20) + 1), "has more than 1,048,576 bytes"),
        (b"a = " + b"[" * 100_000, "nested too deeply|is not TOML"),
    ],
)
def test_recipes(content: bytes, message: str | None, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    needed = ["data.path=d", "batch.samples=1", "batch.max_tokens=1", "run.folder=r"]
    if message is None:
        assert load_config(path, needed).model.path == "m"
        return
    with pytest.raises(ValueError, match=message) as error:
        load_config(path, needed)
    assert str(error.value).startswith(f"config: {path} ")
    assert "\n" not in str(error.value)


@pytest.fixture(params=["fifo", "socket", "device"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What can be opened and never read to its end."""
    if request.param == "device":
        return Path("/dev/zero")
    path = tmp_path / "special"
    if request.param == "fifo":
        os.mkfifo(path)
    else:
        here = os.getcwd()
        os.chdir(tmp_path)  # a socket's name is short
        try:
            socket.socket(socket.AF_UNIX).bind("special")
        finally:
            os.chdir(here)
    return path


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nothing_is_waited_for(special: Path, tmp_path: Path) -> None:
    for check in (
        lambda: load_config(special),
        lambda: read_cost(special),
        lambda: check_name(str(special), "model.path"),
        lambda: check_regular(special, "data.chat_template"),
        lambda: check_output(special, "--json"),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]*: [^\n]* is a (FIFO|socket|device)[^\n]*$"):
            check()
    if special.parent == tmp_path:
        with refused("model.path", ".*special is a .*"):
            check_name(str(tmp_path), "model.path")


def test_a_shells_substitution_is_a_recipe() -> None:
    read, write = os.pipe()
    text = (RECIPES / "sft.toml").read_bytes()
    writer = threading.Thread(target=lambda: (os.write(write, text), os.close(write)))
    writer.start()
    assert load_config(f"/dev/fd/{read}").run.folder == "runs/sft"
    writer.join()
    with refused("data.chat_template", f"/dev/fd/{read} is a FIFO, not a file"):
        read_template(f"/dev/fd/{read}")  # which is read for each source, and again on resume
    os.close(read)
    check_output(os.devnull, "--json")


def test_a_folder_that_cannot_be_listed_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str | Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    for setting, read in (("config", load_config), ("batch.cost", read_cost), ("data.chat_template", read_template)):
        with refused(setting):
            read(str(tmp_path))


def config_of(folder: Path | str) -> Config:
    return load_config(RECIPES / "sft.toml", [f"run.folder={str(folder)!r}"])


def test_run_folders_that_cannot_be(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    fifo = tmp_path / "run"
    fifo.mkdir()
    os.mkfifo(fifo / "run.json")
    file = tmp_path / "file"
    file.write_text("")
    for folder in (
        tmp_path / ("x" * 300),
        tmp_path / ("y/" * 3000),
        loop,
        loop / "below",
        fifo,
        file,
        Path("/dev/null"),
    ):
        with refused("run.folder", r"[^\n]*"):
            check_run_folder(config_of(folder))
    for folder in (tmp_path / ("x" * 300), loop, file / "below"):
        with refused("run.folder", r"[^\n]*"):
            check_folder(folder, "run.folder")
    check_run_folder(config_of(tmp_path / "new"))


def test_undecodable_bytes_in_a_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.json", "config.json"):
        (run / name).write_bytes(b"\xff\xfe\x00")
        with refused("run.folder", r"[^\n]*"):
            check_run_folder(config_of(run))
        (run / name).unlink()
    (run / os.fsdecode(b"odd-\xff")).write_text("")
    with refused("run.folder", r"[^\n]*"):
        check_run_folder(config_of(run))
