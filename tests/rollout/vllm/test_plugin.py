"""The plugin inside vLLM servers of several versions: stubs with the signatures of vLLM 0.24 and of 0.25 to 0.33."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from padfree.rollout.engines import vllm_plugin
from padfree.rollout.engines.servers.weight_stream import Bucket
from padfree.rollout.engines.servers.weight_sync import FilesTransport

BASE = "vllm.distributed.weight_transfer"
RELOAD = "vllm.model_executor.model_loader.reload"
ROUTES = "vllm.entrypoints.serve.dev.rlhf.api_router"
PARALLEL = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)


@dataclass
class InitInfo(ABC):  # noqa: B024
    pass


@dataclass
class UpdateInfo(ABC):  # noqa: B024
    """Of vLLM 0.25 and newer."""


@dataclass
class SparseUpdateInfo(ABC):
    """Of vLLM 0.24."""

    _: KW_ONLY
    update_kind: Literal["dense", "sparse_flat"] = "dense"
    num_updates_list: list[int] | None = None


class Parsing:
    """What both versions of the engine do with JSON."""

    init_info_cls: Any
    update_info_cls: Any

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)


class Engine24(Parsing, ABC):
    def __init__(self, config: Any, parallel_config: Any, model: nn.Module) -> None:
        self.config, self.parallel_config, self.model = config, parallel_config, model

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any, load_weights: Callable[[Any], None]) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class Engine25(Parsing, ABC):
    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class Factory:
    def __init__(self) -> None:
        self._registry: dict[str, Any] = {}

    def register_engine(self, name: str, engine: Any) -> None:
        assert name not in self._registry, "vLLM refuses a name that is already registered"
        self._registry[name] = engine


class Model(nn.Linear):
    """Loads weights by name."""

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    def make(*, old: bool, router: Any = None) -> SimpleNamespace:
        reloads: list[str] = []
        found = SimpleNamespace(factory=Factory(), reloads=reloads)
        modules: dict[str, dict[str, Any]] = {
            f"{BASE}.factory": {"WeightTransferEngineFactory": found.factory},
            f"{BASE}.base": {
                "WeightTransferEngine": Engine24 if old else Engine25,
                "WeightTransferInitInfo": InitInfo,
                "WeightTransferUpdateInfo": SparseUpdateInfo if old else UpdateInfo,
            },
            RELOAD: {
                "initialize_layerwise_reload": lambda model: reloads.append("begin"),
                "finalize_layerwise_reload": lambda model, config: reloads.append("end"),
            },
            "vllm.model_executor.layers.vocab_parallel_embedding": {"UnquantizedEmbeddingMethod": type("No", (), {})},
        }
        if router is not None:
            modules[ROUTES] = {"router": router}
        for path, values in modules.items():
            parts = path.split(".")
            for number in range(1, len(parts) + 1):
                name = ".".join(parts[:number])
                if name not in sys.modules:
                    package = ModuleType(name)
                    package.__path__ = []  # type: ignore[attr-defined]
                    monkeypatch.setitem(sys.modules, name, package)
            for name, value in values.items():
                monkeypatch.setattr(sys.modules[path], name, value, raising=False)
        vllm_plugin.register()
        vllm_plugin.register()  # vLLM loads plugins in several places of a process
        return found

    return make


def bucket_in_file(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return FilesTransport(folder).prepare(Bucket(list(tensors.items()))).transfer_info


def weights(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((2, 3), value), "bias": torch.full((2,), -value)}


def check(model: Model, value: float) -> None:
    for name, tensor in weights(value).items():
        assert torch.equal(model.get_parameter(name), tensor)


def test_an_engine_of_vllm_0_24(install: Any, tmp_path: Path) -> None:
    """The worker begins and ends the reload, and gives the engine the function that loads weights."""
    found, model = install(old=True), Model(3, 2)
    engine = found.factory._registry["padfree"]("config", PARALLEL, model)
    with pytest.raises(RuntimeError, match="before /init_weight_transfer_engine"):
        engine.receive_weights(engine.parse_update_info({}), load_weights=model.load_weights)
    engine.init_transfer_engine(engine.parse_init_info({"transport": "files"}))
    for value in (2.0, 3.0):
        info = engine.parse_update_info(bucket_in_file(tmp_path, weights(value)))
        assert info.update_kind == "dense", "the worker reads this field"
        engine.receive_weights(info, load_weights=model.load_weights)
        check(model, value)
    assert found.reloads == [], "the worker does it"
    engine.shutdown()


def test_an_engine_of_vllm_0_25_and_newer(install: Any, tmp_path: Path) -> None:
    found, model = install(old=False), Model(3, 2)
    config = SimpleNamespace(parallel_config=PARALLEL, model_config=None)
    engine = found.factory._registry["padfree"]("config", config, torch.device("cpu"), model)
    engine.init_transfer_engine(engine.parse_init_info({"transport": "files"}))
    for value in (2.0, 3.0):
        engine.start_weight_update()
        engine.update_weights(bucket_in_file(tmp_path, weights(value)))
        engine.finish_weight_update()
        check(model, value)
    assert found.reloads == ["begin", "end"] * 2
    engine.start_weight_update()
    engine.start_weight_update()  # the trainer was killed
    assert found.reloads[4:] == ["begin", "end", "begin"]


class Router:
    """A stub of `fastapi.APIRouter`."""

    def __init__(self, *paths: str) -> None:
        self.routes = [SimpleNamespace(path=path, endpoint=None) for path in paths]

    def add_api_route(self, path: str, endpoint: Any, *, methods: list[str]) -> None:
        self.routes.append(SimpleNamespace(path=path, endpoint=endpoint, methods=methods))


@pytest.fixture
def fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have FastAPI. The environment of the tests may not."""
    stub = ModuleType("fastapi")
    stub.Body = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastapi", stub)


@pytest.mark.usefixtures("fastapi")
def test_routes_for_the_policy_version_before_vllm_0_27(install: Any) -> None:
    router = Router("/pause", "/start_weight_update")
    install(old=True, router=router)
    added = {route.path: route for route in router.routes[2:]}
    assert [(path, route.methods) for path, route in added.items()] == [
        ("/weight_info", ["GET"]),
        ("/update_weight_version", ["POST"]),
    ], "once, although the plugin is loaded twice"
    read, update = added["/weight_info"].endpoint, added["/update_weight_version"].endpoint
    assert asyncio.run(read()) == {"weight_version": "default"}, "the weights that vLLM loaded itself"
    asyncio.run(update("7"))
    assert asyncio.run(read()) == {"weight_version": "7"}


@pytest.mark.usefixtures("fastapi")
def test_vllm_s_own_routes_are_kept(install: Any) -> None:
    router = Router("/pause", "/weight_info", "/update_weight_version")
    install(old=False, router=router)
    assert len(router.routes) == 3
