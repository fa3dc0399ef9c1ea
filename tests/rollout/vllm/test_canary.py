"""What the canary accepts and what it rejects."""

from __future__ import annotations

import numpy as np
import pytest

from padfree.rollout.engines.servers.canary import LENGTH, NUM_SAMPLED, Canary, CanaryScores, canary_sequences
from padfree.rollout.engines.vllm import VllmServer
from padfree.testing.tokenizers import tiny_tokenizer
from tests.refused import refused
from tests.rollout.rollout_cases import letters_tokenizer

NUM = 240


def scores(values: np.ndarray, sampled: float = -1.0) -> CanaryScores:
    return CanaryScores(fixed=values, sampled=np.full(8, sampled))


def random_values(seed: int, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(NUM)


TRAINER = -3.0 + random_values(0)
STEP = random_values(1, 0.008)  # the change of a training step: far below the limit of bfloat16
ROUNDING = random_values(2, 0.02)  # rounding of the server's kernels that is the same at every step
NEW_ROUNDING = random_values(3, 0.002)  # rounding that changes from step to step


def test_equal_scores_pass_and_give_metrics() -> None:
    found = Canary(0.1, VllmServer).check("http://a", scores(TRAINER + ROUNDING), scores(TRAINER), 3)
    assert found["canary_difference"] == pytest.approx(np.abs(ROUNDING).mean())
    assert found["canary_largest"] == pytest.approx(np.abs(ROUNDING).max())
    assert "canary_followed" not in found, "there is no earlier weight sync"


def test_other_weights_are_rejected() -> None:
    line = r"http://a was sent policy version 3, but its log-probabilities differ from the trainer's by 0.373 per token"
    with pytest.raises(ValueError, match=line) as caught:
        Canary(0.002, VllmServer).check("http://a", scores(TRAINER + 0.373), scores(TRAINER), 3)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="differ from the trainer's by nan"):
        Canary(0.002, VllmServer).check("http://a", scores(TRAINER * np.nan), scores(TRAINER), 3)


def test_sampled_tokens_at_another_temperature_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"sampled tokens differ by 0.5 per token .* start the server with --logprobs-mode processed"
    ):
        Canary(0.1, VllmServer).check("http://a", scores(TRAINER, -1.0), scores(TRAINER, -1.5), 3)


def test_a_server_with_old_weights_is_rejected_below_the_limit() -> None:
    small = random_values(4, 0.002)
    canary = Canary(0.1, VllmServer)
    canary.check("http://a", scores(TRAINER + small), scores(TRAINER), 3)
    found = canary.check("http://a", scores(TRAINER + STEP + small + NEW_ROUNDING), scores(TRAINER + STEP), 4)
    assert found["canary_followed"] == pytest.approx(1.0, abs=0.2)
    with pytest.raises(ValueError, match=r"version 5, but its log-probabilities changed by only -?\d+% of the trainer"):
        canary.check("http://a", scores(TRAINER + STEP + small), scores(TRAINER + 2 * STEP), 5)


def test_a_change_that_is_lost_in_rounding_proves_nothing() -> None:
    canary = Canary(0.1, VllmServer)
    canary.check("http://a", scores(TRAINER + ROUNDING), scores(TRAINER), 3)
    tiny = STEP / 100
    found = canary.check("http://a", scores(TRAINER + ROUNDING), scores(TRAINER + tiny), 4)
    assert "canary_followed" not in found
    assert "canary_followed" not in canary.check("http://a", scores(TRAINER + ROUNDING), scores(TRAINER + tiny), 4)


def test_rounding_that_changes_with_every_step_is_no_change_of_the_policy() -> None:
    """The trainer's log-probabilities change by its own rounding, which the server's do not follow."""
    canary = Canary(0.1, VllmServer)
    for number in range(5):
        server, trainer = (TRAINER + random_values(10 * number + side, 0.01) for side in range(2))
        assert "canary_followed" not in canary.check("http://a", scores(server), scores(trainer), number)


def test_sequences_are_text_where_the_tokenizer_can_make_it() -> None:
    tokenizer = tiny_tokenizer()
    sequences = canary_sequences(tokenizer, vocabulary=400, longest=512)
    assert [len(sequence) for sequence in sequences] == [LENGTH] * 4
    assert "".join(tokenizer.decode(sequences[0])).startswith("The ferry leaves")
    assert len({tuple(sequence) for sequence in sequences}) == 4
    for letters in (canary_sequences(letters_tokenizer(), vocabulary=46, longest=12),):
        assert [len(sequence) for sequence in letters] == [12 - NUM_SAMPLED] * 4
        assert all(0 <= token < 46 for sequence in letters for token in sequence)
    few = canary_sequences(letters_tokenizer(), vocabulary=10, longest=512)
    assert max(max(sequence) for sequence in few) < 10, "a smaller vocabulary than the tokenizer's: random ids"


@pytest.mark.parametrize("longest", [0, 3, 5, 6, 7, 70])
def test_a_sequence_and_its_sampled_tokens_fit(longest: int) -> None:
    if longest < 6:
        with refused("batch.max_tokens"):
            canary_sequences(tiny_tokenizer(), vocabulary=400, longest=longest)
    else:
        sequences = canary_sequences(tiny_tokenizer(), vocabulary=400, longest=longest)
        assert {len(sequence) + NUM_SAMPLED for sequence in sequences} == {min(longest, LENGTH + NUM_SAMPLED)}


def test_scores_of_sequences() -> None:
    found = CanaryScores.of([[1, 2, 3, 4], [5, 6]], 1)
    assert found.fixed.tolist() == [1, 2, 3, 5]
    assert found.sampled.tolist() == [4, 6]
