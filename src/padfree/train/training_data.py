"""The training data of a run: tokenizer and samples.

Config -> load_tokenizer
       -> load_training_data  samples (SFT), rollouts (RL), or prompts for which the run generates rollouts
       -> load_held_out       the same for `eval.path`
       -> image_settings      with `model.vision`, how images are read. Three parts of the model decide this:
                              config                 the placeholder token of images, the names of the tower's inputs
                              processor              image -> placeholder tokens and inputs of the vision tower
                                                     (padfree.data.image_processor)
                              model without weights  sample -> rotary positions (padfree.model.vision)
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedModel

from padfree.config import Config, DataConfig, ModelConfig
from padfree.config.hub import check_name
from padfree.config.model_folder import check_tokenizer_files
from padfree.data import (
    DataReport,
    MixedDataset,
    RolloutDataSettings,
    StoredSamples,
    labelled,
    of_source,
)
from padfree.data.chat_renderer import chat_renderer
from padfree.data.folders import left_out_notes
from padfree.data.image_processor import ImageSettings
from padfree.data.prepare import Progress
from padfree.errors import UserError, shown_error
from padfree.model.structure import skeleton
from padfree.model.vision import prepare_sample
from padfree.model.vision.families import need_family
from padfree.rollout import Prompt
from padfree.sample import Sample
from padfree.tasks import Task, task_of
from padfree.tasks.batch_advantages import check_signal
from padfree.tasks.reading import ReadSettings, Samples, TrainingData, text_settings
from padfree.train.batcher import row_starts

MOST_LOOKED_AT = 1000
"""The maximum number of samples that `image_share` reads."""


def load_tokenizer(config: Config) -> Any:
    """Load the tokenizer that `model.tokenizer` names, or else the model's own.

    A run on rollout files may have no tokenizer; the result is then None.
    """
    if not check_tokenizer_files(config):
        return None
    field = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    found = open_tokenizer(config.model.tokenizer or config.model.path, field, config.model.trust_remote_code)
    if (images := image_settings(config.model, config.data)) is not None:
        images.processor.give_template(found)
    return found


def open_tokenizer(name: str, setting: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of `name`, a folder or Hub id. An error in its files becomes a `UserError` about `setting`."""
    check_name(name, setting)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # broken files make the readers raise errors of any kind
        raise UserError(
            setting, f"the tokenizer of {name} cannot be read ({shown_error(error)})", "give another tokenizer"
        ) from error


def load_training_data(
    config: Config,
    tokenizer: Any,
    *,
    progress: Progress | None = None,
    import_reward: bool = True,
    day: datetime.date | None = None,
) -> TrainingData:
    """Load the samples or prompts of `data.path` or of all `data.sources`.

    `import_reward`: import the reward function first, so that an error in it shows early. `day`: the date for chat
    templates; None: today.
    """
    settings = ReadSettings(
        data=config.data,
        rollout=config.rollout,
        tokenizer=tokenizer,
        progress=progress or False,
        import_reward=import_reward,
        day=day,
        images=image_settings(config.model, config.data),
    )
    found = _load(task_of(config.loss.command), settings)
    found = replace(found, notes=(*found.notes, *left_out_notes(config.data.paths)))
    chat = None
    if tokenizer is not None:
        chat = chat_renderer(tokenizer, RolloutDataSettings(**text_settings(config.data, day)), day=day)
    if chat is None or not chat.depends_on_day:
        return found
    note = f"data: the chat template writes the date; this run uses {chat.day.isoformat()}, also after a resume"
    return replace(found, day=chat.day, notes=(*found.notes, note))


def _load(task: Task, settings: ReadSettings) -> TrainingData:
    data = settings.data
    if not data.sources:
        return task.read(settings)
    found: dict[str, TrainingData] = {}
    for number, source in enumerate(data.sources):
        try:
            found[source.label] = task.read(replace(settings, data=data.of_source(source)))
        except UserError as error:
            raise _of_data_source(error, number) from error
    return mixed(found)


def _of_data_source(error: UserError, number: int) -> UserError:
    """Return the error about source `number` of a mixture: its setting `data.*` becomes `data.sources.NUMBER.*`.

    For example, an error about `data.path` becomes an error about `data.sources.1.path`.
    """
    own, table = "data.(path|columns|split|subset)", f"data.sources.{number}"
    at = f"{table}.path" if error.setting == "data" else re.sub(rf"^{own}$", rf"{table}.\1", error.setting)
    problem, fix = (re.sub(rf"{own}(?=[=.])", rf"{table}.\1", text) for text in (error.problem, error.fix))
    return UserError(at, problem, fix, error.value)


