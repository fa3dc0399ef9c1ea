"""`with refused("batch.samples"): ...`: the block raises a `UserError` about this setting, on one line, with a fix.

The wording of a message is the source's alone. Tests say which setting is named; where one setting has many mistakes
(the files of a model, the rows of a file), `about` is a pattern of the facts that tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from padfree.errors import UserError


@contextmanager
def refused(setting: str, about: str | None = None) -> Iterator[pytest.ExceptionInfo[UserError]]:
    with pytest.raises(UserError, match=about) as caught:
        yield caught
    check_user_error(caught.value)
    assert caught.value.setting == setting, str(caught.value)


def check_user_error(error: UserError) -> None:
    """Its line is one line, begins with the setting and ends with the fix."""
    line = str(error)
    assert "\n" not in line, line
    assert error.setting, line
    assert error.fix, line
    assert line.startswith(f"{error.setting}: "), line
    assert line.endswith(f"; {error.fix}"), line
