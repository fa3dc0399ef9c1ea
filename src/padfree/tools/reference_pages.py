"""Write the reference pages of the documentation from the code.

    python -m padfree.tools.reference_pages docs/reference                     index, settings, metrics, backends
    python -m padfree.tools.reference_pages docs/reference --architectures     all pages; takes minutes

The pages are kept in git. tests/test_reference.py fails if a page differs from what this module generates.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from padfree.attention.selection import capability_table
from padfree.config.settings_table import SettingEntry, section_entries, setting_entries
from padfree.record.metric_table import METRIC_GROUPS, MetricGroup

SECTION_PAGES = {
    "model": "[attention](../concepts/attention.md)",
    "data": "[data](../guides/data.md)",
    "data.sources.N": "[mixtures](../guides/data.md#mixtures)",
    "batch": "[packing](../concepts/packing.md)",
    "rollout": "[environments](../guides/environments.md) and [vLLM](../guides/vllm.md)",
    "rollout.launch": "[vLLM](../guides/vllm.md)",
    "loss": "[losses](../concepts/losses.md)",
    "critic": "[losses](../concepts/losses.md)",
    "parallel": "[context parallelism](../concepts/context-parallelism.md) and [expert "
    "parallelism](../concepts/expert-parallelism.md)",
    "checkpoint": "[checkpoints](../guides/checkpoints.md)",
}
"""The pages that explain each section of the settings, as Markdown links."""


def quick_pages() -> dict[str, str]:
    """Return the Markdown of the reference pages, keyed by file name. The page of the architectures is not included."""
    return {
        "index.md": index_page(),
        "settings.md": settings_page(),
        "metrics.md": metrics_page(),
        "backends.md": backends_page(),
    }


def index_page() -> str:
    return """# Reference

These pages are generated from the code: `make reference`.

- [Settings](settings.md): every setting of a recipe
- [Metrics](metrics.md): every metric that a run writes
- [Attention backends](backends.md): what each backend supports
- [Architectures](architectures.md): every causal language model and image-text model of transformers, attached
  or refused

```{toctree}
:hidden:

settings
metrics
backends
architectures
```
"""


def settings_page() -> str:
    """Return the Markdown page of all settings, with one table per section."""
    entries, sections = setting_entries(), section_entries()
    parts = [
        """# Settings

Every setting of a recipe. `padfree settings` prints this table, `padfree settings rollout` one section, and
`padfree settings --json` everything as JSON.

A setting whose default is (required) must be given. In an override, `none` switches a setting off. "Needs" names the
settings that must be set before this one may differ from its default.

The last column says whether a setting may change when a run resumes from a checkpoint:

- may change, must stay: in every run
- may change with batch.samples: if the run has `batch.samples` and not `batch.tokens`
- may change between rollout batches: if the checkpoint is not in the middle of a rollout batch
- may change within RL: from a policy loss to another policy loss
- may change if the samples stay the same: paths and formats may change, the tokens that are trained may not
"""
    ]
    names = _name_pattern(entries)
    for section in sections.values():
        see = SECTION_PAGES.get(section.name)
        parts.append(f"## {section.name}\n\n{section.meaning}{f' See {see}.' if see else ''}\n")
        rows = [["setting", "type", "default", "bounds", "meaning", "on resume"]]
        for entry in (each for each in entries if each.section == section.name):
            default = entry.default_words if entry.required else f"`{entry.default_words}`"
            meaning = names.sub(r"`\g<0>`", _meaning(entry))
            bounds = names.sub(r"`\g<0>`", entry.bounds)
            rows.append([f"`{entry.name}`", _type_cell(entry), default, bounds, meaning, entry.resume])
        parts.append(_table(rows))
    return "\n".join(parts)


def _meaning(entry: SettingEntry) -> str:
    needs = f" Needs {' and '.join(entry.needs)}." if entry.needs else ""
    return f"{entry.meaning}{needs}{f' Formerly `{entry.section}.{entry.formerly}`.' if entry.formerly else ''}"


def _type_cell(entry: SettingEntry) -> str:
    """Return the type of a setting as Markdown, with its choices as code, e.g. `auto` or int."""
    parts = re.split(r"(, | or )", entry.type)
    return "".join(f"`{part}`" if part in entry.choices else part for part in parts)


def _name_pattern(entries: Sequence[SettingEntry]) -> re.Pattern[str]:
    """Return a regular expression for names of settings, with or without a value, e.g. `rollout.filter=equal`."""
    names = sorted((entry.name for entry in entries if "." in entry.name), key=len, reverse=True)
    return re.compile(rf"(?<![\w.`/])(?:{'|'.join(map(re.escape, names))})(?![\w])(?:=[\w/.-]*\w)?")


def metrics_page() -> str:
    """Return the Markdown page of all metrics, with one table per group."""
    parts = [
        """# Metrics

Every metric that a run writes to metrics.jsonl and evaluation.jsonl in its folder. Rank 0 writes them. A word in
capitals stands for a name: `source/NAME/loss` is written once for each source of a mixture.
"""
    ]
    return "\n".join([*parts, *map(_group, METRIC_GROUPS)])


def _group(group: MetricGroup) -> str:
    rows = [["metric", "unit", "meaning"]]
    rows += [[f"`{metric.name}`", metric.unit, metric.meaning] for metric in group.metrics]
    return f"## {group.title}\n\n{group.condition}\n\n{_table(rows)}"


def backends_page() -> str:
    """Return the Markdown page with the capabilities of the attention backends."""
    return f"""# Attention backends

`model.attention=auto` takes the first backend of this table that supports the device, the dtype and the layers of the
model. If the setting names a backend, this backend is used, or refused with a reason. The column "ring" says whether
ring attention can use the backend. The column "`auto`" says for which dtypes the backend is chosen by default. The page
[Attention](../concepts/attention.md) explains the backends.

{capability_table()}"""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of these rows; the first row is the header."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the reference pages of the documentation.")
    parser.add_argument("folder", type=Path, help="folder to write to, such as docs/reference")
    parser.add_argument(
        "--architectures", action="store_true", help="also try every architecture, which takes several minutes"
    )
    arguments = parser.parse_args(words)
    pages = quick_pages()
    if arguments.architectures:
        from padfree.tools.architectures import architectures_page, try_all, try_all_image_text

        pages["architectures.md"] = architectures_page(try_all(), try_all_image_text())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (arguments.folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
