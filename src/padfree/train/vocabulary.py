"""Check that all models of a run use the same ids for the same tokens.

The policy, the reference, the teacher and the critic receive token ids of the run's tokenizer (`model.tokenizer`, by
default that of `model.path`). Each model's own tokenizer must give these tokens the same ids. A reward model receives
text, so it may have any tokenizer.

Exception: the tokenizer of the trained model may lack tokens of `model.tokenizer`. The run then trains their
embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from padfree.config import ModelConfig
from padfree.config.hub import GIVEN_TEXT
from padfree.config.model_folder import has_tokenizer
from padfree.errors import UserError
from padfree.train.training_data import open_tokenizer


def check_vocabularies(model: ModelConfig, names: Mapping[str, str], tokenizer: Any) -> Iterator[str]:
    """Raise an error if a model's own tokenizer gives a token another id than the run's `tokenizer` does.

    `names`: for each setting that names a model, the model's name. Yield a note for each model without a tokenizer.
    """
    own_name = model.tokenizer or model.path
    compared = {unique_name(own_name)}
    for setting, name in names.items():
        if setting in GIVEN_TEXT or setting == "model.tokenizer" or unique_name(name) in compared:
            continue
        compared.add(unique_name(name))
        trained = setting == "model.path"
        if trained and (model.init == "random" or Path(name).is_file()):
            continue  # an untrained model has not learned any ids
        other = _tokenizer_of(name, setting, model.trust_remote_code)
        if tokenizer is None or other is None:
            missing = own_name if tokenizer is None else name
            same = f"assuming that token ids have the same meaning in {name} and {own_name}"
            yield f"{setting}: {missing} has no tokenizer; {same}"
            continue
        note = compare_vocabularies(tokenizer.get_vocab(), other.get_vocab(), setting, name, own_name, may_lack=trained)
        if note is not None:
            yield note


def compare_vocabularies(
    own: Mapping[str, int], other: Mapping[str, int], setting: str, name: str, own_name: str, *, may_lack: bool = False
) -> str | None:
    """Raise a `UserError` if a model's vocabulary lacks a token of the run's tokenizer, or gives it another id.

    `own`: the run's vocabulary. `other`: the model's vocabulary. `may_lack`: return a note if tokens are missing and
    their ids are unused.
    """
    if own.items() <= other.items():
        return None
    differs = sorted((index, token) for token, index in own.items() if other.get(token) != index)
    lacks = [(index, token) for index, token in differs if token not in other]
    if may_lack and len(lacks) == len(differs) and not {index for index, _ in lacks} & set(other.values()):
        index, token = lacks[0]
        return (
            f"model.tokenizer: {own_name} has {len(lacks):,} tokens that the tokenizer of {name} does not have (the "
            f"first is {token!r}, id {index}); the embeddings of these tokens are untrained"
        )
    index, token = differs[0]
    there = str(other[token]) if token in other else "unknown"
    more = f", and {len(differs) - 1:,} more differ" if len(differs) > 1 else ""
    if may_lack:
        raise UserError(
            "model.tokenizer",
            f"{own_name} has other token ids than the tokenizer of {name}: the id of {token!r} is {index}, but for the "
            f"model it is {there}{more}",
            "leave out model.tokenizer, or give a tokenizer with the ids of the model",
        )
    only_lacks = len(lacks) == len(differs)
    cure = f", or set model.tokenizer={name} if the trained model knows its tokens" if only_lacks else ""
    raise UserError(
        setting,
        f"{name} has other token ids than {own_name}: {token!r} is {there} in that model, {index} in this run{more}",
        f"give a model with the same vocabulary{cure}",
    )


def _tokenizer_of(name: str, setting: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of the model `name`, or return None if the model has none. `setting`: for error messages."""
    if Path(name).exists():
        return open_tokenizer(name, setting, trust_remote_code) if has_tokenizer(name) else None
    try:
        return open_tokenizer(name, setting, trust_remote_code)
    except UserError:
        return None  # whether a model on the Hub has tokenizer files is known only after a request


def unique_name(name: str) -> str:
    """Return a unique name of a model: its absolute path if it is a file or folder, otherwise its Hub id."""
    return str(Path(name).resolve()) if Path(name).exists() else name
