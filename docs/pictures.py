"""Draw docs/layouts.svg: one pack, and the tokens of each context rank in every layout.

python docs/pictures.py

    documents    one bar; neighbouring documents have different shades of grey
    layout       the same bar in the colours of the ranks; on the right, the causal work of each rank over the mean
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from padfree.batch import Layout
from padfree.choices import LayoutKind
from padfree.cp import make_layout, work
from padfree.segments import Segments

LENGTHS = (1400, 120, 300, 90, 640, 60, 210, 30, 180, 110, 70, 390, 250, 40, 160)
RANKS = 4
COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377")
GREYS = ("#9a9a9a", "#c4c4c4")
LEFT, WIDTH, BAR, GAP, BARS = 96, 620, 26, 30, 120


def pack_segments() -> Segments:
    """The documents, padded to a multiple of the number of ranks."""
    return Segments.from_lengths(LENGTHS, pad_length=-sum(LENGTHS) % RANKS)


def picture() -> str:
    segments = pack_segments()
    kinds = get_args(LayoutKind)
    parts = [_documents(segments)]
    for index, kind in enumerate(kinds, start=1):
        parts.append(_layout(segments, make_layout(segments, RANKS, kind), index * (BAR + GAP) + 20))
    height = (len(kinds) + 1) * (BAR + GAP) + 10
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + BARS + 70} {height}" '
        'font-family="sans-serif" font-size="13" role="img" aria-label="context-parallel layouts of one pack">\n'
        f"{body}\n</svg>\n"
    )


def _documents(segments: Segments) -> str:
    offsets = segments.offsets
    bars = [
        _bar(segments, start, end, 20, GREYS[index % 2])
        for index, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    ]
    caption = _text(LEFT + WIDTH + 12, 38, "work / mean")
    return "\n".join([_text(0, 38, "documents"), *bars, caption])


def _layout(segments: Segments, layout: Layout, top: float) -> str:
    pairs = work(layout, segments)
    shares = pairs / pairs.mean()
    bars = [
        _bar(segments, start, end, top, COLOURS[rank])
        for rank in range(RANKS)
        for start, end in zip(layout.starts[rank].tolist(), layout.ends[rank].tolist(), strict=True)
    ]
    thin = BAR / RANKS
    meters = [
        f'<rect x="{LEFT + WIDTH + 12}" y="{top + rank * thin:.1f}" width="{share * BARS / 2.2:.1f}" '
        f'height="{thin - 1:.1f}" fill="{COLOURS[rank]}"/>'
        for rank, share in enumerate(shares.tolist())
    ]
    slowest = _text(LEFT + WIDTH + 18 + shares.max() * BARS / 2.2, top + 18, f"{shares.max():.2f}")
    return "\n".join([_text(0, top + 18, layout.kind), *bars, *meters, slowest])


def _bar(segments: Segments, start: int, end: int, top: float, colour: str) -> str:
    scale = WIDTH / segments.num_tokens
    return (
        f'<rect x="{LEFT + start * scale:.1f}" y="{top}" width="{(end - start) * scale:.1f}" height="{BAR}" '
        f'fill="{colour}" stroke="#ffffff" stroke-width="0.6"/>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#888888">{text}</text>'


if __name__ == "__main__":
    (Path(__file__).parent / "layouts.svg").write_text(picture(), encoding="utf-8")
