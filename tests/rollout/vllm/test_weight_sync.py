"""Weight sync by difference: the bits of all weights afterwards, and servers that cannot apply a difference."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.config import LoraConfig
from padfree.distributed import distributed, make_mesh
from padfree.model.load import load_model
from padfree.model.lora import add_adapters
from padfree.rollout.engines.servers.buckets import BucketForm, Receiver
from padfree.rollout.engines.servers.weight_stream import SentWeights, WeightStream
from padfree.rollout.engines.servers.weight_sync import FilesTransport, GroupTransport, SyncOutcome, WeightSync, form_of
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.loop_thread import LoopThread
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build, save_with_tokenizer
from padfree.train.run import train
from padfree.warning import PadfreeWarning
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rollout.vllm.test_run import fake_of, lines, make_config
from tests.rollout.vllm.vllm_cases import FakeVllm, serving

CPU = torch.device("cpu")
UPDATES = 5
SIZE = 20_000  # bytes of a bucket, so that there are several


def update(model: Any, number: int) -> None:
    """Change about 1% of the bfloat16 elements, the same ones in every copy of the model."""
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(1000 * number + index)
            chosen = torch.rand(parameter.shape, generator=generator) < 0.01
            parameter.mul_(torch.where(chosen, 1.25, 1.0))


def whole(stream: WeightStream, model: Any) -> dict[str, Tensor]:
    buckets = stream.buckets(model, keep=True, size=SIZE)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors}


class Server:
    """The server's side without a server: the weights after each sync."""

    def __init__(self) -> None:
        self.receiver, self.weights, self.num_bytes = Receiver(CPU), dict[str, Tensor](), 0

    def take(self, buckets: Any, folder: Path, *, keep: bool = True) -> None:
        self.num_bytes = 0
        transport = FilesTransport(folder)
        for bucket in buckets:
            if bucket.tensors:
                form = transport.prepare(bucket, keep=keep)
                self.num_bytes += form.num_bytes
                form = BucketForm.of(json.loads(json.dumps(form.transfer_info)))
                self.weights |= {name: tensor.clone() for name, tensor in self.receiver.tensors(form)}


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_five_differences_give_the_bits_of_a_full_sync(name: str, tmp_path: Path) -> None:
    """Also for tied heads, tensors with other names in HF files, and stacked experts that HF files have one by one."""
    model = build(name)
    stream = WeightStream(model, torch.bfloat16)
    server = Server()
    with distributed(device="cpu"):
        sent = SentWeights(stream=stream, group=make_mesh("cpu").loss.group)
        server.take(stream.buckets(model, keep=True), tmp_path)
        full = server.num_bytes
        sent.keep(model, 0)
        for number in range(1, 1 + UPDATES):
            update(model, number)
            server.take(sent.buckets(model, number, size=SIZE), tmp_path)
            assert sent.version == number
            assert same_bits(server.weights, whole(stream, model)), number
            assert server.num_bytes < full / 4, "tensors are small here, and each difference takes 128 bytes or more"


def test_differences_of_merged_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = build("qwen3")
    add_adapters(model, LoraConfig(rank=2))
    stream = WeightStream(model, torch.bfloat16)
    server = Server()
    with distributed(device="cpu"):
        sent = SentWeights(stream=stream, group=make_mesh("cpu").loss.group)
        server.take(stream.buckets(model, keep=True), tmp_path)
        sent.keep(model, 0)
        for number in range(1, 3):
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if ".lora_B." in parameter_name:
                        parameter.add_(0.02)
            before = {name: tensor.clone() for name, tensor in server.weights.items()}
            server.take(sent.buckets(model, number), tmp_path)
            assert not same_bits(server.weights, before)
            assert same_bits(server.weights, whole(stream, model))


