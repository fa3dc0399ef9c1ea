"""The cost model measured on the device at hand.

    micro-batches    one sample of T, of T/2, T/4;  2 x T/2, 4 x T/4, 16 x T/16, ...
    seconds          forward and backward by the engine of a run, of a model with random weights: compiled, with the
                     checkpointing and the types of the run; the fastest of a few
    CostModel.fit    linear · Σn + quadratic · Σn² + constant; and what an update takes besides its micro-batches

A model of many layers is not built: layers are alike, so two shallow models tell what a layer costs and what the rest.

    seconds(L layers) = seconds(shallow) + (L - shallow) / period · (seconds(shallow + period) - seconds(shallow))

The kinds of layers (windowed, full; dense, mixture) repeat after `period` layers; a part of a period counts as that
part of one. The result is kept as JSON in the cache folder; `batch.cost` may name the file on any machine.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from padfree.batch import Sample
from padfree.config import Config
from padfree.config.output_sections import check_output
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.errors import UserError
from padfree.estimate.cost_file import check_grows
from padfree.losses import SFTSettings
from padfree.model.load import load_model
from padfree.optim.optimizer import make_optimizer
from padfree.packing import CostModel
from padfree.sharding.parallelize import parallelize, transformations
from padfree.sizes import ModelSizes
from padfree.tools.planner.time_model import cost_path, device_name
from padfree.train.engine import Engine, LossSettings, PreparedStep
from padfree.train.scorer import Scorer

REPEATS = 3
FLOPS_A_WEIGHT = 6  # a multiplication and an addition, forward and twice in backward
MEASURED_TOKENS = {"cpu": 512, "cuda": 16384}
"""Of the largest micro-batch that is measured, or less if --max-tokens is less."""

AFFORDABLE_FLOPS = {"cpu": 2e11, "cuda": 1e15}
"""Of that micro-batch: of a larger model it has fewer tokens, so that measuring takes minutes at most ..."""

FEWEST_TOKENS = 64
"""... but not fewer than this."""

WHOLE_MODEL_WEIGHTS = {"cpu": 20_000_000, "cuda": 1_000_000_000}
"""Models of which a token meets up to so many weights are measured as they are."""

MEASURED_TOGETHER = {"cpu": 1, "cuda": 3}
"""Micro-batches that are measured together: from the second on the host is ahead of a GPU, as it is in a run."""

TRUSTED_FACTOR = 4.0
"""Measurements further than this factor from the fitted model are refused."""

OnMeasurement = Callable[[int, int], None]
"""Called with how many micro-batches have run and how many will."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One micro-batch: what it takes with all layers, and what the fitted model says of it."""

    lengths: tuple[int, ...]
    seconds: float
    predicted: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """A measured cost model."""

    cost: CostModel  # in seconds
    device: str
    layers: tuple[int, ...]  # of the models that were measured
    measurements: list[Measurement]
    worst: float  # the largest factor between a measurement and its prediction
    path: Path


