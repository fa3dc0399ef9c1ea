"""What the first models of a process cost beyond later ones. Imported once by the server that ranks are forked from."""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from padfree.model import attach
from padfree.testing.models import build

get_checkpoint_conversion_mapping("qwen3")  # it makes a table of all architectures first, of 800 regular expressions
for name in ("llama", "qwen3"):
    attach(build(name))  # tries how its architecture behaves in packed rows
