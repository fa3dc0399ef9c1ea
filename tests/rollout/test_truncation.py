"""Top-k, top-p and min-p: the kept sets, the sampled tokens, and their log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.head import score
from padfree.kept_sets import KeptSets
from padfree.model import lm_head_of
from padfree.rollout import Response, SamplingRequest
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.rollout.environment.trajectory import Branch, leaf_of
from padfree.rollout.response_log import Origin, ResponseLog
from padfree.rollout.sampling_rng import GREEDY, gumbel_noise
from padfree.rollout.truncation import Truncation, _searched_threshold, kept_mask, sets_of
from padfree.testing.models import build
from tests.rollout.sampling_cases import STOPS, TEMPERATURE, by_definition, group_requests

RULES = {
    "top-k": Truncation(top_k=5),
    "top-p": Truncation(top_p=0.6),
    "min-p": Truncation(min_p=0.3),
    "all": Truncation(top_k=9, top_p=0.9, min_p=0.2),
    "one id": Truncation(top_k=1),
    "nearly all": Truncation(top_p=0.999),
    "minimum length": Truncation(top_k=12, min_new_tokens=6),
}


def by_sorting(logits: Tensor, rule: Truncation) -> Tensor:
    """[V] bools: the kept ids of one token, by three passes over the ids in the order of their probabilities."""
    p = torch.softmax(logits.double(), 0)
    for name in ("top_k", "top_p", "min_p"):
        larger = p[None] > p[:, None]  # [V, V]: whether id j is more likely than id i
        kept = {
            "top_k": larger.sum(1) < (rule.top_k or len(p)),
            "top_p": (larger * p).sum(1) < rule.top_p if rule.top_p < 1 else p > 0,
            "min_p": p >= rule.min_p * p.max(),
        }[name]
        p = torch.where(kept, p, 0.0)
        p = p / p.sum()
    return p > 0


@pytest.mark.parametrize("rule", RULES)
def test_the_sets_are_those_of_the_definition(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 200, generator=generator)
    logits[7] = 1.5  # all equal: all are kept, or with top-p those of a tie
    logits[8, 20:] = -torch.inf
    logits[9] = logits[9].round()  # many ties
    stops = torch.tensor(STOPS)
    found = kept_mask(logits, RULES[rule], torch.ones(40, dtype=torch.int64), 7, stops)
    for row in range(40):
        assert torch.equal(found[row], by_sorting(logits[row], RULES[rule])), row
    greedy = kept_mask(logits, RULES[rule], torch.full((40,), GREEDY), 7, stops)
    assert greedy.all()


def test_the_search_finds_the_threshold_of_the_sorted_logits() -> None:
    """On a GPU, top-p without top-k searches the threshold. The search itself runs on any device."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(60, 500, generator=generator)
    logits[1] = 0.0
    logits[2, ::2] = -0.0
    logits[3, 30:] = -torch.inf
    logits[4] = -logits[4].abs()
    logits[5] = logits[5].round()
    for share in (1e-6, 0.3, 0.9, 0.999):
        weights = torch.exp(logits - logits.amax(1, keepdim=True))
        needed = share * weights.sum(1, keepdim=True, dtype=torch.float64)
        found = logits >= _searched_threshold(logits, weights, needed)
        assert torch.equal(found, kept_mask(logits, Truncation(top_p=share), torch.ones(60, dtype=torch.int64)))


def test_no_response_ends_before_its_minimum_length() -> None:
    """Also if the stop tokens are by far the most likely ones, and for greedy responses."""
    logits = torch.zeros(3, 50)
    logits[:, list(STOPS)] = 30.0
    rule = Truncation(top_k=2, top_p=0.5, min_p=0.9, min_new_tokens=4)
    keys = torch.tensor([1, GREEDY, 5])
    found = kept_mask(logits, rule, keys, torch.tensor([3, 3, 4]), torch.tensor(STOPS))
    assert found[:2].sum(1).tolist() == [46, 46]
    assert found[2].nonzero()[:, 0].tolist() == list(STOPS)


