"""Conversations with images as data: tokens, masks, the token cache, and the inputs of the tower."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.data import TokenizedDataset, load_pairs, load_sft
from padfree.data.image_processor import load_processor
from padfree.sample import Sample
from padfree.testing.vision_folders import KINDS, drawn, encoded
from tests.data.vision import (
    asked,
    images_of,
    model_folder,
    picture,
    settings_of,
    tokenizer_of,
    write_images,
    write_rows,
)
from tests.ranks import rank_server
from tests.refused import refused

pytest.importorskip("PIL")

ONE_IMAGE = ("llava_onevision",)


def rows_for(name: str) -> list[dict[str, Any]]:
    """Rows with images at the beginning, in the middle and at the end of messages, in several turns, and without."""
    rows: list[dict[str, Any]] = [
        {"messages": asked(picture("0.png"), "What is two?")},
        {"messages": asked("Look: ", picture("1.png"), "  and say\n")},
        {"messages": asked("Hello there!")},
        {"messages": [{"role": "system", "content": "Short."}, *asked("At the end ", picture("2.png"))]},
    ]
    if name not in ONE_IMAGE:
        rows.append({"messages": [*asked(picture("1.png"), picture("2.png")), *asked("then", picture("0.png"))]})
    return rows


def load(folder: Path, rows: list[dict[str, Any]], name: str = "qwen3_vl", **settings: Any) -> TokenizedDataset:
    write_images(folder)
    path = write_rows(folder / "train.jsonl", rows)
    return load_sft(path, tokenizer_of(name), settings_of(name, **settings), cache=folder / "cache", num_workers=0)


def by_processor(name: str, folder: Path, messages: list[dict[str, Any]]) -> Any:
    """What the model's own processor makes of a conversation."""
    processor = load_processor(str(model_folder(name)))
    found = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        paths = [
            {"type": "image", "path": str(folder / part["image"])} if part["type"] == "image" else part
            for part in parts
        ]
        found.append({**message, "content": paths})
    return processor.apply_chat_template(found, tokenize=True, return_dict=True, return_tensors="np")


@pytest.mark.parametrize("name", KINDS)
def test_tokens_and_pixels_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    rows = rows_for(name)
    data = load(tmp_path, rows, name)
    assert len(data) == len(rows)
    for row, sample in zip(rows, data, strict=True):
        expected = by_processor(name, tmp_path, row["messages"])
        np.testing.assert_array_equal(sample.tokens, np.asarray(expected["input_ids"])[0])
        loaded = [image.load() for image in sample.images]
        assert len(loaded) == sum(part["type"] == "image" for part in _parts(row["messages"]))
        if loaded:
            _same_pixels(name, loaded, expected)


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for message in messages if isinstance(message["content"], list) for part in message["content"]]


def _same_pixels(name: str, loaded: list[Any], expected: Any) -> None:
    for key in images_of(name).inputs:
        if key not in expected:  # a mask of ones
            assert all(inputs[key].all() for inputs in loaded)
            continue
        given = np.asarray(expected[key])
        shape = loaded[0][key].shape[1:]
        mine = np.concatenate([inputs[key] for inputs in loaded])
        given = given.reshape(-1, *shape)
        if name == "idefics3" and len(given) > len(mine):  # images of a sample are padded to the same number of tiles
            given = given[np.abs(given).reshape(len(given), -1).any(1)]
        np.testing.assert_array_equal(mine, given)


def test_masks_are_exact_to_the_token(tmp_path: Path) -> None:
    """Exactly the answers and their end tokens are trained, whatever the number of image tokens before them."""
    rows = rows_for("qwen3_vl")
    tokenizer = tokenizer_of()
    for sample, row in zip(load(tmp_path, rows), rows, strict=True):
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        borders = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask.astype(int), [0]]))).reshape(-1, 2)
        texts = [tokenizer.decode(sample.tokens[a:b]) for a, b in borders.tolist()]
        assert texts == [f"{answer}<|im_end|>" for answer in answers]
        placeholder = images_of().placeholder
        assert not sample.mask[sample.tokens == placeholder].any()
        counts = [len(image.positions) for image in sample.images]
        assert sum(counts) == int((sample.tokens == placeholder).sum())


