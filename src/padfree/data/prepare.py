"""Tokenise data files into a `TokenizedDataset`, or open the tokens of an earlier call from the cache.

    sources -> chunks of rows -> tokenising processes -> results in the order of the rows -> store

The result does not depend on the number of processes. Memory stays bounded, because each process works on one chunk at
a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from padfree.data.chat_renderer import chat_renderer
from padfree.data.data_settings import SFTDataSettings
from padfree.data.dataset import PairDataset, TokenizedDataset
from padfree.data.fields import Fields, Schema, check_mapping
from padfree.data.formats import PAIR_SCHEMA, REWARD_SCHEMA, SFT_SCHEMA, described, reading_images
from padfree.data.hashing import hash_of
from padfree.data.image_processor import ImageSettings
from padfree.data.image_store import StoredImages
from padfree.data.record_source import RecordSource, resolve_source
from padfree.data.records import bad_row, no_usable_row
from padfree.data.rows import listed_messages
from padfree.data.sources import open_sources, optional_package
from padfree.data.store import (
    FORMAT,
    Writer,
    content_digest,
    default_cache_folder,
    find_or_build,
    is_whole,
    read_metadata,
    read_skipped,
    tokenizer_digest,
)
from padfree.data.tokenize import PairTokenizer, RewardTokenizer, RowTokenizer
from padfree.data.tokenizing_processes import in_order, worker_count
from padfree.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
"""A function that is called with the number of bytes read so far, and the total number of bytes of the sources."""

READING = 2
"""The version of the code that turns rows into samples. It is part of the cache key."""


def load_pairs(
    data: str | Path | Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    settings: SFTDataSettings | None = None,
    *,
    cache: str | Path | None = None,
    num_workers: int | None = None,
    progress: bool | Progress = False,
    margins: bool = False,
) -> PairDataset:
    """Load preference pairs from the columns `chosen` and `rejected` and, if a file has one, the column `prompt`.

    The function takes the arguments of `load_sft`, and `margins`. If `margins` is True, a row can have a `margin`,
    which becomes `terms["margin"]` of its chosen answer.
    """
    kind, schema = (RewardTokenizer, REWARD_SCHEMA) if margins else (PairTokenizer, PAIR_SCHEMA)
    return load_rows(
        data, tokenizer, settings, PairDataset, kind, schema, cache=cache, num_workers=num_workers, progress=progress
    )


def load_sft(
    data: str | Path | Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    settings: SFTDataSettings | None = None,
    *,
    cache: str | Path | None = None,
    num_workers: int | None = None,
    progress: bool | Progress = False,  # True: a progress bar, which needs rich
) -> TokenizedDataset:
    """Tokenise files, folders or Hub data sets, or open their tokens from the cache.

    `cache`: a folder, by default `default_cache_folder()`. `num_workers`: the number of processes; 0 tokenises in this
    process. Put the call under `if __name__ == "__main__":`, because worker processes import the main script.
    """
    return load_rows(
        data,
        tokenizer,
        settings,
        TokenizedDataset,
        RowTokenizer,
        SFT_SCHEMA,
        cache=cache,
        num_workers=num_workers,
        progress=progress,
    )


Dataset = TypeVar("Dataset", bound=TokenizedDataset)


def load_rows(
    data: str | Path | Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    settings: SFTDataSettings | None,
    dataset: type[Dataset],
    kind: type[RowTokenizer],
    schema: Schema,
    *,
    cache: str | Path | None = None,
    num_workers: int | None = None,
    progress: bool | Progress = False,
) -> Dataset:
    """Load rows whose columns have one of the formats of `schema`: tokenise them, unless the cache has their tokens.

    `kind`: the class that turns rows into samples. `dataset`: the class of the result.
    """
    settings = settings or SFTDataSettings()
    known = schema
    if settings.images is not None:
        schema = reading_images(schema)
    check_mapping(settings.columns, schema)
    if num_workers is not None and num_workers < 0:
        raise UserError("num_workers", "is negative", "give 0 or more", value=num_workers)
    sources = open_sources(data, split=settings.split, subset=settings.subset)
    folder = Path(cache) if cache is not None else default_cache_folder()
    identity = _identity(sources, tokenizer, settings, folder)
    chat = chat_renderer(tokenizer, settings, day=settings.day)
    if chat is not None and chat.depends_on_day:
        identity["day"] = chat.day.isoformat()
        settings = replace(settings, day=chat.day)  # fix the date now, in case midnight passes while tokenising
    if known is not SFT_SCHEMA:
        identity["kinds"] = [format.kind for format in schema.formats]
    if schema.number is not None:
        identity["number"] = schema.number
    if settings.images is not None:
        identity["images"] = _image_identity(sources, settings.images)

    def build(temporary: Path) -> None:
        _build(temporary, sources, kind(tokenizer, settings), schema, settings, identity, num_workers, progress)

    found = find_or_build(folder, hash_of(identity)[:32], build, intact=partial(_intact, settings.images))
    if settings.on_bad_row == "error" and (skipped := read_skipped(found)):
        units = {file["name"]: file["unit"] for file in read_metadata(found)["files"]}
        raise bad_row(skipped[0], units[skipped[0].file])
    return dataset(found, max_length=settings.max_length, overlong=settings.overlong, images=settings.images)


def _identity(
    sources: list[RecordSource], tokenizer: PreTrainedTokenizerBase, settings: SFTDataSettings, cache: Path
) -> dict[str, Any]:
    """Return everything that the tokens of a data set depend on. The hash of the result is the cache key."""
    import tokenizers
    import transformers

    return {
        "format": FORMAT,
        "content": [[source.name, content_digest(source, cache)] for source in sources],
        "tokenizer": tokenizer_digest(tokenizer),
        "versions": [transformers.__version__, tokenizers.__version__],
        "settings": {
            "columns": dict(settings.columns),
            "loss_on": settings.loss_on,
            "prompt_format": settings.prompt_format,
            "chat_template": settings.chat_template,
            "template_arguments": dict(settings.template_arguments),
            "append_eos": settings.append_eos,
            "turns": settings.turns,
            "system": settings.system,
            "prompt_template": settings.prompt_template,
        },
        "reading": READING,
    }


def _image_identity(sources: list[RecordSource], images: ImageSettings) -> dict[str, Any]:
    """Return everything that image tokens depend on except the image files, which `_intact` checks for changes."""
    return {
        "processor": images.processor.digest,
        "placeholder": images.placeholder,
        "one_image": images.one_image,
        "max_pixels": images.max_pixels,
        "folders": [images.folder or source.folder for source in sources],
    }


def _intact(images: ImageSettings | None, folder: Path) -> bool:
    """Return whether a cache folder is complete, and no image file has changed since the folder was built."""
    if not is_whole(folder):
        return False
    if images is None:
        return True
    metadata = read_metadata(folder)
    try:
        return StoredImages(folder, metadata["image_counts"], int(metadata["samples"]), images).unchanged()
    except (UserError, KeyError, TypeError, ValueError):
        return False


def _build(
    folder: Path,
    sources: list[RecordSource],
    tokenize: RowTokenizer,
    schema: Schema,
    settings: SFTDataSettings,
    identity: dict[str, Any],
    num_workers: int | None,
    progress: bool | Progress,
) -> None:
    readings = [_reading_of(source, settings, tokenize, schema) for source in sources]
    fields = [None if reading is None else reading[0] for reading in readings]
    total = sum(source.size for source in sources)
    tasks = (
        (number, chunk, found)
        for number, (source, found) in enumerate(zip(sources, fields, strict=True))
        for chunk in source.chunks(found.needed if found else ())
    )
    results = in_order(tasks, tokenize, worker_count(num_workers, total, images=settings.images is not None))
    rows = [0] * len(sources)
    done = 0
    with (
        Writer(folder, numbers=schema.number is not None, images=settings.images is not None) as writer,
        contextlib.closing(results),
        _shown_progress(progress) as report,
    ):
        for number, chunk, result in results:
            if result.skipped and settings.on_bad_row == "error":
                raise bad_row(result.skipped[0], chunk.unit)
            writer.append(
                result.tokens, result.mask, result.lengths, number, result.lines, result.numbers, result.images
            )
            if writer.images is not None:
                writer.images.bad_files.extend(result.bad_files)
            writer.skipped.extend(result.skipped)
            rows[number] += len(chunk.numbers)
            done += chunk.size
            report(done, total)
        for source in sources:
            source.check_unchanged()
        if not writer.num_samples:
            raise no_usable_row([source.name for source in sources], sum(rows), writer.skipped)
        files = [
            {"name": source.name, "unit": source.unit, "rows": count, "read_as": reading and reading[1]}
            for source, count, reading in zip(sources, rows, readings, strict=True)
        ]
        given = any(found is not None and found.kind == "tokens" for found in fields)
        writer.finish({**identity, "files": files, "given_ids": given})


def _reading_of(
    source: RecordSource, settings: SFTDataSettings, tokenize: RowTokenizer, schema: Schema
) -> tuple[Fields, str] | None:
    """Determine how a file is read: return the column of each field, and a description for the user.

    Return None if no row of the file can be parsed.
    """
    found = resolve_source(
        source, settings.columns, schema, tokenize.reader.template_names, on_bad_row=settings.on_bad_row
    )
    if found is None:
        return None
    first, fields = found
    if fields.kind in ("messages", "continued") and not tokenize.renders_chat:
        raise UserError(
            "data.prompt_format",
            f"uses no chat template, but {source.name} has messages in {fields['messages']!r}",
            "set data.chat_template to a file with a template, and data.prompt_format=chat",
            value=settings.prompt_format,
        )
    if fields.kind in ("text", "tokens") and settings.loss_on == "last":
        column = fields["text" if fields.kind == "text" else "input_ids"]
        raise UserError(
            "data.loss_on",
            f"'last' needs conversations, but {source.name} has the column {column!r}, which has no turns",
            "set data.loss_on=assistant",
        )
    how = _how(fields, first, settings, tokenize.renders_chat)
    if fields.kind in ("messages", "pair") and not tokenize.ends_turns:
        how += (
            "; the chat template ends turns without a special token that is trained, so the model may not learn to stop"
        )
    return fields, described(fields, first, schema) + how


def _how(fields: Fields, first: Mapping[str, Any], settings: SFTDataSettings, renders_chat: bool) -> str:
    """Describe whether the chat template is used for a file, and which settings do not apply to the file.

    For example: `; as plain text; data.system does not apply`.
    """
    plain = not renders_chat or (fields.kind == "implicit" and listed_messages(first.get(fields["chosen"])) is None)
    how = ""
    if fields.kind in ("pair", "prompted", "continued", "implicit"):
        how = "; as plain text" if plain else "; through the chat template"
    idle = _idle(settings, fields, plain=plain)
    return how + (f"; {' and '.join(idle)} {'do' if len(idle) > 1 else 'does'} not apply" if idle else "")


def _idle(settings: SFTDataSettings, fields: Fields, *, plain: bool) -> list[str]:
    """Return the settings that do not apply to a file. `plain`: whether prompts and responses are plain text."""
    unrendered = fields.kind in ("text", "tokens")
    appends_eos = fields.kind == "text" or (plain and fields.kind != "tokens")
    given = {
        "data.system": settings.system is not None and (plain or unrendered),
        "data.prompt_template": settings.prompt_template is not None and "prompt" not in fields.columns,
        "data.prompt_format": settings.prompt_format != "auto" and unrendered,
        # With data.prompt_format=plain, a run notes elsewhere that the template has no effect.
        "data.chat_template": settings.chat_template is not None
        and settings.prompt_format != "plain"
        and (plain or unrendered),
        "data.turns": settings.turns != "auto" and (plain or unrendered),
        "data.append_eos": not settings.append_eos and not appends_eos,
    }
    return [name for name, idle in given.items() if idle]


@contextlib.contextmanager
def _shown_progress(progress: bool | Progress) -> Iterator[Progress]:
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield lambda done, total: None
    else:
        rich = optional_package("rich.progress", "progress", "True shows a bar", install="rich")
        console = optional_package("rich.console", "progress", "True shows a bar", install="rich")
        with rich.Progress(console=console.Console(stderr=True)) as bar:
            task = bar.add_task("tokenising", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