def test_sets_are_stored_by_their_smaller_part() -> None:
    mask = torch.zeros(4, 10, dtype=torch.bool)
    mask[0, [7, 2]] = True
    mask[1] = True
    mask[2] = True
    mask[2, [0, 3]] = False
    mask[3, :5] = True
    sets = sets_of(mask)
    assert sets.lists() == [[2, 7], [], [-1, -4], [0, 1, 2, 3, 4]]
    assert sets.contain(np.array([7, 4, 3, 5])).tolist() == [True, True, False, False]
    assert KeptSets.of_lists(sets.lists(), "kept").ids.tolist() == sets.ids.tolist()


def make_sampler(model: PreTrainedModel, rule: Truncation, **changes: Any) -> InProcessSampler:
    settings: dict[str, Any] = {"stops": STOPS, "temperature": TEMPERATURE, "batch_size": 4, **changes}
    return InProcessSampler(PolicyModel(model, torch.float32, torch.device("cpu")), truncation=rule, **settings)


@torch.no_grad()
def truncated_by_definition(
    model: PreTrainedModel, request: SamplingRequest, rule: Truncation
) -> tuple[list[int], list[float], list[list[int]]]:
    tokens, logprobs, kept = [int(token) for token in request.tokens], [], []
    for position in range(request.max_new_tokens):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].float() / TEMPERATURE
        banned = list(STOPS) if position < rule.min_new_tokens else []
        logits[banned] = -torch.inf
        mask = by_sorting(logits, rule)
        scores = logits.masked_fill(~mask, -torch.inf).log_softmax(0)
        token = int((scores + gumbel_noise(torch.tensor([request.key]), position, len(scores))[0]).argmax())
        tokens.append(token)
        logprobs.append(float(scores[token]))
        kept.append(mask.nonzero()[:, 0].tolist())
        if token in STOPS:
            break
    return tokens[len(request.tokens) :], logprobs, kept


def ids_of(sets: KeptSets, vocabulary: int) -> list[list[int]]:
    found = []
    for one in sets.lists():
        excluded = {-1 - number for number in one if number < 0}
        found.append([number for number in range(vocabulary) if number not in excluded] if excluded or not one else one)
    return found


