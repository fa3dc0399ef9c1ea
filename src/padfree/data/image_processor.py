"""Call the processor of a vision-language model (a transformers class) with one image at a time.

The processor returns the text that stands for the image, and the inputs of the vision tower. For example, Qwen2-VL's
processor returns for an image with 4 features:

    text               <|image_pad|><|image_pad|><|image_pad|><|image_pad|>
    shapes of inputs   {"pixel_values": [16, 1176], "image_grid_thw": [1, 3]}

Images are always resized with Pillow. The pixels of torchvision differ slightly, and data must not depend on the
installed packages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.data.hashing import hash_of
from padfree.data.image_files import pillow_modules
from padfree.data.records import RowError
from padfree.errors import UserError, shown_error
from padfree.sample import Sample

MARKERS = ("boi_token", "image_token")
"""Names of attributes of a processor. The first one that exists holds the marker: the text that a chat template writes
for an image.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """How the images of rows become tokens and inputs of the vision tower.

    `prepare`: a function that adds to a sample what the model needs besides images, such as rotary positions. In
    processes that tokenise, `prepare` is None.
    """

    path: str  # the folder or Hub id of the model
    placeholder: int  # the token id whose embeddings the model replaces by features
    inputs: tuple[str, ...]  # the names of the tower's inputs
    one_image: str | None = None  # why a sample cannot have several images; None if it can
    trust_remote_code: bool = False
    folder: str | None = None  # the folder of relative paths; None: the folder of the data file
    max_pixels: int = 1 << 26
    prepare: Callable[[Sample], Sample] | None = None

    def for_rows(self) -> ImageSettings:
        """Return the settings without `prepare`, which needs the model. Processes that tokenise rows have no model."""
        return replace(self, prepare=None)

    @property
    def processor(self) -> ImageProcessor:
        return opened_processor(self.path, self.placeholder, self.inputs, self.trust_remote_code)


class Expansion(NamedTuple):
    """The text that represents an image in the prompt, its number of placeholder tokens, and the grid of patches."""

    text: str
    num_tokens: int  # number of placeholder tokens
    grid: tuple[int, int, int] | None  # (time, height, width) in patches, if the processor gives it


class ImageProcessor:
    """A processor of transformers that is called with one image at a time. Any number of threads may use it."""

    def __init__(self, processor: Any, placeholder: int, inputs: tuple[str, ...]) -> None:
        self._processor, self._inputs = processor, inputs
        self._recorder = _CallRecorder(processor.tokenizer)
        self.tokenizer = processor.tokenizer
        self._chat_template: Any = processor.chat_template
        processor.tokenizer = self._recorder
        self.placeholder_text = str(self.tokenizer.convert_ids_to_tokens(placeholder))
        self.marker = next(text for name in MARKERS if isinstance(text := getattr(processor, name, None), str))
        self.digest = hash_of(_identity(processor))

    def give_template(self, tokenizer: Any) -> None:
        """Set the chat template of a tokenizer to the template of the processor, if the processor has one."""
        if self._chat_template:
            tokenizer.chat_template = self._chat_template

    def expansion(self, image: Any, name: str) -> Expansion:
        """Return the text of placeholder tokens that represents `image` (a Pillow image) in the prompt.

        `name`: what error messages call the image.
        """
        text, outputs = self._run(image, name)
        grid = outputs.get("image_grid_thw")
        return Expansion(
            text=text,
            num_tokens=text.count(self.placeholder_text),
            grid=None if grid is None else (int(grid[0][0]), int(grid[0][1]), int(grid[0][2])),
        )

    def tower_inputs(self, image: Any, name: str) -> dict[str, NDArray[Any]]:
        """Return the inputs of the vision tower for one image. Their first axis counts patches, tiles or images."""
        outputs = self._run(image, name)[1]
        found = {key: np.asarray(outputs[key]) for key in self._inputs if key in outputs}
        if "pixel_attention_mask" in self._inputs and "pixel_attention_mask" not in found:
            shape = found["pixel_values"].shape
            found["pixel_attention_mask"] = np.ones((*shape[:-3], *shape[-2:]), dtype=np.int64)
        # Some processors return [samples, tiles, ...]. Remove the first axis, because there is only one sample.
        for key, axes in (("pixel_values", 4), ("pixel_attention_mask", 3)):
            if key in found and found[key].ndim == axes + 1:
                found[key] = found[key][0]
        if "pixel_attention_mask" in found:
            found["pixel_attention_mask"] = found["pixel_attention_mask"].astype(np.bool_)
        missing = [key for key in self._inputs if key not in found]
        if missing:
            raise UserError(
                "model.vision",
                f"true, but the processor {type(self._processor).__name__} gives no {missing[0]}",
                "give a folder with the processor that belongs to the model",
            )
        return found

    def _run(self, image: Any, name: str) -> tuple[str, Any]:
        try:
            outputs = self._processor(text=[self.marker], images=[[image]], return_tensors="np")
        except Exception as error:  # processors raise all kinds of errors for images that they cannot use
            raise RowError(
                f"{name} cannot be used: the model's processor raised {shown_error(error)}; replace the image"
            ) from None
        return self._recorder.last.text, outputs


