"""The category of all warnings that padfree issues.

    warnings.warn("quack-kernels 0.5 cannot be used", PadfreeWarning, stacklevel=2)

Python's module of a warning does not show where it comes from: a warning of torch's C++ code gets the module that
called torch. This category does, so that a run can show only the warnings of padfree (`cli/main.py`).
"""

from __future__ import annotations


class PadfreeWarning(UserWarning):
    """A problem that does not stop a run but that the user should know about."""