def calibrate(
    model_config: Any, config: Config, *, max_tokens: int | None = None, progress: OnMeasurement | None = None
) -> Calibration:
    """Measure on `run.device`, and store what comes out under `cost_path`. The settings must be settled."""
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device", "'cuda', but torch sees no GPU here", "leave it out or set it to cpu")
    if config.lora.rank:
        raise UserError("lora.rank", f"{config.lora.rank} with --calibrate", "measure all weights, with lora.rank=0")
    layers = ModelSizes.of(model_config).layers
    with distributed(device=config.run.device) as device:
        name = device_name(device.type)
        path = cost_path(name, model_config, config)
        check_output(path, "PADFREE_CACHE", makes_folder=True)  # before the measuring, which takes a while
        depths = measured_layers(model_config, WHOLE_MODEL_WEIGHTS[device.type])
        flops = CostModel.from_config(with_layers(model_config, depths[-1])).linear
        affordable = max(FEWEST_TOKENS, int(AFFORDABLE_FLOPS[device.type] / flops))
        tokens = min(max_tokens or MEASURED_TOKENS[device.type], MEASURED_TOKENS[device.type], affordable)
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        batches = micro_batches(min(tokens, positions) if positions else tokens, tokens)
        mesh = make_mesh(device)
        runs = [_runner(with_layers(model_config, depth), config, mesh) for depth in depths]
        taken = _measured(runs, batches, progress)
        updates = [min(run([]) for _ in range(REPEATS + 1)) for run in runs]
    seconds = extrapolated(taken, depths, layers)
    step = extrapolated([[update] for update in updates], depths, layers)[0]
    cost = replace(CostModel.fit(batches, seconds), step=step)
    check_grows(cost, "--calibrate")
    measured = [
        Measurement(lengths=tuple(batch), seconds=each, predicted=float(cost(batch).sum() + cost.constant))
        for batch, each in zip(batches, seconds, strict=True)
    ]
    worst = max(max(each.seconds / each.predicted, each.predicted / each.seconds) for each in measured)
    if worst > TRUSTED_FACTOR:
        raise UserError(
            "--calibrate",
            f"a micro-batch took {worst:.1f} times what the others let expect, or as much less",
            "measure again while nothing else runs on the device",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    cost.to_json(path)
    found = Calibration(cost=cost, device=name, layers=depths, measurements=measured, worst=worst, path=path)
    _write_about(found, config)
    return found


def micro_batches(longest: int, tokens: int) -> list[list[int]]:
    """Lengths of samples: few long ones and many short ones, at most `longest` each and `tokens` together."""
    parts = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (16, 16), (8, 2), (64, 64))  # of `tokens`, and how many of them
    found = [[min(longest, max(2, tokens // part))] * count for part, count in parts]
    return [batch for index, batch in enumerate(found) if batch not in found[:index] and sum(batch) <= max(tokens, 2)]


def measured_layers(model_config: Any, whole: int) -> tuple[int, ...]:
    """How many layers the measured models have: all, or one period and a few behind what comes before them."""
    sizes = ModelSizes.of(model_config)
    layers = sizes.layers
    kinds = list(zip(sizes.layer_types or [""] * layers, sizes.sparse, strict=True))
    shallow, period = next(
        (before + period, period)
        for together in range(1, layers + 1)
        for period in range(1, together + 1)
        for before in [together - period]
        if kinds[before + period :] == kinds[before : layers - period]
    )
    deep = shallow + -(-3 // period) * period  # three layers apart at least: noise matters less
    if 2 * deep > layers:
        deep = shallow + period
    if deep >= layers or CostModel.from_config(model_config).linear / FLOPS_A_WEIGHT <= whole:
        return (layers,)
    return shallow, deep


def with_layers(model_config: Any, layers: int) -> Any:
    """The same config with its first layers only."""
    found = copy.deepcopy(model_config)
    config = found.get_text_config()
    before = int(config.num_hidden_layers)
    if layers == before:
        return found
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    return found


def extrapolated(taken: Sequence[Sequence[float]], depths: Sequence[int], layers: int) -> list[float]:
    """The seconds of each micro-batch with `layers` layers, from those with fewer.

    Noise may make a deeper model look faster; a layer never counts for less than nothing.
    """
    if len(taken) == 1:
        return list(taken[0])
    periods = (layers - depths[0]) / (depths[1] - depths[0])
    return [first + periods * max(0.0, second - first) for first, second in zip(*taken, strict=True)]


Run = Callable[[Sequence[int]], float]
"""Seconds of a micro-batch of these lengths, forward and backward; of no lengths: of the rest of an update."""


def _runner(model_config: Any, config: Config, mesh: Mesh) -> Run:
    """An engine as a run would build it, of a model with random weights."""
    parallel = config.parallel
    assert parallel.checkpointing != "auto", "settled before"
    assert parallel.reshard != "auto", "settled before"
    steps = transformations(
        mesh,
        attention=config.model.attention,
        compile=str(parallel.compile),
        operators=parallel.kernels == "auto",
        checkpointing=parallel.checkpointing,
        dtype=getattr(torch, config.model.dtype),
        reshard=parallel.reshard,
        offload=parallel.offload,
    )
    model = load_model(
        model_config, device=mesh.device, shard=lambda model: parallelize(model, steps), offload=parallel.offload
    )
    scorer = Scorer(model, mesh, max_tokens=1, overlong="alone")
    settings = LossSettings(loss=SFTSettings(), head_memory=parallel.head_bytes)
    engine = Engine(scorer, make_optimizer(model, config.optimizer.with_lr(0.0)), settings)
    vocabulary = ModelSizes.of(model_config).vocabulary
    generator = np.random.default_rng(0)

    def prepared(lengths: Sequence[int], times: int) -> PreparedStep:
        scorer.packer.max_tokens = sum(lengths)
        found = engine.prepare([Sample(tokens=generator.integers(0, vocabulary, length)) for length in lengths])
        return replace(found, packs=[*found.packs] * times)

    def seconds(work: Callable[[], object]) -> float:
        _wait(mesh.device)
        start = time.perf_counter()
        work()
        _wait(mesh.device)
        return time.perf_counter() - start

    def run(lengths: Sequence[int]) -> float:
        if not lengths:  # the difference that the optimizer makes to the smallest of steps
            smallest = prepared([FEWEST_TOKENS], 1)
            update = seconds(lambda: engine.begin(smallest).finish())
            return max(0.0, update - seconds(lambda: engine.gradients(smallest)))
        in_a_row = MEASURED_TOGETHER[mesh.device.type]
        step = prepared(lengths, in_a_row)
        return seconds(lambda: engine.gradients(step)) / in_a_row

    return run


def _measured(
    runs: Sequence[Run], batches: Sequence[Sequence[int]], progress: OnMeasurement | None
) -> list[list[float]]:
    """[models][batches] the least seconds of some rounds over all, so that no passing load falls on one alone."""
    found = np.full((len(runs), len(batches)), np.inf)
    done, everything = 0, (REPEATS + 1) * found.size
    try:
        for repeat in range(REPEATS + 1):
            for place in np.ndindex(found.shape):
                seconds = runs[place[0]](batches[place[1]])
                if repeat:  # the first call of a shape pays for set-up
                    found[place] = min(found[place], seconds)
                done += 1
                if progress is not None:
                    progress(done, everything)
    except torch.OutOfMemoryError:
        tokens = max(map(sum, batches))
        raise UserError("--max-tokens", f"{tokens} do not fit in this device's memory", "give fewer") from None
    times: list[list[float]] = found.tolist()
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _write_about(found: Calibration, config: Config) -> None:
    """Beside the cost model, for people: what was measured."""
    about = {
        "device": found.device,
        "model": config.model.path,
        "dtype": config.model.dtype,
        "compile": config.parallel.compile,
        "kernels": config.parallel.kernels,
        "checkpointing": config.parallel.checkpointing,
        "torch": torch.__version__,
        "layers": list(found.layers),
        "measurements": [asdict(each) for each in found.measurements],
    }
    found.path.with_suffix(".about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