def test_turns_apart_show_the_images_of_their_messages(tmp_path: Path) -> None:
    rows = [rows_for("qwen3_vl")[-1]]
    data = load(tmp_path, rows, turns="apart")
    assert [len(sample.images) for sample in data] == [2, 3]
    (tmp_path / "again").mkdir()
    together = load(tmp_path / "again", rows)
    np.testing.assert_array_equal(data[1].tokens, together[0].tokens)


@pytest.mark.parametrize("kind", ["path", "uri", "bytes in Parquet", "column of objects in Parquet", "one column"])
def test_all_ways_to_store_an_image_give_the_same_sample(kind: str, tmp_path: Path) -> None:
    import base64

    content = encoded(drawn(0, 20, 16))
    (tmp_path / "own.png").write_bytes(content)
    expected = load(tmp_path, [{"messages": asked(picture("own.png"), "Hello")}])[0]
    path = tmp_path / "rows.jsonl"
    if kind == "path":
        write_rows(path, [{"messages": asked("<image>Hello"), "images": ["own.png"]}])
    elif kind == "uri":
        uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        part = {"type": "image_url", "image_url": {"url": uri}}
        write_rows(path, [{"messages": asked(part, "Hello")}])
    elif kind == "one column":
        write_rows(path, [{"prompt": "Hello", "response": "Four, I think.", "image": "own.png"}])
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "rows.parquet"
        messages = [{"role": "user", "content": "<image>Hello"}, {"role": "assistant", "content": "Four, I think."}]
        images: list[Any] = [content] if kind == "bytes in Parquet" else [{"bytes": content, "path": "x.png"}]
        parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages, "images": images}]), path)
    found = load_sft(path, tokenizer_of(), settings_of(), cache=tmp_path / "cache", num_workers=0)[0]
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.mask, expected.mask)
    assert [image.digest for image in found.images] == [image.digest for image in expected.images]
    for name, array in expected.images[0].load().items():
        np.testing.assert_array_equal(found.images[0].load()[name], array)
    assert found.rotary_positions is not None
    np.testing.assert_array_equal(found.rotary_positions, expected.rotary_positions)


def test_images_in_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    write_images(tmp_path / "pictures")
    path = write_rows(tmp_path / "train.jsonl", [{"messages": asked(picture("0.png"), "Hello")}])
    settings = settings_of("qwen3_vl", f"data.image_folder={tmp_path / 'pictures'}")
    assert len(load_sft(path, tokenizer_of(), settings, cache=tmp_path / "cache", num_workers=0)[0].images) == 1


def test_equal_paths_in_two_folders_are_two_data_sets(tmp_path: Path) -> None:
    """The cache of one folder must not serve the other, although the rows are equal."""
    digests = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        drawn(number, 16, 16).save(folder / "a.png")
        path = write_rows(folder / "train.jsonl", [{"messages": asked(picture("a.png"), "Hello")}])
        data = load_sft(path, tokenizer_of(), settings_of(), cache=tmp_path / "cache", num_workers=0)
        digests.append((data[0].images[0].digest, data.digest))
    assert digests[0] != digests[1]


def test_a_changed_image_is_read_again_and_changes_the_digest(tmp_path: Path) -> None:
    rows = [{"messages": asked(picture("0.png"), "Hello")}]
    before = load(tmp_path, rows)
    drawn(9, 40, 40).save(tmp_path / "0.png")
    path = tmp_path / "train.jsonl"
    after = load_sft(path, tokenizer_of(), settings_of(), cache=tmp_path / "cache", num_workers=0)
    assert len(after[0]) > 28 >= len(before.lengths)
    assert before.digest != after.digest


def test_an_image_that_changes_during_a_run_is_refused(tmp_path: Path) -> None:
    data = load(tmp_path, [{"messages": asked(picture("0.png"), "Hello")}])
    image = data[0].images[0]
    drawn(9, 20, 16).save(tmp_path / "0.png")
    with refused("data", "has changed"):
        image.load()
    (tmp_path / "0.png").unlink()
    with refused("data", "does not exist"):
        image.load()


def test_a_touched_image_keeps_the_digest(tmp_path: Path) -> None:
    import os

    rows = [{"messages": asked(picture("0.png"), "Hello")}]
    before = load(tmp_path, rows)
    os.utime(tmp_path / "0.png", (1, 1))
    after = load_sft(tmp_path / "train.jsonl", tokenizer_of(), settings_of(), cache=tmp_path / "cache", num_workers=0)
    assert before.digest == after.digest


