"""Routes of a vLLM server for prompts with images. `vllm_plugin` adds them in the server.

    GET  /padfree/images      whether the server can read images
    POST /padfree/images      store the inputs of the vision tower for one image, under the image's digest
    POST /padfree/generate    /inference/v1/generate with stored images; returns {"missing": digests} if some are unknown

The trainer sends the arrays that its own processor made. Server and trainer therefore encode the same pixels, and a
prompt has the same token ids on both sides. An image travels once, however many responses are sampled for it.

The server's environment has torch and safetensors, but not all dependencies of padfree.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch

STORE, GENERATE = "/padfree/images", "/padfree/generate"
MAX_BYTES = 4 << 30
"""The images that a server stores have at most this size. The images that were not used for longest are dropped."""


class StoredImages:
    """The tower's inputs of images, by digest. Images that were not used for longest are dropped."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._inputs: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()

    def add(self, digest: str, inputs: dict[str, torch.Tensor]) -> None:
        self._num_bytes += _size(inputs) - _size(self._inputs.pop(digest, {}))
        self._inputs[digest] = inputs
        while self._num_bytes > self._max_bytes and len(self._inputs) > 1:
            self._num_bytes -= _size(self._inputs.popitem(last=False)[1])

    def get(self, digest: str) -> dict[str, torch.Tensor] | None:
        if digest in self._inputs:
            self._inputs.move_to_end(digest)
        return self._inputs.get(digest)


def _size(inputs: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())


def packed_inputs(inputs: Mapping[str, Any]) -> str:
    """Return the tower's inputs of an image as text, for a JSON body. `stored_inputs` reads it."""
    tensors = {name: torch.as_tensor(array).contiguous() for name, array in inputs.items()}
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


def stored_inputs(text: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(base64.b64decode(text))


def add_image_routes() -> None:
    """Add the routes to vLLM's router of /inference/v1/generate. Older versions of vLLM without that router get none.

    The routes exist only in servers that are started with --enable-scale-out.
    """
    try:
        from vllm.entrypoints.scale_out.token_in_token_out import api_router
        from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
        from vllm.multimodal.inputs import MultiModalKwargsItems
    except ImportError:
        return
    from fastapi.responses import JSONResponse

    if any(getattr(route, "path", None) == GENERATE for route in api_router.router.routes):
        return
    images = StoredImages()

    def processor(request: Any) -> Any:
        return api_router.generate_tokens(request).online_renderer.renderer.get_mm_processor()

    def encoded(request: Any, inputs: dict[str, torch.Tensor]) -> str:
        fields = processor(request)._get_mm_fields_config(inputs, {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
        return str(encode_mm_kwargs_item(item))

    async def ready(request: Any) -> Any:
        return JSONResponse({"processor": type(processor(request)).__name__})

    async def store(request: Any) -> Any:
        body = await request.json()
        images.add(body["digest"], stored_inputs(body["inputs"]))
        return JSONResponse({"digest": body["digest"]})

    async def generate(request: Any) -> Any:
        body = await request.json()
        shown = body.pop("images")
        found = {image["digest"]: images.get(image["digest"]) for image in shown}
        missing = [digest for digest, inputs in found.items() if inputs is None]
        if missing:
            return JSONResponse({"missing": missing})
        body["features"] = {
            "mm_hashes": {"image": [image["key"] for image in shown]},
            "mm_placeholders": {"image": [{"offset": image["offset"], "length": image["length"]} for image in shown]},
            "kwargs_data": {"image": [encoded(request, found[image["digest"]]) for image in shown]},
        }
        return await api_router.generate(GenerateRequest(**body), request)

    api_router.router.add_route(STORE, ready, methods=["GET"])
    api_router.router.add_route(STORE, store, methods=["POST"])
    api_router.router.add_route(GENERATE, generate, methods=["POST"])
