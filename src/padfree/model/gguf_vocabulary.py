"""The vocabulary of a tokenizer as GGUF stores it, read from the tokenizer's own state.

GGUF has a name for each kind of tokenizer, and stores different values for each kind:

    byte-level BPE (Llama 3, Qwen, SmolLM2)   "gpt2"    tokens, types, merges, and the name of the pre-tokenizer
    SentencePiece BPE (Llama 2, Gemma)        "llama"   tokens, types, scores

A tokenizer is refused if `PRE_TOKENIZERS` has no name for its pre-tokenizer, because llama.cpp would split text
differently.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from padfree.errors import UserError
from padfree.warning import PadfreeWarning

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    (f"Split {_LETTERS}\\p{{N}}{{1,3}}{_SPACES}", "ByteLevel"): "llama-bpe",
    (f"Split {_LETTERS}\\p{{N}}{_SPACES}", "ByteLevel"): "qwen2",
    ("Digits individual", "ByteLevel words"): "smollm",
    ("ByteLevel words",): "gpt-2",
}
"""llama.cpp's name for each sequence of pre-tokenizers."""

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    model: str  # "gpt2" or "llama"
    tokens: list[str]
    types: list[int]
    pre: str | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    space_prefix: bool | None = None


def gguf_vocabulary(tokenizer: Any, size: int) -> GgufVocabulary:
    """Return the vocabulary of a tokenizer, for a model whose embedding has `size` rows.

    An embedding row without a token gets a name with its index: row 7 becomes `[PAD7]`. Added tokens without an
    embedding row, such as the image token of Gemma 3's text models, are left out with a warning.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {} if backend is None else json.loads(backend.to_str())
    model = state.get("model", {})
    if model.get("type") != "BPE":
        raise _refused(f"the class {type(tokenizer).__name__} is not a BPE tokenizer of the tokenizers library")
    added = {entry["content"]: entry for entry in state["added_tokens"]}
    names = _with_embedding(tokenizer, added, size)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    normalizer = state["normalizer"]
    if not model["byte_fallback"]:
        if normalizer is not None and normalizer["type"] != "NFC":
            raise _refused(f"the normalizer ({normalizer['type']}) has no counterpart in llama.cpp")
        tokens, types = _tokens(names, added, size)
        return GgufVocabulary(
            model="gpt2",
            tokens=tokens,
            types=types,
            pre=_pre_tokenizer(state["pre_tokenizer"]),
            merges=[" ".join(part.replace(" ", "\u0120") for part in merge) for merge in merges],
        )
    tokens, types = _tokens(names, added, size, unknown=model["unk_token"])
    # SentencePiece merges the pair with the highest score, so the first merge of the list gets the highest score.
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return GgufVocabulary(
        model="llama",
        tokens=tokens,
        types=types,
        scores=[-float(ranks.get(names.get(index, ""), 0)) for index in range(size)],
        space_prefix=_space_prefix(normalizer, state["pre_tokenizer"]),
    )


def _with_embedding(tokenizer: Any, added: Collection[str], size: int) -> dict[int, str]:
    """Return the tokens that have an embedding row, by id. `added`: the added tokens, which no merge produces."""
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    beyond = {index: token for index, token in sorted(names.items()) if index >= size}
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    for index, token in beyond.items():
        if token not in added or index in used:
            raise _refused(f"its token {token!r} has the id {index}, but the embedding of the model has {size} rows")
    if beyond:
        listed = ", ".join(list(beyond.values())[:5]) + (", ..." if len(beyond) > 5 else "")
        number = f"{len(beyond)} added token{'s' if len(beyond) > 1 else ''}"
        warnings.warn(
            f"the GGUF file lacks {number} of the tokenizer, without a row in the embedding of the model ({listed})",
            PadfreeWarning,
            2,
        )
    return {index: token for index, token in names.items() if index < size}


def _refused(fact: str) -> UserError:
    return UserError("tokenizer", f"cannot be written to a GGUF file: {fact}", "export the model folder instead")


def _tokens(
    names: dict[int, str], added: dict[str, Any], size: int, unknown: str | None = None
) -> tuple[list[str], list[int]]:
    from gguf import TokenType

    tokens, types = [], []
    for index in range(size):
        token, kind = names.get(index), TokenType.NORMAL
        if token is None:
            token, kind = f"[PAD{index}]", TokenType.UNUSED
        elif token == unknown:
            kind = TokenType.UNKNOWN
        elif token in added:
            kind = TokenType.CONTROL if added[token]["special"] else TokenType.USER_DEFINED
            if kind == TokenType.USER_DEFINED:
                token = token.replace("\u2581", " ")
        elif unknown is not None and BYTE.fullmatch(token):
            kind = TokenType.BYTE
        tokens.append(token)
        types.append(int(kind))
    return tokens, types


def _pre_tokenizer(state: dict[str, Any] | None) -> str:
    parts: Sequence[dict[str, Any]] = [] if state is None else state.get("pretokenizers", [state])
    described = tuple(_described(part) for part in parts)
    name = PRE_TOKENIZERS.get(described)
    if name is None:
        raise _refused(f"llama.cpp has no name for its pre-tokenizer ({', '.join(described) or 'none'})")
    return name


def _described(part: dict[str, Any]) -> str:
    kind = str(part["type"])
    if kind == "Split" and "Regex" in part["pattern"] and part["behavior"] == "Isolated" and not part["invert"]:
        return f"Split {part['pattern']['Regex']}"
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return "ByteLevel words" if part["use_regex"] else "ByteLevel"
    if kind == "Digits" and part["individual_digits"]:
        return "Digits individual"
    return f"other {kind}"


def _space_prefix(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether the tokenizer adds a space before a text.

    Apart from this first space, the tokenizer must only replace each space with U+2581. Raises `UserError` if it
    changes the text in other ways.
    """
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    if steps == [replaces] and (pre_tokenizer is None or pre_tokenizer["type"] == "Split"):
        return False
    if steps == [{"type": "Prepend", "prepend": "\u2581"}, replaces] and pre_tokenizer is None:
        return True
    raise _refused("the tokenizer changes the text in a way that llama.cpp's SentencePiece tokenizer does not")
