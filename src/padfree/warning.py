"""The category of all warnings that padfree gives.

    warnings.warn("quack-kernels 0.5 cannot be used", PadfreeWarning, stacklevel=2)

The module that Python reports for a warning does not identify its origin: C++ code of torch warns in the name of the
Python code that called it. The category does, so a run can show the warnings of padfree only (`cli/main.py`).
"""

from __future__ import annotations


class PadfreeWarning(UserWarning):
    """A problem that does not stop a run but that the user should know about."""
