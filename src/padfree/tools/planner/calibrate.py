"""Measure the cost model on this device: the seconds of a micro-batch as a function of its sample lengths n.

    seconds = linear · Σn + quadratic · Σn² + constant

The training engine runs micro-batches of few long and many short samples, with random weights and the settings of the
run. Of a deep model, two shallow copies are measured, and the seconds are extrapolated to all layers. The result is a
JSON file in the cache folder. `batch.cost` can name this file on any machine.
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

from padfree.config import Config
from padfree.config.output_sections import check_output
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.errors import UserError
from padfree.estimate.cost_file import check_grows
from padfree.losses import SFTSettings
from padfree.model.load import load_model
from padfree.optim.optimizer import make_optimizer
from padfree.packing import CostModel
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.sizes import ModelSizes
from padfree.tools.planner.time_model import cost_path, device_name
from padfree.train.engine import Engine, LossSettings
from padfree.train.scorer import Scorer
from padfree.train.step import PreparedStep

REPEATS = 3
FLOPS_PER_WEIGHT = 6  # a multiplication and an addition, once in forward and twice in backward
MEASURED_TOKENS = {"cpu": 512, "cuda": 16384}
"""Tokens of the largest measured micro-batch, by device type. `--max-tokens` can lower this number."""

AFFORDABLE_FLOPS = {"cpu": 2e11, "cuda": 1e15}
"""Maximum FLOPs of a measured micro-batch, by device type. Large models get fewer tokens, to save time."""

FEWEST_TOKENS = 64
"""The largest measured micro-batch has at least this many tokens, even if its FLOPs are above `AFFORDABLE_FLOPS`."""

WHOLE_MODEL_WEIGHTS = {"cpu": 20_000_000, "cuda": 1_000_000_000}
"""Maximum number of active parameters of a model that is measured with all of its layers, by device type. The times of
a larger model are extrapolated from two models with fewer layers."""

MEASURED_TOGETHER = {"cpu": 1, "cuda": 3}
"""The number of consecutive micro-batches that are timed together, by device type. On a GPU there are several, so that
the host can run ahead of it, as in training."""

TRUSTED_FACTOR = 4.0
"""`calibrate` fails if a measurement and its fitted value differ by more than this factor."""

OnMeasurement = Callable[[int, int], None]
"""Function that is called with the number of micro-batches measured so far and the total number of micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The time of a micro-batch of samples with these lengths."""

    lengths: tuple[int, ...]
    seconds: float  # as measured, or extrapolated from measurements of models with fewer layers
    predicted: float  # in seconds, by the fitted cost model


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """A measured cost model, with the measurements and the file that stores it."""

    cost: CostModel  # its units are seconds
    device: str
    layers: tuple[int, ...]  # number of layers of each measured model
    measurements: list[Measurement]
    worst: float  # the largest ratio between a measurement and its prediction, in either direction
    path: Path


def calibrate(
    model_config: Any, config: Config, *, max_tokens: int | None = None, progress: OnMeasurement | None = None
) -> Calibration:
    """Measure the cost model on `run.device`, store it at `cost_path`, and return it.

    No setting of `config` may be "auto". `max_tokens`: the maximum number of tokens of a measured micro-batch.
    """
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "run.device", "'cuda', but torch finds no GPU on this machine", "remove this setting, or set run.device=cpu"
        )
    if config.lora.rank:
        raise UserError(
            "lora.rank",
            "is not supported by --calibrate",
            "set lora.rank=0 to measure training of all weights",
            value=config.lora.rank,
        )
    layers = ModelSizes.of(model_config).layers
    with distributed(device=config.run.device) as device:
        name = device_name(device.type)
        path = cost_path(name, model_config, config)
        check_output(path, "PADFREE_CACHE", makes_folder=True)  # fail before the measurements, which take a while
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
            f"one measurement differs from the fitted cost model by a factor of {worst:.1f}",
            "measure again while nothing else runs on the device",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    cost.to_json(path)
    found = Calibration(cost=cost, device=name, layers=depths, measurements=measured, worst=worst, path=path)
    _write_about(found, config)
    return found


def micro_batches(longest: int, tokens: int) -> list[list[int]]:
    """Return the sample lengths of each micro-batch to measure: few long samples or many short ones.

    A sample has at most `longest` tokens, a micro-batch at most `tokens`.
    """
    parts = (
        (1, 1),
        (2, 1),
        (4, 1),
        (2, 2),
        (4, 4),
        (16, 16),
        (8, 2),
        (64, 64),
    )  # (d, n): n samples of tokens // d tokens
    found = [[min(longest, max(2, tokens // part))] * count for part, count in parts]
    return [batch for index, batch in enumerate(found) if batch not in found[:index] and sum(batch) <= max(tokens, 2)]


def measured_layers(model_config: Any, whole: int) -> tuple[int, ...]:
    """Return the numbers of layers to measure the model with: all layers, or two smaller numbers to extrapolate from.

    All layers are measured if the model has at most `whole` active parameters, or too few layers to extrapolate.
    """
    sizes = ModelSizes.of(model_config)
    layers = sizes.layers
    kinds = list(zip(sizes.layer_types or [""] * layers, sizes.sparse, strict=True))
    # `shallow`: the number of layers before the repetition begins, plus one period
    shallow, period = next(
        (before + period, period)
        for together in range(1, layers + 1)
        for period in range(1, together + 1)
        for before in [together - period]
        if kinds[before + period :] == kinds[before : layers - period]
    )
    deep = shallow + -(-3 // period) * period  # at least three more layers, to reduce the effect of noise
    if 2 * deep > layers:
        deep = shallow + period
    if deep >= layers or CostModel.from_config(model_config).linear / FLOPS_PER_WEIGHT <= whole:
        return (layers,)
    return shallow, deep


def with_layers(model_config: Any, layers: int) -> Any:
    """Return a copy of the config with only the first `layers` layers."""
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
    """Return the seconds of each micro-batch with `layers` layers, extrapolated from measurements with fewer layers.

    `taken[i]`: seconds of each micro-batch with `depths[i]` layers. Noise can make the deeper model look faster. A
    layer then counts as 0 seconds, not as a negative time.
    """
    if len(taken) == 1:
        return list(taken[0])
    periods = (layers - depths[0]) / (depths[1] - depths[0])
    return [first + periods * max(0.0, second - first) for first, second in zip(*taken, strict=True)]


Run = Callable[[Sequence[int]], float]
"""Returns the seconds of forward and backward of a micro-batch with these sample lengths. If there are no lengths, it
returns the seconds of an optimizer step."""


def _runner(model_config: Any, config: Config, mesh: Mesh) -> Run:
    """Return a function that times micro-batches on a training engine with random weights."""
    parallel = config.parallel
    assert parallel.checkpointing != "auto", "must be resolved by the caller"
    assert parallel.reshard != "auto", "must be resolved by the caller"
    steps = transformations(
        mesh,
        attention=config.model.attention,
        compile=str(parallel.compile),
        operators=parallel.kernels == "auto",
        checkpointing=parallel.checkpointing,
        float8=parallel.float8,
        stretch=True,
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
        _synchronise(mesh.device)
        start = time.perf_counter()
        work()
        _synchronise(mesh.device)
        return time.perf_counter() - start

    def run(lengths: Sequence[int]) -> float:
        # Without lengths, time the optimizer: the time of a training step on the smallest micro-batch, minus the
        # time of the same step without the optimizer.
        if not lengths:
            smallest = prepared([FEWEST_TOKENS], 1)
            update = seconds(lambda: engine.begin(smallest).finish())
            return max(0.0, update - seconds(lambda: engine.gradients(smallest)))
        times = MEASURED_TOGETHER[mesh.device.type]
        step = prepared(lengths, times)
        return seconds(lambda: engine.gradients(step)) / times

    return run


def _measured(
    runs: Sequence[Run], batches: Sequence[Sequence[int]], progress: OnMeasurement | None
) -> list[list[float]]:
    """Return the minimum seconds over several rounds: one list per model, with one number per micro-batch."""
    found = np.full((len(runs), len(batches)), np.inf)
    done, everything = 0, (REPEATS + 1) * found.size
    try:
        # Each round measures every micro-batch, so that a short disturbance affects few repeats of a micro-batch.
        for repeat in range(REPEATS + 1):
            for index in np.ndindex(found.shape):
                seconds = runs[index[0]](batches[index[1]])
                if repeat:  # ignore the first call with a new shape, which includes set-up
                    found[index] = min(found[index], seconds)
                done += 1
                if progress is not None:
                    progress(done, everything)
    except torch.OutOfMemoryError:
        tokens = max(map(sum, batches))
        raise UserError(
            "--max-tokens",
            f"a micro-batch of {tokens} tokens does not fit in this device's memory",
            "lower --max-tokens",
        ) from None
    times: list[list[float]] = found.tolist()
    return times


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _write_about(found: Calibration, config: Config) -> None:
    """Write the measurements and the settings that they depend on to a JSON file, in the folder of the cost model."""
    about = {
        "device": found.device,
        "model": config.model.path,
        "dtype": config.model.dtype,
        "compile": config.parallel.compile,
        "kernels": config.parallel.kernels,
        "checkpointing": config.parallel.checkpointing,
        "float8": list(config.parallel.float8),
        "torch": torch.__version__,
        "layers": list(found.layers),
        "measurements": [asdict(each) for each in found.measurements],
    }
    found.path.with_suffix(".about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