class _CallRecorder:
    """Wraps the tokenizer of a processor, to find out the text that the processor passes to its tokenizer.

    In this text, the marker of an image is replaced by its placeholder tokens. The wrapper remembers the last text of
    each thread.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self.last = threading.local()

    def __call__(self, text: Any, **options: Any) -> Any:
        (self.last.text,) = [text] if isinstance(text, str) else text
        with self._lock:  # two threads must not use a tokenizer at once
            return self._tokenizer([self.last.text], **{**options, "padding": False})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@lru_cache(maxsize=8)
def opened_processor(
    path: str, placeholder: int, inputs: tuple[str, ...], trust_remote_code: bool = False
) -> ImageProcessor:
    """Open the processor of a model. In one process, later calls with the same arguments return the same object."""
    try:
        found = load_processor(path, trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # the files may hold anything, and each reader raises its own kind of error
        raise UserError(
            "model.vision",
            f"true, but the processor of {path} cannot be read ({shown_error(error)})",
            "copy the model's processor files (preprocessor_config.json, processor_config.json) into its folder",
        ) from error
    if getattr(found, "image_processor", None) is None or not hasattr(found, "image_token"):
        raise UserError(
            "model.vision",
            f"true, but {path} has the processor {type(found).__name__}, which does not read images",
            "give a folder with the processor that belongs to the model",
        )
    return ImageProcessor(found, placeholder, inputs)


def load_processor(path: str, trust_remote_code: bool = False) -> Any:
    """Load a processor with its tokenizer and its Pillow image processor, but without its part for videos.

    `AutoProcessor` would also load the part for videos, which needs torchvision, and would use torchvision for images
    if it is installed.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    pillow_modules()
    auto: Any = transformers
    config = auto.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if type(config) not in PROCESSOR_MAPPING:
        return auto.AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    kind: Any = PROCESSOR_MAPPING[type(config)]
    settings, _ = kind.get_processor_dict(path)
    parts: dict[str, Any] = {
        "tokenizer": auto.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code),
        "image_processor": auto.AutoImageProcessor.from_pretrained(path, backend="pil"),
        "video_processor": None,
    }
    own: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": _checked_part})
    arguments = [parts[name] for name in kind.get_attributes()]
    return own.from_args_and_dict(arguments, settings)


def _checked_part(self: Any, name: str, part: Any) -> Any:
    """Check the class of a processor's argument as transformers does, but accept None as the video processor."""
    return None if part is None else super(type(self), self).check_argument_for_proper_class(name, part)


def _identity(processor: Any) -> dict[str, Any]:
    """Return the class, the settings and the transformers version of a processor.

    Processors for which they are equal give the same output for the same image.
    """
    from transformers import __version__

    plain = {
        name: value
        for name, value in vars(processor).items()
        if isinstance(value, (str, int, float, bool)) and name != "chat_template"
    }
    settings = processor.image_processor.to_dict()
    return {
        "class": type(processor).__name__,
        "image_processor": {name: value for name, value in settings.items() if "path" not in name},
        "settings": plain,
        "version": __version__,
    }
