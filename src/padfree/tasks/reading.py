"""The data that a task reads: the samples of a run, or prompts for which the run generates responses."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padfree.config import DataConfig, RolloutConfig
from padfree.config.inputs import check_regular, user_path
from padfree.data import DataReport, StoredSamples, TokenizedDataset
from padfree.data.formats import reading_notes
from padfree.data.image_processor import ImageSettings
from padfree.data.prepare import Progress
from padfree.data.store import read_metadata
from padfree.errors import UserError
from padfree.rollout import Prompt
from padfree.sample import Sample

Samples = Sequence[Sample | Prompt] | StoredSamples


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """The samples or prompts of a run. `parts`: the number of samples from each of `data.sources`, if any."""

    samples: Samples
    report: DataReport
    place: Callable[[int], str]  # the file and line of a sample
    parts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # notes for the user about how the files were read
    day: datetime.date | None = None  # the date that the chat template writes into the texts; None: no date
    given_ids: bool = False  # the files hold token ids, not text


def text_settings(
    data: DataConfig, day: datetime.date | None = None, images: ImageSettings | None = None
) -> dict[str, Any]:
    """Return the arguments for tokenisation, such as the chat template, that the readers in `padfree.data` take.

    `day`: the date that chat templates may show. `images`: how the model reads the images of rows; None: rows have no
    images.
    """
    names = ("columns", "prompt_format", "append_eos", "split", "subset", "max_length", "overlong", "on_bad_row")
    chosen: dict[str, Any] = {name: getattr(data, name) for name in (*names, "turns", "system", "prompt_template")}
    chosen["day"], chosen["images"] = day, images
    if data.chat_template is not None:
        chosen["chat_template"] = read_template(data.chat_template)
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """What a task needs to read its data: the files, the settings and the tokenizer."""

    data: DataConfig
    rollout: RolloutConfig  # says whether the run samples responses to prompts
    tokenizer: Any
    progress: bool | Progress = False  # shows the progress of tokenisation
    import_reward: bool = True  # import the reward function before the data is read, so that an error shows early
    day: datetime.date | None = None  # the date for chat templates; None: today
    images: ImageSettings | None = None  # the vision-language model that reads the images of rows, if the task can

    @property
    def paths(self) -> list[str]:
        return list(self.data.path)

    @property
    def text(self) -> dict[str, Any]:
        """The arguments for tokenisation, such as the chat template, that the readers in `padfree.data` take."""
        return text_settings(self.data, self.day, self.images)


def read_template(name: str, setting: str = "data.chat_template") -> str:
    """Return the text of the chat template in the file `name`. `setting`: the setting that error messages name."""
    path = Path(user_path(name, setting))
    check_regular(path, setting, once=False)
    try:
        text = path.read_text(encoding="utf-8")
        reason = None if text.strip() else "it is empty"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
    if reason is not None:
        raise UserError(setting, f"{name} cannot be used ({reason})", "give a text file with a chat template")
    return text


def of_store(found: TokenizedDataset) -> TrainingData:
    about = read_metadata(found.folder)
    return TrainingData(
        samples=found,
        report=found.report,
        place=found.place,
        notes=(*reading_notes(about["files"]), *(() if found.images is None else (f"data: {found.images}",))),
        given_ids=bool(about.get("given_ids")),
    )