def mixed(found: Mapping[str, TrainingData]) -> TrainingData:
    """Concatenate the data of several named sources. Each sample carries the name of its source."""
    each = list(found.items())
    parts = tuple(len(one.samples) for _, one in each)
    if len(each) == 1:
        return replace(each[0][1], parts=parts)
    about: dict[str, Any] = {
        "notes": tuple(note for _, one in each for note in one.notes),
        "given_ids": any(one.given_ids for _, one in each),
    }
    stored = {name: one.samples for name, one in each if isinstance(one.samples, StoredSamples)}
    if len(stored) == len(each):
        both = MixedDataset(stored)
        return TrainingData(samples=both, report=both.report, place=both.place, parts=parts, **about)
    samples = [_with_source(name, sample) for name, one in each for sample in one.samples]
    places = [(name, one, index) for name, one in each for index in range(len(one.samples))]

    def place(index: int) -> str:
        name, one, number = places[index]
        return labelled(name, one.place(number))

    report = DataReport.merged({name: one.report for name, one in each})
    return TrainingData(samples=samples, report=report, place=place, parts=parts, **about)


def _with_source(name: str, sample: Sample | Prompt) -> Sample | Prompt:
    if isinstance(sample, Prompt):
        return replace(sample, uid=labelled(name, sample.uid), source=name)
    return of_source(name, sample)


def load_held_out(
    config: Config,
    tokenizer: Any,
    *,
    progress: Progress | None = None,
    import_reward: bool = True,
    day: datetime.date | None = None,
) -> TrainingData | None:
    """Load the data of `eval.path`, like `load_training_data`. Return None if `eval.path` is not set."""
    settings = config.eval
    if not settings.path:
        return None
    held_out_config = config.with_held_out_data()
    try:
        found = load_training_data(held_out_config, tokenizer, progress=progress, import_reward=import_reward, day=day)
    except UserError as error:
        raise error.at("eval.path", "data") from error
    found = replace(found, notes=tuple(f"eval.path: {note.removeprefix('data: ')}" for note in found.notes))
    return found if settings.samples is None else replace(found, samples=_first(config, found.samples))


def _first(config: Config, samples: Samples) -> Samples:
    """Return the samples of the first data rows, as many rows as `eval.samples` allows.

    A preference pair counts as two samples of `eval.samples`; any other row counts as one.
    """
    assert config.eval.samples is not None
    starts, size = row_starts(config.loss, config.rollout, samples), config.loss.task.group_size
    count = starts[min(config.eval.samples // size, len(starts) - 1)]
    return [samples[index] for index in range(int(count))]


def longest_of(samples: Samples) -> int:
    """Return the number of tokens of the longest sample or prompt."""
    if isinstance(samples, StoredSamples):
        return int(samples.lengths.max(initial=0))
    return max((len(sample.tokens) for sample in samples), default=0)


def check_rollouts(config: Config, source: TrainingData) -> str | None:
    """Check the rollouts of the data files for a learning signal, i.e. for advantages that are not 0.

    Raise a `UserError` if no group of rollouts has a signal. Return a note if some groups have none.
    """
    if config.loss.task.in_rows or config.rollout.source is not None:
        return None
    samples = [sample for sample in source.samples if isinstance(sample, Sample)]
    return check_signal(samples, config.loss.advantage, ", ".join(config.data.paths))


# Images


class PrepareSample:
    """Adds the model's rotary positions to a sample with images.

    The object holds only the model's name, so that it can be pickled; each process loads the model without weights.
    """

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        self.path, self.trust_remote_code = path, trust_remote_code

    def __call__(self, sample: Sample) -> Sample:
        return prepare_sample(_skeleton(self.path, self.trust_remote_code), sample) if sample.images else sample


def image_settings(model: ModelConfig, data: DataConfig) -> ImageSettings | None:
    """Return the reader of images for the run's data, or None if the run trains on text."""
    if not model.vision:
        return None
    path, code = model.path, model.trust_remote_code
    if model.tokenizer is not None and model.tokenizer != path:
        raise UserError(
            "model.tokenizer",
            f"{model.tokenizer}, but with model.vision the model's own processor makes the tokens",
            "leave out model.tokenizer",
        )
    built = _skeleton(path, code)
    family = need_family(built)
    return ImageSettings(
        path=path,
        placeholder=int(built.config.image_token_id),
        inputs=family.inputs,
        one_image=family.one_image,
        trust_remote_code=code,
        folder=data.image_folder,
        max_pixels=data.max_image_pixels,
        prepare=PrepareSample(path, code),
    )


@lru_cache(maxsize=4)
def _skeleton(path: str, trust_remote_code: bool) -> PreTrainedModel:
    return skeleton(path, trust_remote_code=trust_remote_code, vision=True)


def image_share(model: ModelConfig, samples: Samples) -> float:
    """Return the largest share of image tokens in a sample. At most a fixed number of evenly spread samples is read."""
    if not model.vision:
        return 0.0
    chosen = np.unique(np.linspace(0, len(samples) - 1, MOST_LOOKED_AT, dtype=np.int64)).tolist()
    found = (samples[index] for index in chosen)
    return max((sum(len(image.positions) for image in one.images) / len(one) for one in found), default=0.0)
