"""The files of a checkpoint are standard safetensors, readable as a whole or in pieces."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from padfree.checkpoint.checkpoint_files import DTYPES, Reader, write_safetensors
from padfree.checkpoint.manifest import join_manifest


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    """All dtypes, odd sizes that could misalign the next tensor, scalars, views."""
    tensors = {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "transposed": torch.arange(6.0).reshape(2, 3).T, "ü": torch.ones(1, 0)}
    size, digest = write_safetensors(tmp_path / "file", tensors)
    assert size == (tmp_path / "file").stat().st_size
    assert digest == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    got = load_file(tmp_path / "file")
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    write_safetensors(tmp_path / "empty", {})
    assert load_file(tmp_path / "empty") == {}


@pytest.mark.parametrize("written", [[(0, 5)], [(0, 3), (3, 5)], [(0, 1), (1, 1), (1, 4), (4, 5)]])
@pytest.mark.parametrize("read", [[(0, 5)], [(0, 2), (2, 4), (4, 5)], [(0, 3), (3, 5), (5, 5)]])
def test_pieces_are_read_whatever_the_split(
    written: list[tuple[int, int]], read: list[tuple[int, int]], tmp_path: Path
) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    gathered = []
    for number, (begin, end) in enumerate(written):
        pieces = {"weight": whole[begin:end]} if end > begin else {}
        size, digest = write_safetensors(tmp_path / f"{number}.safetensors", pieces)
        offsets, shapes = ({"weight": [begin, 0]}, {"weight": [end - begin, 2]}) if pieces else ({}, {})
        gathered.append((f"{number}.safetensors", size, digest, offsets, shapes, {}))
    content = join_manifest({"tensors": {"weight": {"dtype": "F32", "shape": [5, 2]}}}, gathered)
    for begin, end in read:
        local = torch.full((end - begin, 2), -1.0)
        Reader(tmp_path, content["tensors"]).fill("weight", local, (slice(begin, end), slice(0, 2)))
        assert torch.equal(local, whole[begin:end])
    content["tensors"]["weight"]["pieces"].pop()
    with pytest.raises(AssertionError, match=r"weight: the checkpoint has .* of 10 elements"):
        Reader(tmp_path, content["tensors"]).fill("weight", torch.ones(5, 2), (slice(0, 5), slice(0, 2)))
