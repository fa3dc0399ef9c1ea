"""Prompts with images on vLLM servers: images are sent once, encoded with the current weights, and whole runs agree."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from padfree.config import ModelConfig
from padfree.images import Image
from padfree.model.vision.families import FAMILIES
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.engines.servers.server_api import SamplingSettings, ServerLostError
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.engines.vllm_images import GENERATE, STORE, ImageClient, ServerImages, _unpacked
from padfree.rollout.truncation import WHOLE
from padfree.train.preflight import preflight
from padfree.train.run import train
from tests.refused import refused
from tests.rollout.vllm.test_http import served_of
from tests.rollout.vllm.test_run import lines
from tests.rollout.vllm.vllm_cases import FakeVllm, serving
from tests.train.test_vision_environment import THREE
from tests.train.test_vision_rl import config_of, prompt_rows

pytest.importorskip("PIL")


class Seeing(FakeVllm):
    """A fake server with the routes of `vllm_images`, and a vision-language model of transformers."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.images = ServerImages()
        self.reads_images, self.normalizes = True, False
        self.keys: Counter[str] = Counter()
        self.images_per_request: list[int] = []
        self._request = threading.local()  # each request has its own thread

    def answer(self, path: str, body: dict[str, Any], query: str = "") -> tuple[int, Any]:
        if path not in (STORE, GENERATE) or path in self.missing:
            return super().answer(path, body, query)
        self.calls.append(path if body else f"GET {path}")
        if path == STORE and not body:
            return 200, {"reads_images": self.reads_images, "normalizes": self.normalizes}
        if path == STORE:
            self.images.add(body["digest"], _unpacked(body["inputs"]))
            return 200, {}
        missing = [one["digest"] for one in body["images"] if self.images.get(one["digest"]) is None]
        if missing:
            return 200, {"missing": missing}
        self.keys.update(one["key"] for one in body["images"])
        self._request.shown = body["images"]
        try:
            return self._generate(body)
        finally:
            self.images_per_request.append(len(self._request.shown))
            self.offsets = [one["offset"] for one in self._request.shown]
            self._request.shown = []

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        shown = getattr(self._request, "shown", [])
        if not shown or self.model is None:
            return super()._logits(tokens)
        kinds = torch.zeros(1, len(tokens), dtype=torch.int64)
        stored = []
        for one in shown:
            stored.append(self.images.get(one["digest"]) or {})
            kinds[0, one["offset"] : one["offset"] + one["length"]] = 1
        inputs = {name: torch.cat([each[name] for each in stored]) for name in stored[0]}
        ids, embedding, placeholder = (
            torch.tensor([tokens]),
            self.model.get_input_embeddings(),
            tokens[shown[0]["offset"]],
        )
        sampled = (ids == placeholder) & (kinds == 0)  # an ordinary token in the answer, which transformers refuses

        def embed(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.where(sampled[..., None], module.weight[placeholder], output)

        hook = embedding.register_forward_hook(embed)
        try:
            found = self.model(input_ids=ids.masked_fill(sampled, 0), mm_token_type_ids=kinds, **inputs)
        finally:
            hook.remove()
        return found.logits[0].float()


def image(digest: str, offset: int, *, length: int = 2, loads: list[str] | None = None) -> Image:
    def load() -> dict[str, Any]:
        if loads is not None:
            loads.append(digest)
        return {"pixel_values": np.full((8, 3), float(digest), np.float32), "image_grid_thw": np.array([[1, 2, 4]])}

    return Image(digest=digest, positions=np.arange(offset, offset + length), load=load)


TOKENS = np.array([3, 9, 9, 4, 9, 9, 5])


def respond(fake: FakeVllm, server: VllmServer, images: tuple[Image, ...], *, version: int = 4) -> Response:
    request = SamplingRequest(tokens=TOKENS, max_new_tokens=5, key=7, images=images)
    sampling = SamplingSettings(1.0, (0,), fake.vocabulary, truncation=WHOLE)
    fake.version = str(version)
    return asyncio.run(server.respond(request, sampling, model="policy", version=version, salt="run"))


def test_images_are_sent_once_and_encoded_again_with_new_weights() -> None:
    fake, loads = Seeing(), []
    shown = image("1", 1, loads=loads), image("2", 4, loads=loads)
    with serving(fake) as (url,):
        server = VllmServer(url, 20.0)
        first = respond(fake, server, shown)
        assert respond(fake, server, shown).tokens.tolist() == first.tokens.tolist()
        respond(fake, server, (image("3", 1, loads=loads), shown[1]), version=5)
    assert loads == ["1", "2", "3"]
    assert fake.keys == {"run 4 1": 2, "run 4 2": 2, "run 5 3": 1, "run 5 2": 1}
    assert fake.offsets == [1, 4]
    assert torch.equal(fake.images.get("2")["image_grid_thw"], torch.tensor([[1, 2, 4]]))  # type: ignore[index]
    assert len(first.tokens) == 5 or first.ended


def test_simultaneous_requests_send_an_image_once() -> None:
    posted: list[str] = []

    async def post(path: str, body: Any) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        posted.append(path)
        return {}

    async def ask() -> None:
        client = ImageClient()
        await asyncio.gather(*(client.generate(post, {}, [image("1", 0)], "key") for _ in range(16)))
        assert not client._storing

    asyncio.run(ask())
    assert Counter(posted) == {STORE: 1, GENERATE: 16}


def test_a_failed_upload_is_repeated() -> None:
    posted: list[str] = []

    async def post(path: str, body: Any) -> dict[str, Any]:
        posted.append(path)
        if len(posted) == 1:
            raise ServerLostError("gone")
        return {}

    async def ask() -> None:
        client = ImageClient()
        with pytest.raises(ServerLostError):
            await client.generate(post, {}, [image("1", 0)], "key")
        await client.generate(post, {}, [image("1", 0)], "key")

    asyncio.run(ask())
    assert posted == [STORE, STORE, GENERATE]


def test_a_server_that_has_restarted_gets_the_images_again() -> None:
    fake, loads = Seeing(), []
    with serving(fake) as (url,):
        server = VllmServer(url, 20.0)
        respond(fake, server, (image("1", 1, loads=loads), image("2", 4, loads=loads)))
        fake.images = ServerImages()
        respond(fake, server, (image("1", 1, loads=loads), image("2", 4, loads=loads)))
        assert loads == ["1", "2", "1", "2"]
        fake.images = ServerImages(max_bytes=1)  # never holds both
        with pytest.raises(ServerLostError, match=rf"{GENERATE} returned no choices"):
            respond(fake, server, (image("1", 1, loads=loads), image("2", 4, loads=loads)))


def test_stored_images_are_dropped_by_their_last_use() -> None:
    stored = ServerImages(max_bytes=3 * 8)
    for digest in "abc":
        stored.add(digest, {"x": torch.zeros(2)})
    assert stored.get("a") is not None
    stored.add("a", {"x": torch.zeros(2)})
    stored.add("d", {"x": torch.zeros(2)})
    assert [stored.get(digest) is None for digest in "abcd"] == [False, True, False, False]
    stored.add("e", {"x": torch.zeros(100)})
    assert stored.get("e") is not None, "an image larger than the limit is kept until the next one"
    assert stored.get("a") is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"missing": {STORE}}, rf"has no route {STORE}; use vLLM 0.32 or newer, and start the server with --enable-"),
        ({"reads_images": False}, "serves a model that reads no images; start the server with the model of model.path"),
        ({"normalizes": True}, "would normalize .*; start the server with --no-mm-device-do-normalize"),
    ],
)
def test_servers_that_cannot_take_images(changes: dict[str, Any], problem: str) -> None:
    fake = Seeing()
    vision = served_of(vocabulary=fake.vocabulary, model=ModelConfig(path="unused", vision=True))
    with serving(fake) as (url,):
        assert asyncio.run(VllmServer(url, 5.0).check(vision)) == "policy"
        for name, value in changes.items():
            setattr(fake, name, value)
        with refused("rollout.servers", problem):
            asyncio.run(VllmServer(url, 5.0).check(vision))
        asyncio.run(VllmServer(url, 5.0).check(served_of(vocabulary=fake.vocabulary)))