def sharded(rank: int, world: int, folder: Path, replicate: int, adapters: bool) -> list[bool]:
    mesh = make_mesh("cpu", replicate=replicate)
    lora = LoraConfig(rank=2) if adapters else LoraConfig()
    model = load_model(
        folder, shard=lambda model: parallelize(model, transformations(mesh, dtype=torch.float32, lora=lora))
    )
    stream = WeightStream(model, torch.bfloat16)
    sent = SentWeights(stream=stream, group=mesh.loss.group)
    server, found = Server(), []
    files = folder / f"weights-{rank}"
    server.take(stream.buckets(model, keep=rank == 0, size=SIZE), files)
    sent.keep(model, 0)
    for number in range(1, 1 + UPDATES):
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                generator = torch.Generator().manual_seed(100 * number + index + (0 if replicate > 1 else 7 * rank))
                local.mul_(torch.where(torch.rand(local.shape, generator=generator) < 0.02, 1.25, 1.0))
        server.take(sent.buckets(model, number, size=SIZE), files)
        expected: dict[str, Tensor] = {}
        for bucket in stream.buckets(model, keep=rank == 0, size=SIZE):
            expected |= dict(bucket.tensors)
        found.append(same_bits(server.weights, expected))
    parts = sum(bits.numel() for bits in sent._bits.values())
    return [*found, parts]  # type: ignore[list-item]


@pytest.mark.parametrize(("replicate", "adapters"), [(1, False), (2, False), (1, True)])
def test_each_of_two_ranks_sends_the_differences_of_its_shard(replicate: int, adapters: bool, tmp_path: Path) -> None:
    if adapters:
        pytest.importorskip("peft")
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    first, second = run_ranks(2, sharded, tmp_path, replicate, adapters)
    assert first[:-1] == second[:-1] == [True] * UPDATES
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert first[-1] + second[-1] == elements, "every element is kept and compared on one rank"
    if replicate == 1:
        assert max(first[-1], second[-1]) < 0.7 * elements


@contextmanager
def syncing(fakes: list[FakeVllm], trained: Any, folder: Path | None = None) -> Iterator[tuple[WeightSync, list[str]]]:
    loop = LoopThread("weight syncs")
    with serving(*fakes) as urls, distributed(device="cpu"):
        mesh = make_mesh("cpu")
        stream = WeightStream(trained, torch.bfloat16)
        sync = WeightSync(
            servers=[VllmServer(url, 30.0) for url in urls],
            loop=loop,
            mesh=mesh,
            stream=stream,
            sent=SentWeights(stream=stream, group=mesh.loss.group),
            transport=GroupTransport(CPU, 30.0) if folder is None else FilesTransport(folder),
            folder=Path("unused-weights") if folder is None else folder,
            base="",
            model="policy",
            adapters=False,
            launcher=None,
        )
        try:
            yield sync, urls
        finally:
            sync.close()
            loop.close()


def has_weights(fake: FakeVllm, trained: Any) -> bool:
    expected = {name: tensor.bfloat16() for name, tensor in trained.named_parameters()}
    return same_bits(dict(fake.model.named_parameters()), expected)


def fake_server() -> FakeVllm:
    return FakeVllm(model=build("llama_tied").bfloat16())


def next_version(sync: WeightSync, trained: Any, version: int) -> SyncOutcome:
    update(trained, version)
    return sync.send(trained, version)


@pytest.mark.parametrize("transport", ["group", "files"])
def test_servers_that_confirm_every_sync_receive_differences(transport: str, tmp_path: Path) -> None:
    fakes, trained = [fake_server(), fake_server()], build("llama_tied")
    with syncing(fakes, trained, tmp_path / "weights" if transport == "files" else None) as (sync, _):
        full = sync.send(trained, 0).num_bytes
        for version in range(1, 1 + UPDATES):
            outcome = next_version(sync, trained, version)
            assert outcome == SyncOutcome(num_bytes=outcome.num_bytes)
            assert outcome.num_bytes < full / 4
            assert all(has_weights(fake, trained) for fake in fakes)
        assert sync.send(trained, UPDATES).num_bytes < full / 10, "the same version again: no differences"


