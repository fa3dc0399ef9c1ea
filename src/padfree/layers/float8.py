"""Linear layers that multiply in float8, and the check that a device supports them.

    nn.Linear  ->  Float8Linear      the same parameters and names, another forward

The weights stay in the dtype of the model, and are cast to float8 only where a matmul reads them. FSDP2, exports, the
sampler and the optimizer see no difference. `layers.ops.float8_linear` describes the matmuls and casts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import padfree.layers.ops.float8_linear  # noqa: F401 (the operators)
from padfree.choices import Float8Product
from padfree.errors import UserError
from padfree.layers.ops.float8_format import MULTIPLE

CAPABILITY = (8, 9)
"""The first CUDA compute capability with float8 matmuls (Ada)."""


class Float8Linear(nn.Linear):
    """An `nn.Linear` with some of its three matmuls in float8.

    `float8_products` lists these matmuls (output, input gradient, weight gradient). The other matmuls are computed in
    the usual dtype.
    """

    float8_products: tuple[Float8Product, ...]

    def forward(self, input: Tensor) -> Tensor:
        products = self.float8_products
        if not products:
            return super().forward(input)
        result: Tensor = torch.ops.padfree.float8_linear.default(
            input,
            self.weight,
            self.bias,
            "output" in products,
            "input-gradient" in products,
            "weight-gradient" in products,
        )
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8={','.join(self.float8_products) or 'none'}"


def use_float8(linear: nn.Linear, products: Iterable[Float8Product]) -> None:
    """Change a linear layer in place, so that it computes the matmuls `products` in float8. Its parameters do not
    change.
    """
    assert type(linear).forward in (nn.Linear.forward, Float8Linear.forward)
    if not isinstance(linear, Float8Linear):
        linear.__class__ = Float8Linear
    linear.float8_products = tuple(products)  # type: ignore[assignment]


def fits_float8(linear: nn.Linear) -> bool:
    """Return whether float8 matmuls accept the input and output sizes of a linear layer."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def check_float8_device(device: torch.device) -> None:
    """Raise a `UserError` if a CUDA device has no float8 matmul. Devices other than CUDA emulate it in float32."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise UserError(
            "parallel.linear",
            f"'float8', but {torch.cuda.get_device_name(device)} has no float8 matmul: its compute capability is "
            f"{capability[0]}.{capability[1]}, and float8 needs {CAPABILITY[0]}.{CAPABILITY[1]} or newer",
            "set parallel.linear=bfloat16",
        )
