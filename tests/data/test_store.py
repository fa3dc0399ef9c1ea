"""The token cache: inputs of its key, atomic creation, and locking."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from padfree.data.array_files import ArrayWriter, open_array
from padfree.data.records import SkippedRow
from padfree.data.sources import open_sources
from padfree.data.store import (
    Writer,
    content_digest,
    default_cache_folder,
    find_or_build,
    read_metadata,
    read_skipped,
    tokenizer_digest,
)
from padfree.testing.tokenizers import CharacterTokenizer, tiny_tokenizer
from tests.refused import refused


def test_an_array_grows_and_keeps_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    parts = [np.arange(6).reshape(3, 2), np.empty((0, 2), dtype=np.int64), np.arange(4000).reshape(2000, 2)]
    writer = ArrayWriter(path, np.dtype(np.int64), (2,))
    for part in parts:
        writer.append(part)
    writer.finish()
    writer.close()
    assert np.array_equal(np.load(path), np.concatenate(parts))
    assert np.load(path, mmap_mode="r").shape == (2003, 2)


def test_a_folder_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    skipped = SkippedRow(file="é", line=2, reason="no 'text'")
    with Writer(tmp_path) as writer:
        lengths = np.array([2, 3], dtype=np.int64)
        lines = np.array([1, 3], dtype=np.int64)
        writer.append(np.arange(5, dtype=np.int32), np.array([0, 1, 0, 1, 1], dtype=np.bool_), lengths, 0, lines)
        writer.append(np.array([9], dtype=np.int32), np.array([True]), lengths[:1] - 1, 1, lines[:1])
        writer.skipped.append(skipped)
        writer.finish({"files": ["é", "b"]})
    metadata = read_metadata(tmp_path)
    assert (metadata["samples"], metadata["tokens"], metadata["files"]) == (3, 6, ["é", "b"])
    assert open_array(tmp_path, "tokens", (6,)).tolist() == [0, 1, 2, 3, 4, 9]
    assert open_array(tmp_path, "mask", (6,)).tolist() == [False, True, False, True, True, True]
    assert open_array(tmp_path, "offsets", (4,)).tolist() == [0, 2, 5, 6]
    assert open_array(tmp_path, "rows", (3, 2)).tolist() == [[0, 1], [0, 3], [1, 1]]
    assert read_skipped(tmp_path) == [skipped]


def test_damage_is_named_with_the_cure(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.int32))
    with pytest.raises(ValueError, match=r"tokens\.npy has shape \(100,\), not \(99,\); delete"):
        open_array(tmp_path, "tokens", (99,))
    os.truncate(tmp_path / "tokens.npy", 200)
    with pytest.raises(ValueError, match=r"tokens\.npy is damaged .*; delete .*, and the next run rebuilds it"):
        open_array(tmp_path, "tokens", (100,))
    with pytest.raises(ValueError, match=r"mask\.npy is damaged"):
        open_array(tmp_path, "mask", (100,))
    with pytest.raises(ValueError, match=r"has no metadata\.json; delete "):
        read_metadata(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="has format 0, but this version reads format 2; delete"):
        read_metadata(tmp_path)


def test_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    built: list[Path] = []
    found: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "a").write_text("half")
        time.sleep(0.2)
        (folder / "a").write_text("whole")

    def want() -> None:
        folder = find_or_build(tmp_path / "cache", "key", build)
        assert (folder / "a").read_text() == "whole"
        found.append(folder)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "cache" / "key"] * 4
    assert len(built) == 1


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise ValueError("no rows")

    for _ in range(2):
        with pytest.raises(ValueError, match="no rows"):
            find_or_build(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []

    def full(folder: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        find_or_build(tmp_path, "key", full)


def test_who_comes_second_without_a_lock_takes_what_is_there(tmp_path: Path) -> None:
    def overtaken(folder: Path) -> None:
        (folder / "a").write_text("mine")
        (tmp_path / "key").mkdir()
        (tmp_path / "key" / "a").write_text("theirs")

    folder = find_or_build(tmp_path, "key", overtaken)
    assert (folder / "a").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["key"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("cache", r".*file/cache cannot be written \(Not a directory\)"):
        find_or_build(tmp_path / "file" / "cache", "key", lambda folder: None)


def test_the_content_is_hashed_again_only_when_the_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    cache = tmp_path / "cache"

    def digest() -> str:
        return content_digest(open_sources(path)[0], cache)

    first = digest()
    assert not cache.exists(), "a file changed a moment ago may change again unseen"
    later = time.time_ns() + 10**10
    monkeypatch.setattr("padfree.data.store.time.time_ns", lambda: later)
    assert digest() == first
    with monkeypatch.context() as patch:
        patch.setattr("padfree.data.sources.FileSource.digest", lambda self: pytest.fail("read again"))
        assert digest() == first
    path.write_text("two")
    second = digest()
    assert second != first
    path.write_text("one")
    assert digest() == first


def test_the_digest_of_a_tokenizer_follows_all_that_changes_its_tokens() -> None:
    base = tokenizer_digest(tiny_tokenizer("chatml"))
    assert tokenizer_digest(tiny_tokenizer("chatml")) == base
    used = tiny_tokenizer("chatml")
    used(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(used) == base
    added = tiny_tokenizer("chatml")
    added.add_tokens(["Natalia"])
    others = [
        added,
        tiny_tokenizer("chatml_marked"),
        tiny_tokenizer("chatml", kind="bos"),
        tiny_tokenizer("chatml", kind="metaspace"),
        tiny_tokenizer("chatml", eos_token="<s>"),
        CharacterTokenizer(),
        CharacterTokenizer("abc"),
    ]
    digests = [base, *map(tokenizer_digest, others)]
    assert len(set(digests)) == len(digests)
    assert tokenizer_digest(CharacterTokenizer()) == tokenizer_digest(CharacterTokenizer())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", "/x/y")
    assert default_cache_folder() == Path("/x/y")
    monkeypatch.setenv("PADFREE_CACHE", "~/y")
    assert default_cache_folder() == Path.home() / "y"
    monkeypatch.delenv("PADFREE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/z")
    assert default_cache_folder() == Path("/x/z/padfree")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_folder() == Path.home() / ".cache" / "padfree"


def test_a_digest_that_is_damaged_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text("one")
    later = time.time_ns() + 10**10
    monkeypatch.setattr("padfree.data.store.time.time_ns", lambda: later)
    right = content_digest(open_sources(path)[0], cache)
    (remembered,) = (cache / "digests").iterdir()
    assert remembered.read_text() == right
    remembered.write_bytes(b"")
    assert content_digest(open_sources(path)[0], cache) == right
    assert remembered.read_text() == right
