"""The names of `padfree.testing.models`, for tests that have not moved to it."""

from padfree.testing.models import *  # noqa: F403
