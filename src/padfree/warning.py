"""The category of all warnings that padfree issues.

    warnings.warn("quack-kernels 0.5 cannot be used", PadfreeWarning, stacklevel=2)

The module that Python records for a warning does not reliably show which package issued the warning. For example, for a
warning from torch's C++ code, Python records the module that called torch. A run therefore uses this category to show
only the warnings of padfree (`cli/main.py`).
"""

from __future__ import annotations


class PadfreeWarning(UserWarning):
    """A problem that does not stop a run but that the user should know about."""
