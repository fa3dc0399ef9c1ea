"""Write the two tables of measured figures: docs/experiments/figures.md, and the table in the README.

docs/experiments/figures.toml has every figure once, with its machine, versions, commit, date, command and page. For
example, this entry gives a line of both tables:

    [figures.fill]                     figures.md   | `fill`, 1,000,000 samples | 183 times as fast | ... |
    value = "183"                ->
    unit = "times as fast"             README.md    between <!-- figures --> and <!-- /figures -->
    ...                                             | `fill`, 1,000,000 samples | 183 times as fast as ... |

The lines of the README's table are templates with the keys of figures, so the README has no figure without a source.

    python bench/figures.py            # write both
    python bench/figures.py --check    # exit with 1 if one of them is out of date
"""

from __future__ import annotations

import argparse
import datetime
import re
import string
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "experiments"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"
NUMBER = re.compile(r"(?<![\w.,])\d")  # a digit that begins a number, so not the 4 of fa4


@dataclass(frozen=True)
class Figure:
    name: str
    value: str  # digit by digit as on its page
    unit: str
    hardware: str
    versions: str
    commit: str  # the commit that was measured, or "recorded in" and the commit that wrote the figure down
    date: datetime.date  # of that commit
    command: str
    page: str  # a file of docs/experiments

    def __str__(self) -> str:
        return f"{self.value} {self.unit}"


def read(path: Path = FOLDER / "figures.toml") -> dict[str, Any]:
    """Return the content of figures.toml. Its [figures] map each key to a `Figure`."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    content["figures"] = {key: figure(key, entry, content) for key, entry in content["figures"].items()}
    return content


def figure(key: str, entry: dict[str, Any], content: dict[str, Any]) -> Figure:
    names = {field.name for field in fields(Figure)}
    if wrong := names ^ {name for name, value in entry.items() if value}:
        raise ValueError(f"figures.{key}: missing or unknown fields: {', '.join(sorted(wrong))}")
    looked_up = {name: content[name][entry[name]] for name in ("hardware", "versions")}
    return Figure(**{**entry, **looked_up})


def table(*lines: tuple[str, ...]) -> list[str]:
    head, *body = [f"| {' | '.join(cells)} |" for cells in lines]
    return [head, "|" + " --- |" * len(lines[0]), *body]


def figures_page(content: dict[str, Any]) -> str:
    """Return the text of docs/experiments/figures.md, with one table for each machine and set of versions."""
    groups: dict[tuple[str, str], list[Figure]] = {}
    for entry in content["figures"].values():
        groups.setdefault((entry.hardware, entry.versions), []).append(entry)
    lines = [
        "# Current figures",
        "",
        '`python bench/figures.py` generates this page from `figures.toml`. "Commit" is the commit that was measured',
        'or, if it is unknown, "recorded in" and the commit that added the figure. The date is that of the commit.',
    ]
    for (hardware, versions), group in groups.items():
        body = [
            (
                one.name,
                str(one),
                one.commit,
                f"{one.date}",
                f"`{one.command}`",
                f"[{one.page.removesuffix('.md')}]({one.page})",
            )
            for one in group
        ]
        head = ("figure", "value", "commit", "date", "command", "page")
        lines += ["", f"## {hardware}: {versions}", "", *table(head, *body)]
    return "\n".join(lines) + "\n"


def readme_table(content: dict[str, Any]) -> str:
    """Return the table of figures between the markers of the README, with the line below it."""
    figures = content["figures"]
    body = []
    for line in content["readme"]:
        parts = list(string.Formatter().parse(line["result"]))
        if NUMBER.search("".join(literal for literal, *_ in parts)):
            raise ValueError(f"README, {line['what']}: a number in the result that is not a figure")
        used = [figures[name.partition(".")[0]] for _, name, *_ in parts if name]
        hardware = ", ".join(dict.fromkeys(one.hardware for one in used))
        pages = dict.fromkeys(one.page for one in used)
        links = ", ".join(f"[{page.removesuffix('.md')}](docs/experiments/{page})" for page in pages)
        body.append((line["what"], line["result"].format_map(figures), hardware, links))
    sources = (
        "[Current figures](docs/experiments/figures.md) lists the versions, commit and command of each figure.\n"
        "[Experiments](docs/experiments/index.md) describes what was predicted, measured and decided, and also failed\n"
        "attempts."
    )
    return "\n".join([*table(("what", "result", "on", "experiment"), *body), "", sources]) + "\n"


def generated() -> dict[Path, str]:
    """Return the text of each generated file, by the file's path."""
    content = read()
    readme = ROOT / "README.md"
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md: the markers {BEGIN.strip()} and {END.strip()} are missing")
    return {
        FOLDER / "figures.md": figures_page(content),
        readme: f"{before}{begin}\n{readme_table(content)}\n{end}{after}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args().check
    stale = [
        path for path, text in generated().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date; run python bench/figures.py' if check else 'written'}")
        if not check:
            path.write_text(generated()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
