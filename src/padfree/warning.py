"""The category of all warnings that padfree issues.

    warnings.warn("quack-kernels 0.5 cannot be used", PadfreeWarning, stacklevel=2)

The module that Python reports for a warning does not identify its origin: a warning from torch's C++ code is reported
for the Python code that called torch. The category identifies the origin, so a run can show only the warnings of
padfree (`cli/main.py`).
"""

from __future__ import annotations


class PadfreeWarning(UserWarning):
    """A problem that does not stop a run but that the user should know about."""
