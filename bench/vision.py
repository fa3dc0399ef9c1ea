"""Gradients of a vision-language model with the sizes of Qwen3-VL-4B: padfree compared with transformers.

    conversations   64 conversations about 32 pictures of mixed sizes; each picture is shown by two conversations
        padfree         packs; each picture of a pack is encoded once
        text only       padfree on conversations of the same lengths without pictures
        transformers    padded micro-batches of conversations of similar length; one conversation at a time
    group           16 answers about one picture, by padfree
        one picture     encoded once, and the prompt is computed once
        16 pictures     the same answers, as if each had a picture of its own

    PYTHONPATH=src python bench/vision.py --device cuda --json vision.json
    PYTHONPATH=src python bench/vision.py --device cpu --shape tiny

Weights and pixels are random and drawn on the device. All ways compute the gradients of all parameters, tower included,
without an optimizer. Tokens/s count placeholders of pictures, too. The language part is a step without the time of the
tower alone. The losses of the ways are compared first.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side_by_side import machine
from timer import median_seconds
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from padfree.distributed import Mesh, distributed, make_mesh
from padfree.estimate.flops import Flops, Shared
from padfree.images import Image
from padfree.losses import SFTSettings
from padfree.model.vision import prepare_sample
from padfree.model.vision.families import need_family
from padfree.model.vision.tower_cost import tower_cost
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tools.check.padded import padded_rows
from padfree.train.engine import Engine, LossSettings
from padfree.train.scorer import Scorer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
        "vision": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
                   "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        "sections": [2, 3, 3], "features": (4, 30), "text_tokens": 20, "max_tokens": 1024, "padded_tokens": 512,
    },
    "4b": {
        "text": {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
        "vision": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
                   "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
        "sections": [24, 20, 20], "features": (64, 1280), "text_tokens": 250, "max_tokens": 8192, "padded_tokens": 8192,
    },
}  # fmt: skip
PICTURES, CONVERSATIONS, ANSWERS = 32, 64, 16
PLACEHOLDER, START, END = 3, 4, 5
CLOSE = 2e-2  # largest accepted difference between losses in bfloat16

Gradients = Callable[[], Tensor]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: 4b on a GPU, tiny on a CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shape = SHAPES[given.shape or ("4b" if given.device == "cuda" else "tiny")]
    with distributed(device=given.device) as device:
        report = {**machine(device), **compared(shape, device, make_mesh(device), given.repeats)}
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    return report


def compared(shape: dict[str, Any], device: torch.device, mesh: Mesh, repeats: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(shape, device, dtype)
    samples = conversations(model, shape)
    plain = [Sample(tokens=text_only(sample), loss_mask=sample.mask, uid=sample.uid) for sample in samples]
    one, apart = group(model, shape, same=True), group(model, shape, same=False)
    flops = Flops.of(model.config, devices=1, device=device, dtype=dtype, image=tower_cost(model))
    tokens, image_tokens = (
        sum(map(len, samples)),
        sum(len(image.positions) for each in samples for image in each.images),
    )
    print(f"{len(samples)} conversations, {tokens:,} tokens, {image_tokens:,} of them of pictures", flush=True)

    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, gradients: Gradients, count: int, ideal: float | None = None) -> float:
        loss = float(gradients())
        seconds = median_seconds(gradients, device, repeats=repeats, warmup=1)
        rows[name] = {"loss": loss, "seconds": seconds, "tokens/s": count / seconds}
        if ideal is not None and flops.peak is not None:
            rows[name]["mfu"] = ideal / seconds / 1e12 / flops.peak
        if device.type == "cuda":
            rows[name]["GiB"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        shown = "  ".join(f"{key} {value:,.4g}" for key, value in rows[name].items())
        print(f"{name:32} {shown}", flush=True)
        return seconds

    # transformers first: `parallelize` changes the model.
    measure("transformers, one at a time", partial(by_transformers, model, [[each] for each in samples]), tokens)
    batches = padded_batches(samples, shape["padded_tokens"])
    measure("transformers, padded", partial(by_transformers, model, batches), tokens)
    free(model)

    parallelize(model, transformations(mesh, compile="inductor" if device.type == "cuda" else "none"))
    scorer = Scorer(model, mesh, max_tokens=shape["max_tokens"])
    engine = Engine(scorer, make_optimizer(model, OptimizerConfig(lr=1e-6)), LossSettings(loss=SFTSettings()))

    def by_padfree(chosen: Sequence[Sample]) -> Gradients:
        prepared = engine.prepare(chosen)
        for fewer in (1, 2):  # run other lengths first, so that layers are compiled for any length, as in a run
            engine.gradients(engine.prepare(chosen[fewer:]))
        return lambda: engine.gradients(prepared).loss

    lengths, labels = [len(each) for each in samples], sum(each.num_labels for each in samples)
    language = flops.step(lengths, labels)
    whole = measure("padfree", by_padfree(samples), tokens)
    tower = measure("padfree, tower alone", partial(tower_alone, engine, samples), image_tokens)
    text = measure("padfree, text only", by_padfree(plain), tokens, language)
    prompt = len(one[0]) - int(one[0].mask.sum())
    shared = Shared(tokens=(ANSWERS - 1) * prompt, pairs=(ANSWERS - 1) * prompt**2)
    count, features = sum(map(len, one)), len(one[0].images[0].positions)
    together = measure("padfree, group of one picture", by_padfree(one), count)
    separate = measure("padfree, group of 16 pictures", by_padfree(apart), count)
    lengths, labels = [len(each) for each in one], sum(each.num_labels for each in one)
    work = flops.step(lengths, labels, image_features=[features] * ANSWERS) / flops.step(
        lengths, labels, shared, image_features=[features]
    )
    check_losses(rows)
    found = {
        "padfree / padded": rows["transformers, padded"]["seconds"] / whole,
        "padfree / one at a time": rows["transformers, one at a time"]["seconds"] / whole,
        "language part / text only": text / (whole - tower),
        "gain of a group": separate / together,
        "ratio of its work": work,
        "gain / ratio": separate / together / work,
    }
    if flops.peak is not None:
        found["MFU of the language part"] = language / (whole - tower) / 1e12 / flops.peak
    for name, value in found.items():
        print(f"{name:32} {value:.3g}", flush=True)
    return {"tokens": tokens, "image tokens": image_tokens, "ways": rows, "ratios": found}


def check_losses(rows: dict[str, dict[str, float]]) -> None:
    first = rows["padfree"]["loss"]
    for name in ("transformers, one at a time", "transformers, padded"):
        assert abs(rows[name]["loss"] - first) < CLOSE * first, f"the loss of {name} differs"


# Model and samples


def random_model(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    text = {"tie_word_embeddings": True, "max_position_embeddings": 32_768, "pad_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": shape["sections"], "mrope_interleaved": True}
    config: Any = Qwen3VLConfig(
        text_config={**shape["text"], **text, "rope_parameters": rope},
        vision_config={**shape["vision"], "out_hidden_size": shape["text"]["hidden_size"]},
        image_token_id=PLACEHOLDER, vision_start_token_id=START, vision_end_token_id=END, video_token_id=6,
        tie_word_embeddings=True,
    )  # fmt: skip
    make: Any = Qwen3VLForConditionalGeneration
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = make._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(default)
    return model.train()


def picture(model: Any, number: int, features: int) -> tuple[tuple[int, int, int], Callable[[], dict[str, Any]]]:
    """Make a picture with about this many features: its grid of patches, and a function that draws its pixels."""
    generator, vision = np.random.default_rng(number), model.config.vision_config
    side = vision.spatial_merge_size
    rows = max(1, round(float(np.sqrt(features) * generator.uniform(0.7, 1.4))))
    grid = (1, rows * side, max(1, features // rows) * side)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = generator.standard_normal((int(np.prod(grid)), width), dtype=np.float32)
    return grid, lambda: {"pixel_values": pixels, "image_grid_thw": np.array([grid])}


def asked(model: Any, number: int, features: int, prompt: int, answer: int, *, seed: int, **more: Any) -> Sample:
    """Make a conversation: picture `number`, then `prompt` random tokens, then `answer` random trained tokens."""
    grid, load = picture(model, number, features)
    shown = int(np.prod(grid)) // model.config.vision_config.spatial_merge_size**2
    vocabulary = model.config.text_config.vocab_size
    rest = np.random.default_rng([seed, 1]).integers(10, vocabulary, answer)
    asking = np.random.default_rng([number, 2]).integers(10, vocabulary, prompt)
    tokens = np.concatenate([[START], np.full(shown, PLACEHOLDER), [END], asking, rest])
    image = Image(digest=more.pop("digest", str(number)), positions=np.arange(1, 1 + shown), load=load, grid=grid)
    mask = np.arange(len(tokens)) >= len(tokens) - answer
    return prepare_sample(model, Sample(tokens=tokens, loss_mask=mask, images=(image,), uid=seed, **more))


def conversations(model: Any, shape: dict[str, Any]) -> list[Sample]:
    generator, (least, most) = np.random.default_rng(8), shape["features"]
    sizes = np.exp(generator.uniform(np.log(least), np.log(most), PICTURES)).astype(int)
    answers = np.clip(generator.lognormal(np.log(shape["text_tokens"]), 0.7, CONVERSATIONS), 4, 4096).astype(int)
    prompts = generator.integers(5, max(6, shape["text_tokens"] // 4), PICTURES)
    return [
        asked(
            model, number % PICTURES, sizes[number % PICTURES], prompts[number % PICTURES], answers[number], seed=number
        )
        for number in range(CONVERSATIONS)
    ]


def text_only(sample: Sample) -> Any:
    return np.where(sample.tokens == PLACEHOLDER, 7, sample.tokens)


def group(model: Any, shape: dict[str, Any], *, same: bool) -> list[Sample]:
    """Make 16 answers to one question about one picture.

    Without `same`, each answer has a picture with a name of its own, so that the picture is encoded 16 times.
    """
    features, answer = sum(shape["features"]) // 2, shape["text_tokens"] // 2
    names = ["one" if same else f"own {number}" for number in range(ANSWERS)]
    return [
        asked(model, 0, features, 20, answer, seed=100 + number, group="one", digest=name)
        for number, name in enumerate(names)
    ]


# transformers


def padded_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Group samples of similar length into micro-batches of at most `max_tokens` padded tokens."""
    found: list[list[Sample]] = []
    for sample in sorted(samples, key=len, reverse=True):
        if not found or (len(found[-1]) + 1) * len(found[-1][0]) > max_tokens:
            found.append([])
        found[-1].append(sample)
    return found


