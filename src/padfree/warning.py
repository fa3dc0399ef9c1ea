"""The category of every warning that padfree itself gives.

    warnings.warn("quack-kernels 0.5 cannot be used", PadfreeWarning, stacklevel=2)

The module that Python names in a warning does not say whose it is: C++ code of torch warns in the name of the Python
code that called it. The category does, so that a run shows padfree's warnings and no others (`cli/main.py`).
"""

from __future__ import annotations


class PadfreeWarning(UserWarning):
    """Something that a run gets over, and that its user should know."""