def test_no_pixels_are_stored(tmp_path: Path) -> None:
    """An image that many rows show is stored once: as a path or, without a file, as its encoded bytes."""
    drawn(3, 300, 200).save(tmp_path / "large.png")
    data = load(tmp_path, [{"messages": asked(picture("large.png"), f"Hello {n}")} for n in range(20)])
    size = sum(file.stat().st_size for file in data.folder.iterdir() if file.name.startswith("image_"))
    assert size < 2000
    assert len({sample.images[0].digest for sample in data}) == 1


def test_data_sets_are_pickled_by_name(tmp_path: Path) -> None:
    data = load(tmp_path, rows_for("qwen3_vl"))
    written = pickle.dumps(data)
    assert len(written) < 4000
    again = pickle.loads(written)
    for one, other in zip(data, again, strict=True):
        assert [image.digest for image in one.images] == [image.digest for image in other.images]
        for image, same in zip(one.images, other.images, strict=True):
            np.testing.assert_array_equal(image.load()["pixel_values"], same.load()["pixel_values"])


def test_worker_processes_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = rank_server()  # starts processes quickly; they do the same as freshly spawned ones
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: server)
    alone = load(tmp_path, rows_for("qwen3_vl") * 3)
    path = tmp_path / "train.jsonl"
    spread = load_sft(path, tokenizer_of(), settings_of(), cache=tmp_path / "other", num_workers=2)
    assert alone.digest == spread.digest


def test_truncation_never_cuts_an_image(tmp_path: Path) -> None:
    first, second = asked("Hello", answer="half"), asked(picture("1.png"), "What?")
    rows = [{"messages": [*first, *second]}]
    whole = load(tmp_path, rows)
    sample = whole[0]
    start, end = int(sample.images[0].positions[0]), int(sample.images[0].positions[-1]) + 1
    path, options = tmp_path / "train.jsonl", {"cache": tmp_path / "cache", "num_workers": 0}
    for length in (start, end):
        settings = settings_of(max_length=length, overlong="truncate")
        cut = load_sft(path, tokenizer_of(), settings, **options)  # type: ignore[arg-type]
        assert len(cut[0]) == length
        assert len(cut[0].images) == (length == end)
    for length in (start + 1, end - 1):
        with refused("data.max_length", "no sample"):
            load_sft(path, tokenizer_of(), settings_of(max_length=length, overlong="truncate"), **options)  # type: ignore[arg-type]
    both = write_rows(tmp_path / "both.jsonl", [*rows, {"messages": first}])
    settings = settings_of(max_length=start + 1, overlong="truncate")
    data = load_sft(both, tokenizer_of(), settings, **options)  # type: ignore[arg-type]
    assert "the limit is inside an image" in data.report.dropped[0].reason


def test_both_answers_of_a_pair_show_the_same_image(tmp_path: Path) -> None:
    write_images(tmp_path)
    row = {"prompt": [asked(picture("0.png"), "What is two?")[0]], "chosen": "Four.", "rejected": "May."}
    column = {"prompt": "<image>What is two?", "chosen": "Four.", "rejected": "May.", "images": ["0.png"]}
    path = write_rows(tmp_path / "pairs.jsonl", [row, column])
    data = load_pairs(path, tokenizer_of(), settings_of(), cache=tmp_path / "cache", num_workers=0)
    assert len({image.digest for sample in data for image in sample.images}) == 1
    np.testing.assert_array_equal(data[0].tokens, data[2].tokens)
    np.testing.assert_array_equal(data[1].tokens, data[3].tokens)


def test_the_processor_is_part_of_the_digest(tmp_path: Path) -> None:
    """The same image file with other processor settings has other pixels, so that it must not be shared."""
    from padfree.data.image_processor import ImageProcessor

    processor = load_processor(str(model_folder()))
    before = ImageProcessor(processor, 1, ()).digest
    other = load_processor(str(model_folder()))
    other.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert ImageProcessor(other, 1, ()).digest != before
    assert ImageProcessor(load_processor(str(model_folder())), 1, ()).digest == before


def test_rows_say_how_they_are_read(tmp_path: Path) -> None:
    data = load(tmp_path, [{"messages": asked("<image>Hello"), "images": ["0.png"], "id": 3}])
    about = json.loads((data.folder / "metadata.json").read_text())["files"][0]["read_as"]
    assert "images" in about
    assert isinstance(data[0], Sample)
