"""Check the inputs of a run in well under a second: file names, model folders and columns.

`check_inputs(config)` checks that

- models and data files exist,
- model folders have a config, weights and a tokenizer,
- the first row of each data file has the columns that the command needs.

The module does not import torch, because this import takes seconds. `padfree.train.preflight` repeats the checks later,
and also checks the inputs that are left out here: data sets of the Hub, mixtures and large JSON arrays.
"""

from __future__ import annotations

from pathlib import Path

from padfree.config import Config
from padfree.config.hub import check_names
from padfree.config.inputs import is_data_file
from padfree.config.model_folder import check_model_folders
from padfree.data.fields import check_mapping
from padfree.data.formats import SCHEMAS, reading_images
from padfree.data.record_source import resolve_source
from padfree.data.sources import open_sources

LARGE = 1 << 24
"""A file with a JSON array of more than this many bytes is not checked.

To read the first row of a JSON array, the whole array must be parsed, which takes too long for a large file.
"""


def check_inputs(config: Config) -> None:
    """Raise a `UserError` if an input is missing or cannot be read. Torch is not imported."""
    check_names(config)
    check_model_folders(config)
    check_columns(config)


def check_columns(config: Config) -> None:
    """Raise a `UserError` if the first row of a data file lacks a column that the command needs."""
    paths = [Path(name).expanduser() for name in config.data.path]
    if not all(is_data_file(path) and path.is_file() for path in paths):
        return
    if any(path.suffix.lower() == ".json" and path.stat().st_size > LARGE for path in paths):
        return
    schema = SCHEMAS["prompts" if config.rollout.source is not None else config.loss.task.data_format]
    if config.model.vision:
        schema = reading_images(schema)
    check_mapping(config.data.columns, schema)
    for source in open_sources(list(config.data.path)) if paths else ():
        resolve_source(source, config.data.columns, schema, on_bad_row=config.data.on_bad_row)
