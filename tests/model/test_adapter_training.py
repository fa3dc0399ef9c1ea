"""Attached models with recomputation, compilation, sharding, and a second model in the process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from padfree.batch import PackedBatch
from padfree.cp import gather_tokens, shard
from padfree.model import attach
from padfree.testing.models import build, row
from tests.ranks import run_ranks
from tests.refused import refused

TOLERANCE = 1e-5


def run(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Tensor]:
    """Logits of the real tokens and the gradient of every parameter, of one forward and backward pass."""
    model.zero_grad()
    logits = forward(model, batch)
    backward(logits, batch)
    return results(model, logits)


def forward(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    logits: Tensor = model(**shard(batch).model_inputs()).logits[0]
    return logits[: batch.num_tokens - batch.pad_length]


def backward(logits: Tensor, batch: PackedBatch) -> None:
    generator = torch.Generator().manual_seed(batch.num_tokens)
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).sum().backward()


def results(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    gradients = {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"logits": logits.detach(), **gradients}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        size = max(float(tensor.abs().max()), 1e-2 * largest)
        difference = float((actual[name] - tensor).abs().max())
        assert difference <= tolerance * size, f"{name}: {difference:.1e} of {size:.1e}"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_hf(name: str, use_reentrant: bool) -> None:
    model = attach(build(name))
    batch = row([15, 1, 8], pad=3)
    expected = run(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    assert_same(run(model, batch), expected, 0.0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_activation_checkpointing_by_wrappers(name: str) -> None:
    model = attach(build(name))
    batch = row([15, 1, 8], pad=3)
    expected = run(model, batch)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    assert_same(run(model, batch), expected, 0.0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_models_with_their_own_batches_at_the_same_time(checkpointing: bool) -> None:
    """Each backward recomputes after the other model has run, and must see the batch of its own forward."""
    first, second = attach(build("llama", seed=1)), attach(build("gemma3", seed=2))
    batches = [row([11, 4], pad=1, seed=3), row([3, 3, 10], seed=4)]
    expected = [run(first, batches[0]), run(second, batches[1])]
    expected_again = run(first, batches[1])
    if checkpointing:
        for model in (first, second):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in (first, second):
        model.zero_grad()
    one = forward(first, batches[0])
    two = forward(second, batches[1])
    again = forward(first, batches[1])
    backward(one, batches[0])
    assert_same(results(first, one), expected[0], 0.0)
    backward(two, batches[1])
    assert_same(results(second, two), expected[1], 0.0)
    first.zero_grad()
    backward(again, batches[1])
    assert_same(results(first, again), expected_again, 0.0)


# torch.compile


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


LENGTHS = [[15, 1, 8], [9, 9], [30], [2, 1, 1, 40]]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("name", "compiler", "checkpointing"), [("llama", "aot_eager", "hf"), ("gemma3", "eager", "wrapper")]
)
def test_compiled_layers_do_not_compile_again_for_every_batch(name: str, compiler: str, checkpointing: str) -> None:
    """Compiled and recomputed as by a user; tests/sharding/test_parallelize tests padfree's own way."""
    model = attach(
        build(name, num_hidden_layers=1, **({"layer_types": ["sliding_attention"]} if name == "gemma3" else {}))
    )
    batches = [row(lengths, pad=index % 3, seed=index) for index, lengths in enumerate(LENGTHS)]
    expected = [run(model, batch) for batch in batches]
    if checkpointing == "hf":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for index, layer in enumerate(model.model.layers):
        layer.compile(backend=compiler)
        if checkpointing == "wrapper":
            model.model.layers[index] = checkpoint_wrapper(layer)
    graphs = []
    for batch, result in zip(batches, expected, strict=True):
        assert_same(run(model, batch), result)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    # The second length makes the number of tokens a variable, the third at the latest the longest sample.
    assert graphs[3] == graphs[2] <= 3 * graphs[0], f"more than two recompilations of each graph: {graphs}"


# FSDP2


def sharded(name: str, rank: int, world: int, policy: MixedPrecisionPolicy) -> PreTrainedModel:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    model = attach(build(name))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in (*model.model.layers, model):
        module.set_gradient_divide_factor(1.0)  # sum over ranks, as token weights require
        module.set_force_sum_reduction_for_comms(True)  # the only reduction of gloo
    return model


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def fsdp_cases(rank: int, world: int) -> None:
    batches = [row([11, 4], pad=1, seed=3), row([3, 3, 10], seed=4)]
    plain = attach(build("gemma3"))
    parts = [run(plain, batch) for batch in batches]
    expected = {key: sum(part[key] for part in parts) for key in parts[0] if key != "logits"}
    expected["logits"] = parts[rank]["logits"]

    model = sharded("gemma3", rank, world, MixedPrecisionPolicy())
    assert_same(whole(run(model, batches[rank])), expected)

    mixed = sharded("gemma3", rank, world, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    actual = whole(run(mixed, batches[rank]))
    assert actual["logits"].dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for key, tensor in actual.items() if key != "logits")
    assert_same({key: tensor.float() for key, tensor in actual.items()}, expected, 0.1)
    low = copy.deepcopy(plain)  # one process in bfloat16; rotary frequencies are buffers and stay as they are
    for parameter in low.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    torch.testing.assert_close(actual["logits"], run(low, batches[rank])["logits"], rtol=0.02, atol=0.02)

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(whole(run(model, batches[rank])), expected)

    # The two ranks share one pack: FSDP's sum over ranks is also the sum over the parts of the pack.
    batch = row([17, 1, 6], seed=5)
    model.zero_grad()
    local = shard(batch, world=world, rank=rank, group=dist.group.WORLD)
    logits = gather_tokens(model(**local.model_inputs()).logits[0], local.context)
    backward(logits, batch)
    assert_same(whole(results(model, logits)), run(plain, batch))

    with refused("model", "FSDPGemma3ForCausalLM is already sharded"):
        attach(model)


def test_fsdp2_with_and_without_mixed_precision() -> None:
    run_ranks(2, fsdp_cases)