def test_the_options_of_servers_that_a_run_starts() -> None:
    options = ["--no-mm-device-do-normalize", "--enable-scale-out"]
    for vision in (False, True):
        served = served_of(model=ModelConfig(path="unused", vision=vision))
        command = VllmServer.command(["vllm", "serve"], served, name="policy", port=8000)
        assert [option in command for option in options] == [vision] * 2
        both = VllmServer.command([], replace(served, returns_kept="rollout.top_k"), name="policy", port=8000)
        assert both.count("--enable-scale-out") == 1


def test_images_whose_inputs_servers_do_not_take_are_refused_before_the_run(tmp_path: Path) -> None:
    prompt_rows(tmp_path)
    changes = ("rollout.engine=vllm", "rollout.servers=http://127.0.0.1:1")
    with refused("rollout.engine", "its servers cannot take images for InternVL"):
        preflight(config_of(tmp_path, "run", *changes, model="internvl"), processes=1, device_type="cpu")
    taken = {name for name, family in FAMILIES.items() if family.inputs == VllmServer.image_inputs}
    assert all(re.match("Qwen|Glm", name) for name in taken), "as the message says"
    assert "Qwen3VLForConditionalGeneration" in taken


def seeing(folder: str | Path) -> Seeing:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Seeing(vocabulary=model.config.text_config.vocab_size, model=model, tokenizer=tokenizer)


