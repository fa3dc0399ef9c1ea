"""Sources: unusual files, folders, and data sets of the Hub, with a fake and with the real package."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padfree.data import sources
from padfree.data.folders import left_out_notes
from padfree.data.record_source import RecordSource
from padfree.data.records import RowError
from padfree.data.sources import open_sources, record_of
from padfree.errors import UserError
from tests.refused import refused

ROWS = [{"text": f"row {index}"} for index in range(5)]
COLUMNS = ("text",)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def packs_of(source: RecordSource) -> list[tuple[int, dict[str, Any]]]:
    """All rows with their numbers. Checks that the sizes of the chunks add up to that of the source."""
    chunks = list(source.chunks(COLUMNS))
    assert sum(chunk.size for chunk in chunks) <= source.size
    assert all(chunk.source == source.name for chunk in chunks)
    return [
        (line, record_of(record)) for chunk in chunks for line, record in zip(chunk.numbers, chunk.records, strict=True)
    ]


@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 512])
def test_the_same_rows_from_every_kind_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    import pyarrow

    monkeypatch.setattr(sources, "CHUNK_ROWS", chunk_rows)
    lines = write_lines(tmp_path / "a.jsonl", ROWS)
    listed = tmp_path / "b.json"
    listed.write_text(json.dumps(ROWS, indent=2))
    mislabelled = write_lines(tmp_path / "c.json", ROWS)
    table = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "other": 1} for row in ROWS]), table)
    for path, unit in ((lines, "line"), (listed, "record"), (mislabelled, "line"), (table, "row")):
        (source,) = open_sources(path)
        assert source.unit == unit
        assert source.columns() == (["text", "other"] if unit == "row" else ["text"])
        assert packs_of(source) == list(enumerate(ROWS, start=1))
        assert sum(chunk.size for chunk in source.chunks(COLUMNS)) == source.size
        assert max(len(chunk.numbers) for chunk in source.chunks(COLUMNS)) == min(chunk_rows, 5)


@pytest.mark.parametrize(
    ("content", "numbers"),
    [
        (b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n', [1, 2]),
        (b'{"text": "a"}\r\n{"text": "b"}\r\n', [1, 2]),
        (b'{"text": "a"}\n{"text": "b"}', [1, 2]),
        (b'\n{"text": "a"}\n\n \t\r\n{"text": "b"}\n\n\n', [2, 5]),
        (b'\xef\xbb\xbf\n{"text": "a"}\n{"text": "b"}\n', [2, 3]),
    ],
    ids=["byte order mark", "carriage returns", "no last newline", "blank lines", "mark alone on its line"],
)
def test_odd_json_lines(tmp_path: Path, content: bytes, numbers: list[int]) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    (source,) = open_sources(tmp_path / "a.jsonl")
    assert source.columns() == ["text"]
    assert packs_of(source) == list(zip(numbers, [{"text": "a"}, {"text": "b"}], strict=True))


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    row = {"text": "one\u2028two\u0085three"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (source,) = open_sources(tmp_path / "a.jsonl")
    assert packs_of(source) == [(1, row)]


def test_a_chunk_ends_at_its_size_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 30)
    (source,) = open_sources(write_lines(tmp_path / "a.jsonl", ROWS))
    assert [chunk.numbers for chunk in source.chunks(COLUMNS)] == [[1, 2], [3, 4], [5]]


def test_files_without_rows(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", b""), ("b.jsonl", b"\n\n"), ("c.json", b"[]"), ("d.jsonl", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(content)
        (source,) = open_sources(tmp_path / name)
        assert source.columns() is None
        assert packs_of(source) == []


def test_columns_come_from_the_first_row_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'oops\n[1]\n{"text": "a"}\n')
    (source,) = open_sources(tmp_path / "a.jsonl")
    assert source.columns() == ["text"]
    with pytest.raises(RowError, match="not valid JSON"):
        packs_of(source)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[{]", r"a\.json: is not valid JSON in UTF-8 \(.*\); give one list of objects"),
        (b'["\xff"]', r"a\.json: is not valid JSON in UTF-8"),
        (b'[{"a": 1}, {"b": {"c": 1, "c": 2}}]', r"a\.json: an object has the key 'c' twice; .*; correct the file"),
        (b"", r"a\.json: is not valid JSON in UTF-8"),
        (b'"text"', r"a\.json: holds 'text', not a list of objects; give one list of objects"),
    ],
)
def test_json_that_is_no_list_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    (source,) = open_sources(tmp_path / "a.json")
    with pytest.raises(ValueError, match=words):
        source.columns()


def test_records_that_are_no_objects_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, 7]')
    (source,) = open_sources(tmp_path / "a.json")
    with pytest.raises(RowError, match="the row is 7; expected a JSON object"):
        packs_of(source)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl", "a/b/c.json", ".hidden/x.jsonl", "a/.cache/y.jsonl", ".x.jsonl"):
        write_lines(tmp_path / name, ROWS)
    (tmp_path / "README.md").write_text("not data")
    found = open_sources(tmp_path)
    assert [source.name for source in found] == ["a/b/c.json", "a/z.jsonl", "b.jsonl"]
    assert [source.name for source in open_sources(tmp_path / "a")] == ["b/c.json", "z.jsonl"]
    (tmp_path / "a" / "z.jsonl").unlink()
    assert [source.name for source in open_sources(tmp_path / "a")] == ["b/c.json"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_suffixes_may_be_in_upper_case(suffix: str, tmp_path: Path) -> None:
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.PARQUET")
    else:
        (tmp_path / f"a{suffix.upper()}").write_text(json.dumps(ROWS) if suffix == ".json" else json.dumps(ROWS[0]))
    for given in (tmp_path, tmp_path / f"a{suffix.upper()}"):
        assert packs_of(open_sources(given)[0])[0] == (1, ROWS[0])
    with refused("data", r"b\.JSONL does not exist"):
        open_sources("b.JSONL")


def test_links_to_folders_are_followed_and_no_folder_is_read_twice(tmp_path: Path) -> None:
    folder, other = tmp_path / "data", tmp_path / "other"
    for path in (folder / "a.jsonl", folder / "b" / "c.jsonl", other / "d" / "e.jsonl"):
        write_lines(path, ROWS)
    (folder / "link").symlink_to(other)
    assert [source.name for source in open_sources(folder)] == ["a.jsonl", "b/c.jsonl", "link/d/e.jsonl"]
    assert left_out_notes([str(folder)]) == ()
    (other / "loop").symlink_to(folder)
    (folder / "z").symlink_to(folder / "b")
    assert [source.name for source in open_sources(folder)] == ["a.jsonl", "b/c.jsonl", "link/d/e.jsonl"]
    assert left_out_notes([str(folder)]) == (f"data: 2 files of {folder} are left out: link/loop, z",)


def test_files_that_a_folder_leaves_out_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    names = ["b.jsonl.gz", "c.csv", "d.jsonl.zst", "e.arrow", "f.txt", "sub/g.gz", "sub/noext"]
    for name in (*names, ".h.csv", ".git/i.csv"):
        write_lines(tmp_path / name, ROWS)
    (note,) = left_out_notes([str(tmp_path), str(tmp_path / "a.jsonl"), "openai/gsm8k"])
    assert note == f"data: 7 files of {tmp_path} are left out: {', '.join(names[:5])} and 2 more"
    (tmp_path / "a.jsonl").unlink()
    with refused("data", r".*has no .jsonl, .json, .parquet file \(it has b\.jsonl\.gz, c\.csv,"):
        open_sources(tmp_path)


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "closed" / "b.jsonl", ROWS)
    scan = os.scandir

    def denied(path: Any) -> Any:  # the tests may run as root, who may read everything
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with refused("data", r"the folder .*closed cannot be read \(Permission denied\)"):
        open_sources(tmp_path)


def test_files_are_named_from_their_common_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one/train.jsonl", "two/train.jsonl"):
        write_lines(tmp_path / name, ROWS)
    monkeypatch.chdir(tmp_path)
    relative = open_sources(["two/train.jsonl", Path("one/train.jsonl")])
    assert [source.name for source in relative] == ["two/train.jsonl", "one/train.jsonl"]
    assert [source.name for source in open_sources(tmp_path / "one" / "train.jsonl")] == ["train.jsonl"]
    assert [source.name for source in open_sources([tmp_path / "one", tmp_path / "two"])] == [
        "one/train.jsonl",
        "two/train.jsonl",
    ]
    with pytest.raises(ValueError, match=r"train\.jsonl is given twice; give each file once"):
        open_sources(["one/train.jsonl", tmp_path / "one"])


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all, by any means")
    with pytest.raises(ValueError, match=r"a\.parquet: is not a valid Parquet file .*; replace or remove the file"):
        open_sources(tmp_path / "a.parquet")[0].columns()


def _parquet(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    arrays = [pyarrow.array(values) if isinstance(values, list) else values for values in columns.values()]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=[name.strip() for name in columns]), path)
    return path


def _unreadable(kind: str) -> Any:
    """A column of three values, of which Python cannot represent the second."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    if kind == "text":
        return pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    moments = pyarrow.array([0, 2**62, 1], pyarrow.int64()).cast(pyarrow.timestamp("us"), safe=False)
    inside = pyarrow.StructArray.from_arrays([moments], names=["at"])
    return {"moment": moments, "list": pyarrow.ListArray.from_arrays([0, 1, 2, 3], moments), "object": inside}[kind]


