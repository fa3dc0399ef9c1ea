"""The forward pass is layout-free to the bit: a sample has the same log-probabilities and entropies in every layout.

On a CPU in float32, for every architecture of `TESTED` without a recurrent state. Packs are padded to a multiple of
`PACK_MULTIPLE` tokens. Experts get few tokens each; their matmuls have blocks of rows (`padfree.model.block_matmuls`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.cp import shard
from padfree.head import score
from padfree.layers.recompute import recompute_layers
from padfree.model import TESTED, attach, hidden_states, lm_head_of
from padfree.model.block_matmuls import use_block_matmuls
from padfree.model.sharing import sharing_obstacle
from padfree.model.structure import layers_of
from padfree.packing import CostModel, collate
from padfree.packing.collate import prefixes_of, with_shared_prefixes
from padfree.rollout.engines.in_process.exact_operators import model_problem
from padfree.rollout.engines.in_process.row_trial import PACK_MULTIPLE
from padfree.sample import Sample
from padfree.testing.models import ARCHITECTURES, VOCABULARY, build

PROMPTS, RESPONSES = (7, 30, 1), (1, 20, 55)

UNPROMISED = ("state", "layers of type", "counts positions", "custom code")
"""Parts of the reasons why an architecture is not promised."""

Scores = dict[int, tuple[Tensor, Tensor]]


def make_samples() -> list[Sample]:
    """Three prompts with three responses each, so that samples can share prefixes."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, length) for length in PROMPTS]
    return [
        Sample(
            tokens=np.concatenate([prompt, generator.integers(0, VOCABULARY, length)]),
            loss_mask=np.arange(len(prompt) + length) >= len(prompt),
            group=group,
            uid=3 * group + number,
        )
        for group, prompt in enumerate(prompts)
        for number, length in enumerate(RESPONSES)
    ]


def scores_of(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    pack: Sequence[int],
    *,
    shares: bool = False,
    grad: bool = False,
    backend: str = "auto",
) -> Scores:
    """Log-probabilities and entropies of the samples of a pack, by sample."""
    chosen = [samples[i] for i in pack]
    packed = collate(chosen)
    if shares:
        packed = with_shared_prefixes(packed, chosen, prefixes_of(chosen, True, CostModel(linear=1.0)))
    packed = packed.padded_to(packed.num_tokens + -packed.num_tokens % PACK_MULTIPLE)
    local = shard(packed, backend=backend)
    with torch.set_grad_enabled(grad):
        scores = score(hidden_states(model, local), lm_head_of(model), local.labels, entropy=True)
    assert scores.entropy is not None
    pairs = zip(packed.unpack(scores.logprobs.detach()), packed.unpack(scores.entropy.detach()), strict=True)
    return dict(zip(pack, pairs, strict=True))


def assert_equal(found: Scores, expected: Scores, what: str) -> None:
    for number, pair in found.items():
        for name, values, wanted in zip(("log-probabilities", "entropies"), pair, expected[number], strict=True):
            assert torch.equal(values, wanted), f"{what}: {name} of sample {number}"


def random_layout(generator: np.random.Generator, count: int) -> list[list[int]]:
    order = generator.permutation(count)
    cuts = np.sort(generator.choice(np.arange(1, count), generator.integers(1, 4), replace=False))
    return [part.tolist() for part in np.split(order, cuts)]


def architectures() -> list[str]:
    return [name for name, (class_name, _) in ARCHITECTURES.items() if class_name in TESTED]


@pytest.mark.parametrize("name", architectures())
def test_scores_have_the_same_bits_in_every_layout(name: str) -> None:
    model = attach(build(name)).eval()
    use_block_matmuls(model)
    reason = model_problem(model, torch.device("cpu"))
    if reason is not None and any(part in reason for part in UNPROMISED):
        pytest.skip(reason)
    samples = make_samples()
    everything = list(range(len(samples)))
    expected = scores_of(model, samples, everything)
    assert not torch.equal(expected[1][0][-20:], expected[2][0][-20:]), "scores that do not depend on the sample"
    for i in everything if name == "llama" else everything[::4]:  # the shapes of matmuls are alike in all architectures
        assert_equal(scores_of(model, samples, [i]), expected, "alone")
    generator = np.random.default_rng(1)
    for _ in range(2):
        for pack in random_layout(generator, len(samples)):
            assert_equal(scores_of(model, samples, pack), expected, f"in the pack {pack}")
    assert_equal(scores_of(model, samples, everything, grad=True), expected, "with gradients")
    if sharing_obstacle(model) is None:
        # Nodes of a prefix tree divide the queries of a sample otherwise than the fastest attention on a CPU does.
        expected = scores_of(model, samples, everything, backend="tiles")
        assert_equal(scores_of(model, samples, [4, 0, 7], backend="tiles"), expected, "with tiles")
        for pack in (everything, [0, 1, 2], [7, 3, 4, 8]):
            assert_equal(
                scores_of(model, samples, pack, shares=True, backend="tiles"),
                expected,
                f"with shared prefixes in {pack}",
            )


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_bit(mode: str) -> None:
    samples = make_samples()
    expected = scores_of(attach(build("qwen3")).eval(), samples, range(9))
    model = attach(build("qwen3"))
    recompute_layers(layers_of(model), mode)  # type: ignore[arg-type]
    assert_equal(scores_of(model, samples, [4, 0, 7], grad=True), expected, mode)


def test_a_single_label_has_the_bits_of_many() -> None:
    """The head multiplies a single hidden state as it multiplies many."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(200, 48), torch.randn(300, 48), torch.arange(200)
    expected = score(hidden, weight, labels, entropy=True)
    for count in (1, 2, 3, 15, 17):
        found = score(hidden[50 : 50 + count], weight, labels[50 : 50 + count], entropy=True)
        assert torch.equal(found.logprobs, expected.logprobs[50 : 50 + count])
        assert torch.equal(found.entropy, expected.entropy[50 : 50 + count])  # type: ignore[arg-type, index]
