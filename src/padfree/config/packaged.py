"""Names of environments that come from another package.

    verifiers:wordle?num_train_examples=100&mode="hard"      an environment of the verifiers package, with arguments
    verifiers:wordle#eval                                     as a data path: the held-out rows of this environment
    openenv:http://127.0.0.1:8000?turns=8                    a server of an OpenEnv environment

The name of an environment also names its data (`data.path`). The values of arguments are JSON, or else text.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from padfree.errors import UserError

VERIFIERS, OPENENV = "verifiers", "openenv"
PACKAGES = (VERIFIERS, OPENENV)
DISTRIBUTIONS = {VERIFIERS: ("verifiers",), OPENENV: ("openenv", "openenv-core")}
SUPPORTED = {VERIFIERS: ((0, 2), (0, 4)), OPENENV: ((0, 2), (1, 0))}
"""The range of supported versions of each package: the first supported version, and the first one after the range."""

HELD_OUT = "eval"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedEnvironment:
    """An environment of another package, such as verifiers. `name`: the part of the environment's name after the
    colon, such as `wordle` in `verifiers:wordle`.
    """

    package: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    held_out: bool = False


def is_packaged(name: str) -> bool:
    """Return whether the name of an environment begins with a supported package, as in `verifiers:wordle`."""
    return name.partition(":")[0] in PACKAGES and ":" in name


def packaged_environment(name: str, setting: str) -> PackagedEnvironment:
    """Parse the name of an environment. `setting`: the setting whose value is `name`, for error messages."""
    package, _, rest = name.partition(":")
    rest, mark, part = rest.partition("#")
    own, _, query = rest.partition("?")
    if not own:
        raise UserError(setting, "has no name after the colon", f"give {package}:NAME", value=name)
    if mark and part != HELD_OUT:
        raise UserError(
            setting, f"has an unknown part {part!r}", f"leave it out, or give #{HELD_OUT} for held-out rows", value=name
        )
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise UserError(
            setting, f"has arguments {query!r} that cannot be read", "give them as name=value&name=value", value=name
        ) from None
    arguments = {key: _value(text) for key, text in pairs}
    if len(arguments) != len(pairs):
        raise UserError(setting, "gives an argument twice", "give each argument once", value=name)
    return PackagedEnvironment(package=package, name=own, arguments=arguments, held_out=bool(mark))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_package(package: str, setting: str, value: str) -> None:
    """Raise a `UserError` if the package is missing or has an unsupported version. Nothing is imported."""
    install = 'pip install "padfree[environments]"'
    if importlib.util.find_spec(package) is None:
        raise UserError(setting, f"needs the package {package}, which is not installed", install, value=value)
    for distribution in DISTRIBUTIONS[package]:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        first, end = SUPPORTED[package]
        found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        if not first <= found < end:
            wanted = f"{distribution}>={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"
            raise UserError(
                setting, f"needs {wanted}, but {version} is installed", f'pip install "{wanted}"', value=value
            )
        return