@pytest.mark.parametrize("kind", ["text", "moment", "list", "object"])
def test_a_value_that_python_cannot_represent_is_a_bad_row_if_its_column_is_used(tmp_path: Path, kind: str) -> None:
    values = _unreadable(kind)
    for start in (0, 1):  # also as the first row
        own = values[start:]
        path = _parquet(tmp_path / "a.parquet", {"text": ["x"] * len(own), "other": own})
        (source,) = open_sources(path)
        assert source.columns() == ["text", "other"]
        assert [row for _, row in packs_of(source)] == [{"text": "x"}] * len(own)
        (chunk,) = source.chunks(("text", "other"))
        bad = [isinstance(record, RowError) for record in chunk.records]
        assert bad == [index == 1 - start for index in range(len(own))]
        with pytest.raises(RowError, match=r"^'other' cannot be read"):
            record_of(chunk.records[bad.index(True)])


def test_a_parquet_file_with_damaged_pages_is_refused(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "a.parquet", {"text": [f"{index}" for index in range(5000)], "other": [1] * 5000})
    content = bytearray(path.read_bytes())
    content[4:2000] = b"\xff" * 1996
    path.write_bytes(content)
    (source,) = open_sources(path)
    assert source.columns() == ["text", "other"]
    with refused("a.parquet", "is damaged .*; write the file again, or remove it"):
        packs_of(source)
    assert len(list(source.chunks(("other",)))) == 10  # the damaged column is not read


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "a.parquet", {"text": ["a"], "text ": ["b"]})
    with refused("a.parquet", "has 2 columns named 'text'; rename or remove one of them"):
        open_sources(path)[0].columns()