@pytest.mark.parametrize("decodes", [None, True], ids=["cache of transformers", "our cache"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("rule", ["top-k", "all", "nearly all", "minimum length"])
def test_samplers_return_the_sets_they_sampled_from(name: str, rule: str, decodes: bool | None) -> None:
    model = build(name).eval()
    model.set_attn_implementation("eager")  # some versions of sdpa ignore the soft cap
    sampler = make_sampler(model, RULES[rule], decodes=decodes)
    sampler.update_weights(model, 3)
    requests = group_requests(max_new_tokens_each=(9, 4, 1))
    responses = sampler.sample(requests)
    for request, response in zip(requests, responses, strict=True):
        tokens, logprobs, kept = truncated_by_definition(model, request, RULES[rule])
        assert response.tokens.tolist() == tokens
        np.testing.assert_allclose(response.logprobs, logprobs, atol=2e-4)
        assert response.kept is not None
        assert ids_of(response.kept, model.config.vocab_size) == kept
        assert response.kept.contain(response.tokens).all()


@pytest.mark.parametrize("decodes", [None, True], ids=["cache of transformers", "our cache"])
def test_greedy_responses_are_not_truncated(decodes: bool | None) -> None:
    model = build("qwen3").eval()
    sampler = make_sampler(model, RULES["top-k"], decodes=decodes)
    sampler.update_weights(model, 0)
    (prompt,) = {id(one.tokens): one.tokens for one in group_requests((6,))}.values()
    request = SamplingRequest(tokens=prompt, max_new_tokens=8, key=GREEDY)
    (response,) = sampler.sample([request])
    tokens, logprobs = by_definition(model, request)
    assert response.tokens.tolist() == tokens
    np.testing.assert_allclose(response.logprobs, logprobs, atol=2e-4)
    assert response.kept is not None
    assert not len(response.kept.ids)


def test_nothing_is_recorded_without_truncation() -> None:
    model = build("qwen3").eval()
    for decodes in (None, True):
        sampler = make_sampler(model, Truncation(), decodes=decodes)
        sampler.update_weights(model, 0)
        assert all(response.kept is None for response in sampler.sample(group_requests((6,))))


@pytest.mark.parametrize("rule", RULES)
def test_sampled_log_probabilities_are_teacher_forced_ones(rule: str) -> None:
    model = build("qwen3").eval()
    sampler = make_sampler(model, RULES[rule])
    sampler.update_weights(model, 0)
    for request, response in zip(group_requests(), sampler.sample(group_requests()), strict=True):
        ids = torch.from_numpy(np.concatenate([request.tokens, response.tokens]))
        with torch.no_grad():
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0, len(request.tokens) - 1 : -1]
            labels = torch.from_numpy(response.tokens)
            scores = score(hidden, lm_head_of(model), labels, temperature=TEMPERATURE, kept=response.kept)
        np.testing.assert_allclose(scores.logprobs.numpy(), response.logprobs, atol=2e-5)


def test_branches_keep_the_sets_of_their_tokens() -> None:
    def turn(tokens: list[int], kept: list[list[int]] | None) -> Response:
        return Response(
            tokens=np.array(tokens),
            logprobs=np.zeros(len(tokens), np.float32),
            ended=False,
            version=0,
            kept=None if kept is None else KeptSets.of_lists(kept, "kept"),
        )

    root = Branch(np.array([1, 2]))
    root.write(turn([3, 4], [[3, 9], []]))
    root.add([7])
    child = root.branch(at=4)
    root.write(turn([5], [[-1]]))
    child.write(turn([6], None))
    found = [leaf_of(branch, "", 1.0) for branch in (root, child)]
    assert [(leaf.kept.lists(), leaf.num_kept) for leaf in found if leaf.kept is not None] == [
        ([[], [], [3, 9], [], [], [-1]], 3),
        ([[], [], [3, 9], [], []], 2),
    ]
    plain = Branch(np.array([1]))
    plain.write(turn([3], None))
    assert leaf_of(plain, "", 1.0).kept is None


def test_the_response_log_keeps_the_sets(tmp_path: Path) -> None:
    sets = KeptSets.of_lists([[3, 9], [], [-1, -6]], "kept")
    response = Response(tokens=np.array([3, 4, 5]), logprobs=np.zeros(3, np.float32), ended=True, version=0, kept=sets)
    origin = Origin(step=0, weights="w", settings="s")
    log = ResponseLog(tmp_path, 0)
    log.begin(origin, after=0)
    log.keep(1, [(0, np.array([1, 2]), response)])
    log.close()
    again = ResponseLog(tmp_path, 0)
    assert again.begin(origin, after=0) == 1
    found = again.find(1, 0, np.array([1, 2]))
    assert found is not None
    assert found.kept_sets.lists() == sets.lists()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("rule", ["top-k", "all", "nearly all"])
def test_captured_steps_return_the_sets_they_sampled_from(name: str, rule: str) -> None:
    """Twice, because the first call captures the steps."""
    model = build(name).eval()
    model.set_attn_implementation("eager")
    on_gpu = build(name).eval().to("cuda")
    policy = PolicyModel(on_gpu, torch.float32, torch.device("cuda", 0))
    sampler = InProcessSampler(
        policy, stops=STOPS, temperature=TEMPERATURE, batch_size=8, truncation=RULES[rule], decodes=True
    )
    sampler.update_weights(on_gpu, 3)
    requests = group_requests((6, 1, 3, 14, 2, 9), group=4, max_new_tokens_each=(19, 4, 1))
    expected = [truncated_by_definition(model, request, RULES[rule]) for request in requests]
    for _ in range(2):
        same = 0
        for response, (tokens, logprobs, kept) in zip(sampler.sample(requests), expected, strict=True):
            assert response.kept is not None
            assert response.kept.contain(response.tokens).all()
            if response.tokens.tolist() == tokens and ids_of(response.kept, model.config.vocab_size) == kept:
                same += 1
                np.testing.assert_allclose(response.logprobs, logprobs, atol=1e-3)
        # Rounding moves an id over a threshold in few of the responses.
        assert same >= 0.8 * len(requests)


def test_a_continued_response_keeps_its_sets() -> None:
    model = build("qwen3").eval()
    sampler = make_sampler(model, RULES["all"])
    sampler.update_weights(model, 0)
    first, second = sampler.sample(group_requests((6,), group=2, max_new_tokens_each=(4,)))
    both = first.followed_by(second)
    assert both.kept is not None
    assert both.kept.lists() == [*first.kept_sets.lists(), *second.kept_sets.lists()]