def by_transformers(model: Any, batches: Sequence[Sequence[Sample]]) -> Tensor:
    """Compute the gradients of padded micro-batches. transformers computes positions, masks and features."""
    model.zero_grad(set_to_none=True)
    count = sum(sample.num_labels for batch in batches for sample in batch)
    total = torch.zeros((), device=model.device)
    for batch in batches:
        padded = padded_rows(batch, model.device)
        inputs = [image.load() for sample in batch for image in sample.images]
        pixels = torch.from_numpy(np.concatenate([each["pixel_values"] for each in inputs]))
        grids = torch.from_numpy(np.concatenate([each["image_grid_thw"] for each in inputs]))
        loss = model(
            input_ids=padded.input_ids, attention_mask=padded.attention_mask, labels=padded.labels, use_cache=False,
            pixel_values=pixels.to(model.device, model.dtype), image_grid_thw=grids.to(model.device),
            mm_token_type_ids=(padded.input_ids == PLACEHOLDER).int(), num_items_in_batch=count,
        ).loss  # fmt: skip
        loss.backward()
        total += loss.detach()
    return total


# padfree


def tower_alone(engine: Engine, samples: Sequence[Sample]) -> Tensor:
    """Compute the gradients of the vision tower for the pictures of each pack."""
    base: Any = engine.model.base_model
    family = need_family(engine.model)
    engine.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=engine.mesh.device)
    for batch, _ in engine.prepare(samples).packs:
        assert batch.local.images is not None
        output = family.encode(base, batch.local.images.inputs)
        stacked = [part for layer in output.deepstack_features for part in layer]
        loss = torch.stack([part.float().mean() for part in (*output.pooler_output, *stacked)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def free(model: Any) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