def test_missing_packages_are_named_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"a\.parquet is Parquet, but the package pyarrow is not installed; pip install pyarrow"
    ):
        open_sources(tmp_path / "a.parquet")[0].columns()
    with pytest.raises(
        ValueError,
        match=r"openai/gsm8k is not a local path, so it is read as a Hub id, but the package datasets is not",
    ):
        open_sources("openai/gsm8k")


class StandInDataset:
    """A fake of `datasets.Dataset` with the methods that padfree uses."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.table = columns
        self.column_names = list(columns)
        self.data = types.SimpleNamespace(nbytes=1000)
        self._fingerprint = "f1"

    def __len__(self) -> int:
        return len(next(iter(self.table.values())))

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {name: values[rows] for name, values in self.table.items()}

    def select_columns(self, names: list[str]) -> StandInDataset:
        return StandInDataset({name: self.table[name] for name in names})


def test_a_hub_id_is_loaded_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> StandInDataset:
        asked.append((name, subset, split))
        if name == "openai/absent":
            raise FileNotFoundError("Dataset 'openai/absent' doesn't exist\nmore lines")
        return StandInDataset({"text": [row["text"] for row in ROWS], "image": [None] * 5})

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(sources, "CHUNK_ROWS", 2)
    monkeypatch.setattr(sources, "check_name", lambda name, setting, kind: None)
    (source,) = open_sources("openai/gsm8k", split="test", subset="main")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert (source.name, source.unit, source.digest()) == ("openai/gsm8k/main/test", "row", "f1")
    assert source.columns() == ["text", "image"]
    assert packs_of(source) == list(enumerate(ROWS, start=1))
    assert sum(chunk.size for chunk in source.chunks(COLUMNS)) == 1000
    with pytest.raises(
        ValueError, match=r"openai/absent .*cannot be loaded from the Hub \(Dataset '.*exist\); correct"
    ):
        open_sources("openai/absent")


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(str(tmp_path / "many"))
    (one,) = open_sources(tmp_path / "one")
    assert one.name == "one"
    assert packs_of(one) == list(enumerate(ROWS, start=1))
    assert one.digest() == open_sources(tmp_path / "one")[0].digest()
    (test,) = open_sources(tmp_path / "many", split="test")
    assert test.name == "many/test"
    assert packs_of(test) == [(1, ROWS[1])]
    assert test.digest() != one.digest()
    with pytest.raises(ValueError, match=r"split: 'dev' is not a split of .*many; set it to one of train, test"):
        open_sources(tmp_path / "many", split="dev")


@pytest.mark.parametrize("damage", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"cut"])
def test_a_damaged_folder_of_datasets_is_refused(tmp_path: Path, damage: str, content: bytes | None) -> None:
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "many"))
    for path in (folder, tmp_path / "many" / "train"):
        (path / damage).unlink()
        if content is not None:
            (path / damage).write_bytes(content)
    if (damage, content) == ("dataset_info.json", b"{}"):  # datasets takes the columns from the Arrow file
        assert len(packs_of(open_sources(folder)[0])) == len(ROWS)
        return
    with pytest.raises(UserError):
        packs_of(open_sources(folder)[0])
    with refused("data", r".*many is not a complete data set of save_to_disk"):
        open_sources(tmp_path / "many")


def test_a_damaged_image_of_a_hub_data_set_is_a_bad_row(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    rows = [{"text": "a", "image": {"bytes": b"no image", "path": None}}] * 2
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "one"))
    (source,) = open_sources(tmp_path / "one")
    assert source.columns() == ["text", "image"]
    assert packs_of(source) == [(1, {"text": "a"}), (2, {"text": "a"})]
    (chunk,) = source.chunks(("text", "image"))
    assert chunk.numbers == [1, 2]
    with pytest.raises(RowError, match=r"^cannot be read"):
        record_of(chunk.records[1])


# Inputs that must not hang, and files that are not data


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with contextlib.chdir(path.parent):  # the name of a socket is short
        server = socket.socket(socket.AF_UNIX)
        server.bind(path.name)
        server.close()


def _link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(_fifo, "a FIFO"), (_socket, "a socket"), (_link_to_device, "a device"), (_link_to_fifo, "a FIFO")],
)
def test_what_may_never_end_is_refused_before_it_is_opened(
    make: Callable[[Path], None], kind: str, suffix: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / f"a{suffix}"
    make(path)
    for given in (path, folder, [folder, path]):
        with refused("data", f".*a{suffix} is {kind}, not a file"):
            open_sources(given)


def test_a_device_by_its_own_name_is_refused() -> None:
    for name in ("/dev/zero", "/dev/null"):
        with refused("data", f"{name} has the suffix '', which is not supported;"):
            open_sources(name)


def test_a_broken_link_in_a_folder_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with refused("data", r".*a\.jsonl cannot be read \(No such file or directory\)"):
        open_sources(tmp_path)


def test_a_name_that_is_not_utf_8_is_refused_in_one_line(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    try:
        with open(raw, "wb") as file:
            file.write(b'{"text": "a"}\n')
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    for given in (tmp_path, os.fsdecode(raw)):
        with refused("data", r"the name of '.*caf\\udce9\.jsonl' is not UTF-8") as caught:
            open_sources(given)
        str(caught.value).encode("ascii")


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LINE_BYTES", 64)
    write_lines(tmp_path / "a.jsonl", [{"text": "short"}])
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.truncate(1 << 40)  # sparse: a terabyte of zeros
    (source,) = open_sources(tmp_path / "a.jsonl")
    with refused("data", r"a\.jsonl line 2 has 64 bytes or more"):
        list(source.chunks(COLUMNS))


def test_rows_nested_too_deeply_are_bad_rows() -> None:
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}"):
        with contextlib.suppress(RowError):  # the last one may be read, depending on Python's limit
            record_of(text)
    with pytest.raises(RowError, match="nested too deeply"):
        record_of(b'{"a":' * 100_000)
