"""Weights in the format of HF files, from whole and sharded models, by a process group and by files."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from padfree.config import LoraConfig
from padfree.distributed import make_mesh
from padfree.model.load import load_model
from padfree.model.lora import add_adapters
from padfree.rollout.engines.servers.buckets import ALIGNMENT
from padfree.rollout.engines.servers.server_api import ServerLostError
from padfree.rollout.engines.servers.weight_stream import Bucket, WeightStream
from padfree.rollout.engines.servers.weight_sync import (
    FilesTransport,
    GroupTransport,
    call_during,
    for_each,
    form_of,
    packed,
)
from padfree.rollout.engines.vllm import VllmServer
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from tests.ranks import run_ranks
from tests.rollout.vllm.vllm_cases import FakeVllm, serving, unused_url

CPU = torch.device("cpu")


def streamed(model: Any, dtype: torch.dtype = torch.float32, size: int = 20_000) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for bucket in WeightStream(model, dtype).buckets(model, keep=True, size=size)
        for name, tensor in bucket.tensors
    }


@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "gpt2", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_names_shapes_and_values_equal_those_of_files(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = streamed(model)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


def test_size_and_dtype_of_buckets() -> None:
    model = build("qwen3")
    stream = WeightStream(model, torch.bfloat16)
    buckets = list(stream.buckets(model, keep=True, size=20_000))
    assert len(buckets) > 3
    for bucket in buckets:
        assert all(tensor.dtype == torch.bfloat16 for _, tensor in bucket.tensors)
        assert len(bucket.tensors) == 1 or sum(tensor.nbytes for _, tensor in bucket.tensors) <= 20_000
    assert [bucket for bucket in stream.buckets(model, keep=False) if bucket.tensors] == [], "other ranks keep nothing"


def test_a_bucket_is_one_buffer() -> None:
    tensors = [("a", torch.arange(5, dtype=torch.int64)), ("b", torch.randn(3, 7).bfloat16()), ("c", torch.tensor(2.5))]
    bucket = Bucket(tensors)
    form = form_of(bucket)
    buffer = packed(bucket, form, CPU)
    assert form.num_bytes == len(buffer) == 3 * ALIGNMENT
    for (name, tensor), (found_name, found) in zip(tensors, form.parts(buffer), strict=True):
        assert found_name == name
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def other_weights(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.01)


@pytest.mark.parametrize("transport", ["group", "files"])
def test_a_model_arrives(transport: str, tmp_path: Path) -> None:
    trained, copy = build("llama_tied"), build("llama_tied")
    other_weights(trained)
    fake = FakeVllm(model=copy)
    with serving(fake) as (url,):
        server = VllmServer(url, 30.0)
        chosen = GroupTransport(CPU, 30.0) if transport == "group" else FilesTransport(tmp_path / "shared")
        for _ in range(2):  # the connection is reused
            asyncio.run(chosen.connect(server))
            for bucket in WeightStream(trained, torch.float32).buckets(trained, keep=True, size=20_000):
                asyncio.run(chosen.send(server, chosen.prepare(bucket)))
            for (name, found), expected in zip(copy.named_parameters(), trained.parameters(), strict=True):
                assert torch.equal(found, expected), name
            other_weights(trained)
    assert fake.calls.count("/init_weight_transfer_engine") == 1
    if isinstance(chosen, FilesTransport):
        assert len(list((tmp_path / "shared").iterdir())) == 1, "one bucket at a time"
        chosen.clear()
        assert list((tmp_path / "shared").iterdir()) == []


def test_a_server_that_is_lost_during_a_transfer() -> None:
    model = build("qwen3")
    (bucket, *_) = WeightStream(model, torch.float32).buckets(model, keep=True)
    fake = FakeVllm()
    transport = GroupTransport(CPU, 5.0)
    with serving(fake) as (url,):
        server = VllmServer(url, 5.0)
        asyncio.run(transport.connect(server))
        fake.missing = {"/update_weights"}
        with pytest.raises(ValueError, match="has no route /update_weights"):
            asyncio.run(transport.send(server, transport.prepare(bucket)))
    with pytest.raises(ServerLostError, match="refused the connection"):
        asyncio.run(transport.connect(VllmServer(unused_url(), 1.0)))


def test_an_exception_in_the_sending_thread_is_raised() -> None:
    """The thread sends while the server receives."""
    failing = TypeError("a bug")

    def act() -> None:
        raise failing

    async def send(server: VllmServer) -> None:
        await call_during(server, server.pause(), act)

    with serving(FakeVllm()) as (url,):
        with pytest.raises(TypeError, match="a bug"):
            asyncio.run(send(VllmServer(url, 5.0)))
        failing = RuntimeError("Connection closed by peer\n[127.0.0.1]")  # type: ignore[assignment]
        line = r"lost the connection for weights \(Connection closed by peer \[127.0.0.1\]\)"
        with pytest.raises(ServerLostError, match=line):
            asyncio.run(send(VllmServer(url, 5.0)))


def sharded(rank: int, world: int, folder: Path, adapters: bool) -> dict[str, torch.Tensor]:
    mesh = make_mesh("cpu")
    lora = LoraConfig(rank=2) if adapters else LoraConfig()
    model = load_model(
        folder, shard=lambda model: parallelize(model, transformations(mesh, dtype=torch.float32, lora=lora))
    )
    found: dict[str, torch.Tensor] = {}
    for bucket in WeightStream(model, torch.float32).buckets(model, keep=rank == 0, size=20_000):
        found |= dict(bucket.tensors)
    return found


def test_a_sharded_model_streams_to_the_first_rank(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    first, second = run_ranks(2, sharded, tmp_path, False)
    expected = load_file(tmp_path / "model.safetensors")
    assert second == {}
    assert first.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in first.items())


def test_adapters_are_merged_into_the_weights() -> None:
    pytest.importorskip("peft")
    model = build("qwen3")
    plain = {name: tensor.clone() for name, tensor in streamed(model).items()}
    add_adapters(model, LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
    found = streamed(model)
    assert found.keys() == plain.keys()
    changed = {name for name in found if not torch.equal(found[name], plain[name])}
    assert changed == {name for name in plain if name.endswith("_proj.weight")}


def test_several_servers_receive_at_the_same_time() -> None:
    trained = build("qwen3")
    other_weights(trained)
    fakes = [FakeVllm(model=build("qwen3")) for _ in range(2)]
    with serving(*fakes) as urls:
        servers = [VllmServer(url, 30.0) for url in urls]
        transport = GroupTransport(CPU, 30.0)
        assert asyncio.run(for_each(servers, transport.connect)) == {}
        for bucket in WeightStream(trained, torch.float32).buckets(trained, keep=True, size=20_000):
            form = transport.prepare(bucket)
            assert asyncio.run(for_each(servers, partial(transport.send, form=form))) == {}
    for fake in fakes:
        for found, expected in zip(fake.model.parameters(), trained.parameters(), strict=True):
            assert torch.equal(found, expected)