def test_a_run_with_images_on_a_server(tmp_path: Path) -> None:
    """Prompts with one image, two images and none. The server gets the weights of the tower, too."""
    prompt_rows(tmp_path)
    fake = seeing(config_of(tmp_path, "run").model.path)
    before = {name: value.clone() for name, value in fake.model.named_parameters()}
    with serving(fake) as (url,):
        changes = ("rollout.engine=vllm", f"rollout.servers={url}", "rollout.timeout=60")
        train(config_of(tmp_path, "run", *changes))
    found = [line for line in lines(tmp_path / "run") if "loss/sampler_difference" in line]
    assert len(found) == 4
    # With two updates per batch, the first update of a batch has the weights that sampled it.
    assert all(line["loss/sampler_difference"] < 1e-4 for line in found[::2])
    changed = {name for name, value in fake.model.named_parameters() if not torch.equal(value, before[name])}
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    assert fake.calls.count(STORE) == 3, "three distinct images, each sent once"
    versions = {key.split()[1] for key in fake.keys}
    assert versions == {"0", "2"}, "encoded again after the weight sync between the two batches"


def test_an_environment_that_shows_new_pictures_on_a_server(tmp_path: Path) -> None:
    """Later turns show several images, and the tokens of earlier turns may contain a sampled placeholder."""
    prompt_rows(tmp_path)
    fake = seeing(config_of(tmp_path, "run").model.path)
    with serving(fake) as (url,):
        engine = ("rollout.engine=vllm", f"rollout.servers={url}", "rollout.timeout=60")
        played = (f"rollout.environment={THREE}", "rollout.reward=none", "rollout.max_new_tokens=120")
        longer = ("batch.max_tokens=1000", "loss.mini_batches=1", "run.steps=2")
        train(config_of(tmp_path, "run", *engine, *played, *longer))
    found = lines(tmp_path / "run")
    assert all(line["loss/sampler_difference"] < 1e-4 for line in found)
    assert max(fake.images_per_request) > 1
