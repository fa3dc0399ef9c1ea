"""A first look at the inputs of a run: names, model folders and columns, in well under a second.

    check_inputs(config)  models and data files exist
                          model folders have a config, weights and a tokenizer
                          the first row of each data file has the columns that the command needs

Nothing here imports torch, which takes seconds. Everything is checked again, and in full, by `padfree.train.preflight`;
what this look leaves out (data sets of the Hub, mixtures, large JSON arrays) is refused there.
"""

from __future__ import annotations

from pathlib import Path

from padfree.config import Config
from padfree.config.hub import DATA_FILES, check_names
from padfree.config.model_folder import check_model_folders
from padfree.data.fields import check_mapping, resolve
from padfree.data.formats import SCHEMAS
from padfree.data.sources import open_sources

LARGE = 1 << 24
"""A JSON array is parsed as a whole: files of more bytes are left to the run."""


def check_inputs(config: Config) -> None:
    """Refuse inputs that are missing or cannot be read, before torch is imported."""
    check_names(config)
    check_model_folders(config)
    check_columns(config)


def check_columns(config: Config) -> None:
    """Refuse data files whose first row lacks the columns that the command needs."""
    paths = [Path(name).expanduser() for name in config.data.path]
    if not all(path.suffix in DATA_FILES and path.is_file() for path in paths):
        return
    if any(path.suffix == ".json" and path.stat().st_size > LARGE for path in paths):
        return
    schema = SCHEMAS["prompts" if config.rollout.source is not None else config.loss.task.data_format]
    check_mapping(config.data.columns, schema)
    for source in open_sources(list(config.data.path)) if paths else ():
        first = source.first_row()
        if first is not None:
            resolve(first, config.data.columns, schema, source.name)
