"""Files of text to a `TokenizedDataset`: tokenised once, by several processes, and from then on only opened.

    sources -> chunk 1, chunk 2, ... -> process i tokenises chunks i, i + k, i + 2k, ... -> results in order -> store

Every process has one chunk at a time: it is given the next one when its result has been taken. So results come in the
order of the rows whatever the number of processes, memory stays bounded, and no pipe can block.

What is made of a row, and trained on:

    messages           the conversation through the chat template; the assistant's turns
    prompt, response   the same as one turn of each (a prompt may also be a list of messages); the response. Without a
                       template: prompt and response as they are, each tokenised by itself, eos behind; response and eos
    text               the text as it is, eos behind; everything

With `loss_on` "all" everything is trained on in every case. A row that leaves nothing to train on is a bad row.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.data.chat import chat_renderer, prompt_conversation
from padfree.data.conversation import Conversation, read_conversation
from padfree.data.dataset import PairDataset, TokenizedDataset
from padfree.data.encode import Encoded, Encoder, Passage, Piece
from padfree.data.fields import PAIR_SCHEMA, REWARD_SCHEMA, SFT_SCHEMA, Fields, Schema, check_mapping, resolve
from padfree.data.records import LARGEST, RowError, SkippedRow, attempt, bad_row, items, shown, string
from padfree.data.settings import SFTDataSettings
from padfree.data.sources import Chunk, RecordSource, open_sources, optional_package, record_of
from padfree.data.store import (
    FORMAT,
    Writer,
    content_digest,
    default_cache_folder,
    find_or_build,
    hash_of,
    is_whole,
    read_metadata,
    read_skipped,
    tokenizer_digest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
"""Called with how many bytes of the sources are done and how many there are."""

BYTES_PER_PROCESS = 16 << 20
"""A process takes seconds to start: below this much text for each it is not worth it."""


class TokenizedChunk(NamedTuple):
    tokens: NDArray[np.int32]  # [T] the samples end to end
    mask: NDArray[np.bool_]  # [T]
    lengths: NDArray[np.int64]  # [N]
    lines: NDArray[np.int64]  # [N]
    margins: NDArray[np.float64]  # [N]; 0 where a row has none
    skipped: list[SkippedRow]


class RowTokenizer:
    """A tokenizer and settings: chunks to tokens. It is pickled and sent to the processes."""

    samples_per_row = 1

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: SFTDataSettings) -> None:
        self._settings = settings
        self._encoder = Encoder(tokenizer, append_eos=settings.append_eos)
        self._chat = chat_renderer(tokenizer, settings)

    @property
    def renders_chat(self) -> bool:
        return self._chat is not None

    def __call__(self, chunk: Chunk, fields: Fields | None) -> TokenizedChunk:
        """`fields` is None for a file of which no row could be read, so that here none will be read either."""
        passages: list[Passage] = []
        lines: list[int] = []
        margins: dict[int, float] = {}
        skipped: list[SkippedRow] = []
        for line, record in zip(chunk.numbers, chunk.records, strict=True):
            try:
                row = record_of(record)
                assert fields is not None
                found = self._passages(row, fields)
                margins[line] = self._margin(row, fields)
                passages += found
                lines += [line] * len(found)
            except RowError as error:
                skipped.append(SkippedRow(file=chunk.source, line=line, reason=str(error)))
        samples: list[tuple[Encoded, int]] = []
        encoded = self._encoder.encode(passages)
        size = self.samples_per_row
        for first in range(0, len(encoded), size):
            whole, line = encoded[first : first + size], lines[first]
            reason = next((problem for one in whole if (problem := _problem(one)) is not None), None)
            if reason is not None:
                skipped.append(SkippedRow(file=chunk.source, line=line, reason=reason))
            else:
                samples += [(one, line) for one in whole if isinstance(one, Encoded)]
        nothing = np.empty(0, dtype=np.int32)
        return TokenizedChunk(
            tokens=np.concatenate([nothing, *(one.tokens for one, _ in samples)]),
            mask=np.concatenate([nothing.astype(np.bool_), *(one.loss_mask for one, _ in samples)]),
            lengths=np.array([len(one.tokens) for one, _ in samples], dtype=np.int64),
            lines=np.array([line for _, line in samples], dtype=np.int64),
            margins=np.array([margins[line] for _, line in samples], dtype=np.float64),
            skipped=sorted(skipped, key=lambda row: row.line),
        )

    def _passages(self, row: dict[str, Any], fields: Fields) -> list[Passage]:
        """Those of the samples that a row makes: always `samples_per_row`."""
        return [self._passage(row, fields)]

    def _margin(self, row: dict[str, Any], fields: Fields) -> float:
        return 0.0

    def _passage(self, row: dict[str, Any], fields: Fields) -> Passage:
        loss_on = self._settings.loss_on
        if fields.kind == "text":
            return Passage(pieces=(Piece(string(row, fields["text"]), True),))
        tools, tools_column = row.get(fields["tools"]), fields["tools"]
        if fields.kind == "messages":
            column = fields["messages"]
            given = items(row, column, "a list of messages")
            conversation = read_conversation(given, column, tools=tools, tools_column=tools_column)
        else:
            response = string(row, fields["response"])
            if self._chat is None:
                plain = string(row, fields["prompt"])
                return Passage(pieces=(Piece(plain, loss_on == "all"), Piece(response, True)))
            prompt = prompt_conversation(row, fields["prompt"], tools=tools, tools_column=tools_column)
            messages = (*prompt.messages, {"role": "assistant", "content": response})
            conversation = Conversation(messages=messages, tools=prompt.tools)
            # Only the response is trained on, whatever the assistant has said before it.
            loss_on = "all" if loss_on == "all" else "last"
        assert self._chat is not None
        (sample,) = self._chat.samples(conversation, loss_on=loss_on, turns="together")
        return Passage.of_spans(sample.text, sample.spans)


def _problem(encoded: Encoded | RowError) -> str | None:
    """Why there is no sample; None: there is one."""
    if isinstance(encoded, RowError):
        return str(encoded)
    if not encoded.loss_mask[1:].any():
        return f"{len(encoded.tokens)} tokens and none to train on; expected a token with another before it"
    return None


class PairTokenizer(RowTokenizer):
    """Rows of `prompt`, `chosen` and `rejected` to two samples each: the prompt with either answer, which is trained.

    An answer is a text, or the messages that follow the prompt.
    """

    samples_per_row = 2

    def _passages(self, row: dict[str, Any], fields: Fields) -> list[Passage]:
        return [self._answered(row, fields, answer) for answer in ("chosen", "rejected")]

    def _answered(self, row: dict[str, Any], fields: Fields, answer: str) -> Passage:
        column = fields[answer]
        if self._chat is None:
            return Passage(pieces=(Piece(string(row, fields["prompt"]), False), Piece(string(row, column), True)))
        asked = prompt_conversation(row, fields["prompt"], tools=row.get(fields["tools"]), tools_column=fields["tools"])
        prompt = asked.messages
        if isinstance(row.get(column), list):
            follow = read_conversation(row[column], column).messages
            if follow[: len(prompt)] == prompt and len(follow) > len(prompt):
                follow = follow[len(prompt) :]  # whole conversations, the prompt among them
        else:
            follow = ({"role": "assistant", "content": string(row, column)},)
        if follow[-1]["role"] != "assistant":
            raise RowError(f"{column}[{len(follow) - 1}].role is not 'assistant'; expected the answer to end with it")
        conversation = Conversation(messages=(*prompt, *follow), tools=asked.tools)
        (sample,) = self._chat.samples(conversation, loss_on="last", turns="auto")
        return Passage.of_spans(sample.text, sample.spans)

    def answers(self, rows: Sequence[tuple[Any, str]]) -> list[Encoded | RowError]:
        """Prompts, texts or messages, each with an answer to it, as `__call__` makes samples of those of pairs."""
        fields = Fields(kind="preference", columns={name: name for name in PAIR_SCHEMA.known})
        passages = [
            attempt(self._answered, {"prompt": prompt, "chosen": answer}, fields, "chosen") for prompt, answer in rows
        ]
        encoded = iter(self._encoder.encode([one for one in passages if isinstance(one, Passage)]))
        return [next(encoded) if isinstance(one, Passage) else one for one in passages]


class RewardTokenizer(PairTokenizer):
    """The same rows, which may have a `margin`: by how much the chosen answer should score more."""

    def _margin(self, row: dict[str, Any], fields: Fields) -> float:
        column = fields["margin"]
        value = row.get(column)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
            raise RowError(f"{column} is {shown(value)}; expected a finite number")
        return float(value)


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
    """Preference pairs, as `load_sft` loads samples: `prompt`, `chosen` and `rejected` of each row.

    With `margins` a row may have a `margin`, too, which is then the `raw_reward` of its chosen answer.
    """
    settings = settings or SFTDataSettings()
    kind, schema = (RewardTokenizer, REWARD_SCHEMA) if margins else (PairTokenizer, PAIR_SCHEMA)
    found = _tokenised(data, kind, schema, tokenizer, settings, cache, num_workers, progress)
    return PairDataset(found, max_length=settings.max_length, overlong=settings.overlong)


def load_sft(
    data: str | Path | Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    settings: SFTDataSettings | None = None,
    *,
    cache: str | Path | None = None,
    num_workers: int | None = None,
    progress: bool | Progress = False,
) -> TokenizedDataset:
    """Tokenise files, folders or Hub data sets, or open what an earlier call made of the same.

    `cache` is a folder (`default_cache_folder()`). `num_workers` processes tokenise, 0 being this one; without it there
    are as many as there is text for, up to 8 and the number of cores. `progress`: True for a bar (it needs rich), or a
    function. Processes import the script that started them, so this call belongs under `if __name__ == "__main__":`.
    """
    settings = settings or SFTDataSettings()
    found = _tokenised(data, RowTokenizer, SFT_SCHEMA, tokenizer, settings, cache, num_workers, progress)
    return TokenizedDataset(found, max_length=settings.max_length, overlong=settings.overlong)


def _tokenised(
    data: str | Path | Iterable[str | Path],
    kind: type[RowTokenizer],
    schema: Schema,
    tokenizer: PreTrainedTokenizerBase,
    settings: SFTDataSettings,
    cache: str | Path | None,
    num_workers: int | None,
    progress: bool | Progress,
) -> Path:
    """The folder of the cache that has these data."""
    check_mapping(settings.columns, schema)
    if num_workers is not None and num_workers < 0:
        raise ValueError(f"num_workers: {num_workers}; give 0 or more")
    sources = open_sources(data, split=settings.split, subset=settings.subset)
    folder = Path(cache) if cache is not None else default_cache_folder()
    identity = _identity(sources, tokenizer, settings, folder)
    if schema is not SFT_SCHEMA:
        identity["kinds"] = list(schema.kinds)
    if "margin" in schema.known:
        identity["margins"] = True

    def build(beside: Path) -> None:
        _build(beside, sources, kind(tokenizer, settings), schema, settings, identity, num_workers, progress)

    found = find_or_build(folder, hash_of(identity)[:32], build, intact=is_whole)
    if settings.on_bad_row == "error" and (skipped := read_skipped(found)):
        units = {file["name"]: file["unit"] for file in read_metadata(found)["files"]}
        raise bad_row(skipped[0], units[skipped[0].file])
    return found


def _identity(
    sources: list[RecordSource], tokenizer: PreTrainedTokenizerBase, settings: SFTDataSettings, cache: Path
) -> dict[str, Any]:
    """All that the tokens depend on."""
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
        },
    }


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
    fields = [_fields_of(source, settings, tokenize.renders_chat, schema) for source in sources]
    total = sum(source.size for source in sources)
    tasks = (
        (number, chunk, found)
        for number, (source, found) in enumerate(zip(sources, fields, strict=True))
        for chunk in source.chunks(tuple(found.columns.values()) if found else ())
    )
    results = _in_order(tasks, tokenize, _worker_count(num_workers, total))
    rows = [0] * len(sources)
    done = 0
    with (
        Writer(folder, margins="margin" in schema.known) as writer,
        contextlib.closing(results),
        _shown_progress(progress) as report,
    ):
        for number, chunk, result in results:
            if result.skipped and settings.on_bad_row == "error":
                raise bad_row(result.skipped[0], chunk.unit)
            writer.append(result.tokens, result.mask, result.lengths, number, result.lines, result.margins)
            writer.skipped.extend(result.skipped)
            rows[number] += len(chunk.numbers)
            done += chunk.size
            report(done, total)
        for source in sources:
            source.check_unchanged()
        names = [source.name for source in sources]
        if not any(rows):
            raise ValueError(f"data: no rows in {', '.join(names)}; give a file that has some")
        if not writer.num_samples:
            first = writer.skipped[0]
            raise ValueError(
                f"data: none of {sum(rows)} rows can be used, the first ({first.file}:{first.line}): {first.reason}; "
                "give rows that can"
            )
        files = [
            {"name": source.name, "unit": source.unit, "rows": count}
            for source, count in zip(sources, rows, strict=True)
        ]
        writer.finish({**identity, "files": files})


def _fields_of(source: RecordSource, settings: SFTDataSettings, renders_chat: bool, schema: Schema) -> Fields | None:
    columns = source.columns()
    if columns is None:
        return None
    fields = resolve(columns, settings.columns, schema, source.name)
    if fields.kind == "messages" and not renders_chat:
        raise ValueError(
            f"data.prompt_format: {settings.prompt_format!r} without a chat template, but {source.name} has "
            f"{fields['messages']!r}; give a file as data.chat_template, and set data.prompt_format=chat"
        )
    if fields.kind == "text" and settings.loss_on == "last":
        raise ValueError(
            f"data.loss_on: 'last', but {source.name} has {fields['text']!r}, all of which is trained on; set "
            "data.loss_on=all"
        )
    return fields


def _worker_count(asked: int | None, size: int) -> int:
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, 8, size // BYTES_PER_PROCESS)
    return count if count > 1 else 0


_Task = tuple[int, Chunk, Fields | None]


def _in_order(
    tasks: Iterator[_Task], tokenize: RowTokenizer, num_workers: int
) -> Generator[tuple[int, Chunk, TokenizedChunk], None, None]:
    if num_workers == 0:
        for number, chunk, fields in tasks:
            yield number, chunk, tokenize(chunk, fields)
        return
    # A process that is forked while other threads hold locks may never wake up, so each is started afresh.
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        connections: list[Connection[Any, Any]] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, tokenize), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ours.close)  # the last callback runs first: a process ends when its connection closes
            connections.append(ours)
        waiting: list[_Task | None] = [None] * num_workers
        turn = 0
        for task in tasks:
            yield from _taken(connections[turn], waiting[turn])
            _send(connections[turn], task)
            waiting[turn] = task
            turn = (turn + 1) % num_workers
        for _ in range(num_workers):
            yield from _taken(connections[turn], waiting[turn])
            waiting[turn] = None
            turn = (turn + 1) % num_workers


def _taken(connection: Connection[Any, Any], task: _Task | None) -> Iterator[tuple[int, Chunk, TokenizedChunk]]:
    if task is not None:
        try:
            result: TokenizedChunk = connection.recv()
        except (EOFError, OSError):
            raise _died() from None
        yield task[0], task[1], result


def _send(connection: Connection[Any, Any], task: _Task) -> None:
    try:
        connection.send(task[1:])
    except OSError:
        raise _died() from None


def _died() -> ValueError:
    return ValueError(
        "num_workers: a tokenising process died; see what it wrote, and use fewer if memory was short, or num_workers 0"
    )


def _serve(connection: Connection[Any, Any], tokenize: RowTokenizer) -> None:
    """A process of its own: chunks in, tokens out, until the other side closes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores already
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            chunk, fields = connection.recv()
            connection.send(tokenize(chunk, fields))


@contextlib.contextmanager
def _shown_progress(progress: bool | Progress) -> Iterator[Progress]:
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield lambda done, total: None
    else:
        rich = optional_package("rich.progress", "progress: True shows a bar", install="rich")
        console = optional_package("rich.console", "progress: True shows a bar", install="rich")
        with rich.Progress(console=console.Console(stderr=True)) as bar:
            task = bar.add_task("tokenising", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
