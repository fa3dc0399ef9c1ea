"""Arrays in .npy files: written piece by piece, and opened memory-mapped."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from padfree.errors import UserError


class ArrayWriter:
    """Writes an array to an .npy file piece by piece. `finish` overwrites the header with the final length."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by close()
        self._dtype = dtype
        self._row_shape = row_shape
        self._digest = hashlib.sha256()
        self.length = 0
        self._header_length = self._write_header()

    def _write_header(self) -> int:
        shape = (self.length, *self._row_shape)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def append(self, array: NDArray[Any]) -> None:
        assert array.dtype == self._dtype
        assert array.shape[1:] == self._row_shape
        content = np.ascontiguousarray(array).data
        self._file.write(content)
        self._digest.update(content)
        self.length += len(array)

    @property
    def digest(self) -> str:
        """A hash of everything appended so far."""
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Write the header with the final length, and sync the file to disk. The caller renames the file afterwards."""
        self._file.seek(0)
        length = self._write_header()
        # the final header is as long as the first one, because numpy reserves space in it for the final length
        assert length == self._header_length
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def open_array(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Open one array of a cache folder, memory-mapped. Raise a `UserError` if its shape is not `shape`."""
    path = folder / f"{name}.npy"
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise unusable_cache(folder, f"{path} is damaged ({error})") from None
    if array.shape != shape:
        raise unusable_cache(folder, f"{path} has shape {array.shape}, not {shape}")
    return array


def unusable_cache(folder: Path, problem: str) -> UserError:
    return UserError("cache", problem, f"delete {folder}, and the next run rebuilds it")
