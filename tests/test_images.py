"""Images of samples: what is checked, how prefixes are compared, and how packs hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from padfree.images import Image, prefix_keys
from padfree.packing.collate import collate
from padfree.sample import Sample
from tests.refused import refused

STAR = 9


def image(digest: str, positions: Any, width: int = 2) -> Image:
    pixels = np.full((len(positions), width), ord(digest[0]), dtype=np.float32)
    return Image(digest=digest, positions=positions, load=lambda: {"pixel_values": pixels})


def test_the_pack_of_the_docstring() -> None:
    """Pack 7 * * * 9 | 4 * * * 2 | 8 * * 1 with images a, a, b."""
    samples = [
        Sample(tokens=[7, STAR, STAR, STAR, 5], images=(image("a", [1, 2, 3]),)),
        Sample(tokens=[4, STAR, STAR, STAR, 2], images=(image("a", [1, 2, 3]),)),
        Sample(tokens=[8, STAR, STAR, 1], images=(image("b", [1, 2]),)),
    ]
    batch = collate(samples)
    assert batch.images is not None
    assert batch.images.index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.images.counts == batch.images.patches == (3, 2)
    assert batch.images.tokens.tolist() == [1, 2, 3, 6, 7, 8, 11, 12]
    assert (batch.images.num_features, batch.images.placeholder) == (5, STAR)
    assert batch.images.inputs["pixel_values"][:, 0].tolist() == [97.0] * 3 + [98.0] * 2
    assert batch.rotary_positions is None
    assert batch.to("cpu").padded_to(20).images is not None


def test_text_has_no_images() -> None:
    batch = collate([Sample(tokens=[1, 2, 3])])
    assert batch.images is None
    assert batch.rotary_positions is None


def test_prefixes_are_compared_by_images() -> None:
    tokens = [np.array([7, STAR, STAR, 5])] * 4
    images = [(image(digest, [1, 2]),) for digest in "aab"]
    keys = prefix_keys(tokens, [*images, ()])
    assert keys[0].tolist() == keys[1].tolist() == [7, -1, -1, 5]
    assert keys[2].tolist() == [7, -2, -2, 5]
    assert keys[3] is tokens[3]
    assert tokens[0].tolist() == [7, STAR, STAR, 5]


def test_truncation_keeps_images_whole() -> None:
    sample = Sample(
        tokens=[1, STAR, STAR, 2, 3, STAR, 4],
        images=(image("a", [1, 2]), image("b", [5])),
        rotary_positions=np.arange(21).reshape(3, 7),
    )
    shorter = sample.truncated(4)
    assert [one.digest for one in shorter.images] == ["a"]
    assert shorter.rotary_positions is not None
    assert shorter.rotary_positions[:, -1].tolist() == [3, 10, 17]
    assert sample.truncated(1).images == ()
    assert len(sample.truncated(7).images) == 2
    with refused("length", "cuts an image"):
        sample.truncated(2)


@pytest.mark.parametrize(
    ("tokens", "images", "problem"),
    [
        ([1, STAR, 2], ["a"], "a str"),
        ([1, STAR, STAR], [image("a", [1])], "exactly"),
        ([1, STAR, 2], [image("a", [1, 2])], "exactly"),
        ([1, STAR, STAR], [image("a", [2]), image("b", [1])], "order"),
        ([1, STAR], [image("a", [1, 2])], "a placeholder at index 2, but there are only 2 tokens"),
    ],
)
def test_images_must_cover_their_placeholders(tokens: list[int], images: list[Any], problem: str) -> None:
    with refused("images", problem):
        Sample(tokens=tokens, images=tuple(images))


def test_a_policy_may_sample_a_placeholder() -> None:
    given = {"tokens": [1, STAR, 2, STAR], "images": (image("a", [1]),), "loss_mask": [False, False, True, True]}
    with refused("images", "exactly"):
        Sample(**given)
    Sample(**given, logprobs=np.zeros(4))


@pytest.mark.parametrize("positions", [[], [2, 1], [1, 1]])
def test_positions_ascend(positions: list[int]) -> None:
    with refused("positions", "ascending"):
        image("a", positions)


def test_a_digest_is_not_empty() -> None:
    with refused("digest", "empty"):
        Image(digest="", positions=np.array([1]), load=dict)


def test_rotary_positions_have_a_column_per_token() -> None:
    with refused("rotary_positions", "3 tokens"):
        Sample(tokens=[1, 2, 3], rotary_positions=np.zeros((3, 2), dtype=np.int64))
    samples = [Sample(tokens=[1, 2], rotary_positions=np.zeros((rows, 2), dtype=np.int64)) for rows in (3, 2)]
    with refused("rotary_positions", "different numbers of rows: 2, 3"):
        collate(samples)


def test_images_of_a_pack_must_agree() -> None:
    def sample(token: int, one: Image) -> Sample:
        return Sample(tokens=[1, *[token] * len(one.positions)], images=(one,))

    first = sample(STAR, image("a", [1]))
    with refused("digest", "'a'"):
        collate([first, sample(STAR, image("a", [1, 2]))])
    with refused("images", "different placeholder tokens: 8, 9"):
        collate([first, sample(8, image("b", [1]))])
    with refused("images", "shapes"):
        collate([first, sample(STAR, image("b", [1], width=3))])
    other = Image(digest="b", positions=np.array([1]), load=lambda: {"pixels": np.zeros((1, 2))})
    with refused("images", "pixel_values"):
        collate([first, sample(STAR, other)])
    with refused("images", "missing for 2 tokens"):
        collate([first, Sample(tokens=[STAR, STAR])])
