"""Images in prompts for vLLM servers: routes that the plugin adds to a server, and the client that calls them.

    GET  /padfree/images      options of the server that concern images
    POST /padfree/images      store one image: the inputs of the vision tower, and a digest that identifies them
    POST /padfree/generate    /inference/v1/generate for a prompt that shows stored images

The trainer sends the arrays of its own processor. Both sides therefore encode the same pixels, and a prompt has the
same token ids on both sides. Each image is sent once to a server, however many responses are sampled for it.

The server imports this module. The server's environment has torch and safetensors, but not all dependencies of padfree.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

if TYPE_CHECKING:
    from padfree.images import Image

STORE, GENERATE = "/padfree/images", "/padfree/generate"
MAX_BYTES = 4 << 30
"""The images that a server process stores have at most this size in total."""
ATTEMPTS = 3

Inputs = Mapping[str, torch.Tensor]


class ServerImages:
    """The tower's inputs of images, by digest. Over `max_bytes`, the images that were not used for longest go."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._inputs: OrderedDict[str, Inputs] = OrderedDict()

    def add(self, digest: str, inputs: Inputs) -> None:
        self._num_bytes += _num_bytes(inputs) - _num_bytes(self._inputs.pop(digest, {}))
        self._inputs[digest] = inputs
        while self._num_bytes > self._max_bytes and len(self._inputs) > 1:
            self._num_bytes -= _num_bytes(self._inputs.popitem(last=False)[1])

    def get(self, digest: str) -> Inputs | None:
        if digest in self._inputs:
            self._inputs.move_to_end(digest)
        return self._inputs.get(digest)


def _num_bytes(inputs: Inputs) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())


def add_image_routes() -> None:
    """Add the routes to vLLM's router of /inference/v1/generate, which a server has if --enable-scale-out is set.

    Versions of vLLM that lack this router, or cannot read images there, get no routes.
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
    images = ServerImages()

    async def options(request: Any) -> Any:
        settings = getattr(api_router.generate_tokens(request).model_config, "multimodal_config", None)
        normalizes = bool(getattr(settings, "mm_device_do_normalize", False))
        return JSONResponse({"reads_images": settings is not None, "normalizes": normalizes})

    async def store(request: Any) -> Any:
        body = await request.json()
        images.add(body["digest"], _unpacked(body["inputs"]))
        return JSONResponse({})

    async def generate(request: Any) -> Any:
        body = await request.json()
        shown = body.pop("images")
        found = {image["digest"]: images.get(image["digest"]) for image in shown}
        missing = [digest for digest, inputs in found.items() if inputs is None]
        if missing:
            return JSONResponse({"missing": missing})
        processor = api_router.generate_tokens(request).online_renderer.renderer.get_mm_processor()
        items = []
        for image in shown:
            inputs = found[image["digest"]]
            fields = processor._get_mm_fields_config(inputs, {})
            items += MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
        body["features"] = {
            "mm_hashes": {"image": [image["key"] for image in shown]},
            "mm_placeholders": {"image": [{"offset": image["offset"], "length": image["length"]} for image in shown]},
            "kwargs_data": {"image": [encode_mm_kwargs_item(item) for item in items]},
        }
        return await api_router.generate(GenerateRequest(**body), request)

    api_router.router.add_route(STORE, options, methods=["GET"])
    api_router.router.add_route(STORE, store, methods=["POST"])
    api_router.router.add_route(GENERATE, generate, methods=["POST"])


def _packed(inputs: Mapping[str, Any]) -> str:
    """Return the tower's inputs of an image as text for a JSON body. `_unpacked` reads it."""
    tensors = {name: torch.as_tensor(array).contiguous() for name, array in inputs.items()}
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


def _unpacked(text: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(base64.b64decode(text))


Post = Callable[[str, Any], Awaitable[dict[str, Any]]]
"""Posts a body to a route of one server process, and returns the JSON object of the answer."""


class ImageClient:
    """Sends images to one server, each of them once, and requests for responses to prompts that show them."""

    def __init__(self) -> None:
        self._stored: set[str] = set()  # digests
        self._storing: dict[str, asyncio.Lock] = {}

    async def generate(self, post: Post, body: Mapping[str, Any], images: Sequence[Image], key: str) -> dict[str, Any]:
        """Return the server's answer to `body`, a request for /inference/v1/generate whose prompt shows `images`.

        Requests with the same `key` share the features of an image on the server. The answer has a field `missing` if
        the server drops images faster than it uses them.
        """
        shown = [
            {
                "digest": image.digest,
                "key": f"{key} {image.digest}",
                "offset": int(image.positions[0]),
                "length": len(image.positions),
            }
            for image in images
        ]
        for _ in range(ATTEMPTS):
            for image in images:
                await self._store(post, image)
            answer = await post(GENERATE, {**body, "images": shown})
            if "missing" not in answer:
                break
            self._stored -= set(answer["missing"])  # the server has restarted, or dropped the images
        return answer

    async def _store(self, post: Post, image: Image) -> None:
        if image.digest in self._stored:
            return
        async with self._storing.setdefault(image.digest, asyncio.Lock()):
            if image.digest not in self._stored:
                inputs = await asyncio.to_thread(lambda: _packed(image.load()))
                await post(STORE, {"digest": image.digest, "inputs": inputs})
                self._stored.add(image.digest)
        self._storing.pop(image.digest, None)
