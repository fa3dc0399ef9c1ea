"""Prompts with images on a real vLLM server on the CPU: `make test-vllm` installs it and runs these tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from padfree.testing.vision_folders import vision_folder
from padfree.train.run import train
from tests.rollout.vllm.test_run import lines
from tests.rollout.vllm.test_server import COMMAND, ENVIRONMENT, PYTHON, ROOT, VENV, write_plugin
from tests.train.test_vision_rl import config_of, prompt_rows

pytest.importorskip("PIL")
TORCHVISION = VENV / "torchvision"  # in a folder of its own, because transformers would use it for text models too

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM; make test-vllm makes one and runs these"),
    pytest.mark.skipif(not TORCHVISION.exists(), reason="torchvision, which vLLM's image models import, is missing"),
]

OPERATORS = """
import importlib.abc, importlib.util, sys

class Operators(importlib.abc.MetaPathFinder):
    '''Defines operators that torchvision's wheel has for CUDA only. vLLM does not call them.'''

    def find_spec(self, name, path, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch
        folder = importlib.util.find_spec("torchvision").submodule_search_locations[0]
        try:
            torch.ops.load_library(f"{folder}/_C.so")
        except OSError:
            global library
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None

sys.meta_path.insert(0, Operators())
"""


def write_model(folder: Path, name: str) -> Path:
    """A tiny model with attention heads of 64, which vLLM needs on the CPU."""
    vision_folder(folder, name)
    config: Any = AutoConfig.from_pretrained(folder)
    text = config.text_config
    text.hidden_size = 128
    setattr(config.vision_config, "hidden_size" if name == "qwen2_vl" else "out_hidden_size", 128)
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 2, 1, 64
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [8, 12, 12]}
    text.max_position_embeddings = 512
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model", "changes"),
    [("qwen2_vl", ()), ("qwen2_5_vl", ("lora.rank=4",)), ("qwen3_vl", ()), ("qwen3_vl", ("rollout.staleness=1",))],
)
def test_a_run_with_images_on_a_real_server(model: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    """Prompts with one image, two images and none. Without adapters, the vision tower is trained and sent, too."""
    prompt_rows(tmp_path)
    write_plugin(tmp_path / "plugin")
    (tmp_path / "plugin" / "sitecustomize.py").write_text(OPERATORS)
    paths = os.pathsep.join(map(str, (ROOT / "src", tmp_path / "plugin", TORCHVISION)))
    environment = {**ENVIRONMENT, "PYTHONPATH": paths, "ANSWERED": str(tmp_path / "answered"), "STALE_HEAD": "none"}
    settings = [
        f"model.path={write_model(tmp_path / 'model', model)}",
        "rollout.engine=vllm",
        "rollout.timeout=300",
        f"rollout.launch.command={[*COMMAND, '--gpu-memory-utilization', '0.3']}",
        "rollout.launch.devices=['cpu']",
        *(f"rollout.launch.environment.{name}={value!r}" for name, value in environment.items()),
        "optimizer.lr=0.003",
        *changes,
    ]
    train(config_of(tmp_path, "run", *settings))
    found = lines(tmp_path / "run")
    assert len(found) == 4
    for line in found:
        assert line["sampler/canary_difference"] < 1e-4
    assert found[0]["loss/sampler_difference"] < 1e-4
    if "rollout.staleness=1" not in changes:
        assert found[2]["loss/sampler_difference"] < 1e-4, "after two updates, also of the tower"
