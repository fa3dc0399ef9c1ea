"""Tokenised samples, read from disk as they are asked for.

    data = TokenizedDataset(folder, max_length=1024, overlong="truncate")
    len(data), data.lengths          no token is read
    data[17]                         Sample(tokens=..., loss_mask=..., uid="train.jsonl:18", source="train.jsonl")

A data set is a folder and two settings. Pickled, that is all that travels, so that any number of processes may open it;
the system keeps one copy of the tokens for all of them.

`max_length` is applied here and not when tokenising: another length needs no other cache. Truncation keeps the first
tokens; a sample that is left with nothing to train on is dropped, and listed as dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from padfree.batch import Sample
from padfree.config.choices import Overlong
from padfree.config.rules import check_choice
from padfree.data.records import DataReport, SkippedRow
from padfree.data.settings import check_max_length
from padfree.data.store import hash_of, open_array, read_metadata, read_skipped

SCANNED_TOKENS = 1 << 22
"""How many tokens are looked at in one go."""


class TokenizedDataset:
    """The samples of one cache folder; `report` says what became of every row."""

    samples_per_row: ClassVar[int] = 1

    def __init__(self, folder: str | Path, *, max_length: int | None = None, overlong: Overlong = "error") -> None:
        check_max_length(max_length)
        check_choice("overlong", overlong, Overlong)
        self.folder = Path(folder)
        self.max_length = max_length
        self.overlong: Overlong = overlong
        metadata = read_metadata(self.folder)
        num_samples, num_tokens = int(metadata["samples"]), int(metadata["tokens"])
        self._files: list[dict[str, Any]] = metadata["files"]
        self._digests: list[str] = metadata["digests"]
        # Plain arrays over the mapped memory: numpy's memmap takes ten times as long to cut a slice, and would carry
        # its file along wherever a slice is pickled.
        self._tokens = np.asarray(open_array(self.folder, "tokens", (num_tokens,)))
        self._mask = np.asarray(open_array(self.folder, "mask", (num_tokens,)))
        self._rows = np.asarray(open_array(self.folder, "rows", (num_samples, 2)))
        offsets = np.asarray(open_array(self.folder, "offsets", (num_samples + 1,)))
        assert offsets[0] == 0
        assert offsets[-1] == num_tokens
        self._starts: NDArray[np.int64] = offsets[:-1]
        self.lengths: NDArray[np.int64] = np.diff(offsets)  # [N]
        self._kept: NDArray[np.int64] = np.arange(num_samples)
        truncated, dropped = self._limit()
        self.report = DataReport(
            num_rows=sum(int(file["rows"]) for file in self._files),
            num_samples=len(self.lengths) // self.samples_per_row,
            num_tokens=int(self.lengths.sum()),
            rows_per_file={file["name"]: int(file["rows"]) for file in self._files},
            skipped=tuple(read_skipped(self.folder)),
            dropped=tuple(dropped),
            truncated=tuple(truncated),
        )

    def _limit(self) -> tuple[list[SkippedRow], list[SkippedRow]]:
        """Apply `max_length`; the rows that were truncated, and those that were dropped."""
        if self.max_length is None:
            return [], []
        over = np.flatnonzero(self.lengths > self.max_length)
        if len(over) and self.overlong == "error":
            first = int(over[0])
            raise ValueError(
                f"data.max_length: {self.max_length}, but {len(over)} of {len(self.lengths)} samples are longer, the "
                f"first ({self._uid(first)}) {self.lengths[first]} tokens; set data.overlong=truncate or "
                f"data.overlong=drop, or data.max_length={self.lengths[over].max()}"
            )
        truncated: list[SkippedRow] = []
        dropped: list[SkippedRow] = []
        keep = np.ones(len(self.lengths), dtype=np.bool_)
        for place in over.tolist():
            start = self._starts[place]
            reason = f"{self.lengths[place]} tokens, max_length {self.max_length}"
            keep[place] = self.overlong == "truncate" and self._mask[start + 1 : start + self.max_length].any()
            if keep[place]:
                truncated.append(self._note(place, reason))
            else:
                nothing = ", and nothing to train on before it" if self.overlong == "truncate" else ""
                dropped.append(self._note(place, reason + nothing))
        self._kept = np.flatnonzero(self._kept_together(keep, truncated, dropped))
        if len(over) and not len(self._kept):
            longest = self.lengths.max()
            raise ValueError(f"data.max_length: {self.max_length} leaves no sample; set data.max_length={longest}")
        self.lengths = np.minimum(self.lengths[self._kept], self.max_length)
        return truncated, dropped

    def _kept_together(
        self, keep: NDArray[np.bool_], truncated: list[SkippedRow], dropped: list[SkippedRow]
    ) -> NDArray[np.bool_]:
        """Which places stay, where some stay only with others."""
        return keep

    def _note(self, place: int, reason: str) -> SkippedRow:
        file, line = self._rows[place]
        return SkippedRow(file=self._files[file]["name"], line=int(line), reason=reason)

    def _uid(self, place: int) -> str:
        file, line = self._rows[place]
        return f"{self._files[file]['name']}:{line}"

    def place(self, index: int) -> str:
        """Where a sample stands: its file and line."""
        return self._uid(int(self._kept[index]))

    def first_token_from(self, least: int) -> tuple[int, int] | None:
        """The first sample with a token id of `least` or more, and that id; None where there is none.

        All tokens are read for it.
        """
        for start in range(0, len(self._tokens), SCANNED_TOKENS):
            over = np.flatnonzero(self._tokens[start : start + SCANNED_TOKENS] >= least)
            for position in (over + start).tolist():
                place = int(np.searchsorted(self._starts, position, side="right")) - 1
                index = int(np.searchsorted(self._kept, place))
                kept = index < len(self._kept) and self._kept[index] == place
                if kept and position < self._starts[place] + self.lengths[index]:
                    return index, int(self._tokens[position])
        return None

    @property
    def digest(self) -> str:
        """Of tokens and masks of all samples as they are here; other files, settings or versions may give the same."""
        places = hashlib.sha256(self._kept.tobytes() + self.lengths.tobytes()).hexdigest()
        return hash_of([*self._digests, places])

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        number = as_index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        place = int(self._kept[number])
        start = self._starts[place]
        end = start + self.lengths[number]
        return Sample(
            tokens=self._tokens[start:end],
            loss_mask=self._mask[start:end],
            uid=self._uid(place),
            source=self._files[self._rows[place, 0]]["name"],
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self.folder, self.max_length, self.overlong)


class PairDataset(TokenizedDataset):
    """Preference pairs: sample 2i is the chosen answer of pair i, sample 2i + 1 the rejected one.

    `group` names the pair, and `reward` is 1 for the chosen answer and 0 for the other. `report` counts pairs. Where
    rows may have margins, that of a pair is the `raw_reward` of its chosen answer.
    """

    samples_per_row: ClassVar[int] = 2

    @cached_property
    def _margins(self) -> NDArray[np.float64] | None:
        """[N] of all places of the folder; None where rows were read without margins."""
        if not read_metadata(self.folder).get("margins"):
            return None
        return np.asarray(open_array(self.folder, "margins", (len(self._rows),)))

    def _kept_together(
        self, keep: NDArray[np.bool_], truncated: list[SkippedRow], dropped: list[SkippedRow]
    ) -> NDArray[np.bool_]:
        both = np.repeat(keep.reshape(-1, 2).all(1), 2)
        gone = {(row.file, row.line): row for row in reversed(dropped)}
        dropped[:] = gone.values()  # a row is dropped once, for its first answer that is too long
        cut = {(row.file, row.line): row for row in reversed(truncated)}
        truncated[:] = [row for place, row in cut.items() if place not in gone]
        return both

    def __getitem__(self, index: SupportsIndex) -> Sample:
        sample = super().__getitem__(index)
        chosen = as_index(index) % 2 == 0
        margins = self._margins
        return replace(
            sample,
            raw_reward=None if margins is None or not chosen else float(margins[self._kept[as_index(index)]]),
            uid=f"{sample.uid} {'chosen' if chosen else 'rejected'}",
            group=sample.uid,
            reward=float(chosen),
        )


def _reopened(
    kind: type[TokenizedDataset], folder: Path, max_length: int | None, overlong: Overlong
) -> TokenizedDataset:
    return kind(folder, max_length=max_length, overlong=overlong)