def test_a_server_that_missed_a_version_receives_all_weights(tmp_path: Path) -> None:
    fakes, trained = [fake_server(), fake_server()], build("llama_tied")
    with syncing(fakes, trained) as (sync, urls):
        full = sync.send(trained, 0).num_bytes
        fakes[1].failing = {"/pause"}
        missed = next_version(sync, trained, 1)
        assert list(missed.failed) == urls[1:]
        fakes[1].failing = set()
        line = rf"weight sync 2: {urls[1]} receives all weights, .*it has policy version 0, and version 1 was sent last"
        with pytest.warns(PadfreeWarning, match=line):
            outcome = next_version(sync, trained, 2)
        assert not outcome.failed
        assert full < outcome.num_bytes < 1.5 * full, "differences to one server, all weights to the other"
        assert all(has_weights(fake, trained) for fake in fakes)
        assert next_version(sync, trained, 3).num_bytes < full / 4
        assert all(has_weights(fake, trained) for fake in fakes)


def test_a_server_that_restarted_receives_all_weights() -> None:
    fake, trained = fake_server(), build("llama_tied")
    with syncing([fake], trained) as (sync, (url,)):
        full = sync.send(trained, 0).num_bytes
        next_version(sync, trained, 1)
        fake.answer("/restart", {"name": fake.name})
        line = rf"weight sync 2: {url} receives all weights, not only the changes \(it has no weights of this run\)"
        with pytest.warns(PadfreeWarning, match=line):
            outcome = next_version(sync, trained, 2)
        assert outcome.num_bytes == full
        assert has_weights(fake, trained)
        assert next_version(sync, trained, 3).num_bytes < full / 4


def test_one_wrong_element_on_a_server_is_found_and_corrected() -> None:
    fakes, trained = [fake_server(), fake_server()], build("llama_tied")
    with syncing(fakes, trained) as (sync, urls):
        sync.send(trained, 0)
        name = "model.layers.1.mlp.down_proj.weight"
        kept = fakes[0]._receiver._kept[name]
        kept.view(torch.int16)[3, 5] ^= 1
        with pytest.warns(PadfreeWarning, match=rf"{urls[0]} receives all weights, .*the checksum of {name} differs"):
            outcome = next_version(sync, trained, 1)
        assert not outcome.failed
        assert not outcome.refused
        assert all(has_weights(fake, trained) for fake in fakes)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            next_version(sync, trained, 2)
        assert all(has_weights(fake, trained) for fake in fakes)


def test_a_run_in_bfloat16_syncs_by_difference(tmp_path: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model", writes_back=True, num_hidden_layers=1)
    num_bytes = {}
    for kind in ("full", "auto"):
        fake = fake_of(model)
        fake.model.bfloat16()
        with serving(fake) as (url,):
            config = make_config(tmp_path / kind, model, servers=[url], weight_sync=kind)
            train(
                replace(
                    config,
                    model=replace(config.model, dtype="bfloat16"),
                    optimizer=replace(config.optimizer, lr=1e-5),
                )
            )
        found = lines(tmp_path / kind)
        num_bytes[kind] = [line["sampler/weight_sync_bytes"] for line in found]
        assert all(line["sampler/canary_difference"] < 0.1 for line in found)
    assert num_bytes["auto"][0] == num_bytes["full"][0]
    assert max(num_bytes["auto"][1:]) < 0.5 * num_bytes["full"][1]


def test_adapters_have_no_differences(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = save_with_tokenizer(tmp_path / "model", writes_back=True, num_hidden_layers=1)
    with serving(fake_of(model)) as (url,):
        config = make_config(tmp_path / "run", model, servers=[url], weight_sync="difference")
        with refused("rollout.weight_sync"):
            train(replace(config, lora=LoraConfig(rank=2)))


def test_forms_survive_json() -> None:
    model = build("qwen3")
    stream = WeightStream(model, torch.bfloat16)
    with distributed(device="cpu"):
        sent = SentWeights(stream=stream, group=make_mesh("cpu").loss.group)
        sent.keep(model, 0)
        update(model, 1)
        for bucket in sent.buckets(model, 1, size=SIZE):
            form = form_of(bucket, keep=True)
            assert BucketForm.of(json.loads(json.dumps(form.transfer_info))) == form
