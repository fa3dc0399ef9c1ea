"""The probe finds leaks across samples, also in unknown architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from padfree.cp import shard
from padfree.model import attach, probe
from padfree.model.probe import Verdict
from padfree.testing.models import build, row
from tests.refused import refused


class ShiftingLayer(LlamaDecoderLayer):
    """Each token also sees the previous token of the pack, even of another sample."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        shifted = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(hidden_states + 0.5 * shifted, **kwargs)


class PositionAwareShiftingLayer(LlamaDecoderLayer):
    """The same inside each sample: correct on a pack, wrong if another rank holds the previous token."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        inside = (kwargs["position_ids"] > 0)[..., None]
        shifted = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(hidden_states + 0.5 * shifted * inside, **kwargs)


class AveragingLayer(LlamaDecoderLayer):
    """Each token sees the mean of the pack."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states + hidden_states.mean(1, keepdim=True), **kwargs)


class GradientLayer(LlamaDecoderLayer):
    """The outputs are correct; only gradients leak."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        total = hidden_states.sum(1, keepdim=True)
        return super().forward(hidden_states + (total - total.detach()), **kwargs)


class CountingModel(LlamaModel):
    """Counts positions along the whole pack, ignoring position_ids."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["position_ids"] = torch.arange(kwargs["input_ids"].shape[1])[None]
        return super().forward(*args, **kwargs)


class ForgetfulModel(LlamaModel):
    """Drops the keyword arguments it does not know."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("attn_context", None)
        return super().forward(*args, **kwargs)


class Patched(LlamaForCausalLM):
    """A Llama in which one layer (or the base model) is of the class that the config names."""

    layer_class: type[LlamaDecoderLayer] | None = None
    base_class: type[LlamaModel] | None = None
    at = -1

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        if self.base_class is not None:
            self.model = self.base_class(config)
        if self.layer_class is not None and config.num_hidden_layers > self.at:
            self.model.layers[self.at] = self.layer_class(config, self.at % config.num_hidden_layers)
        self.post_init()


def config(num_layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=num_layers, num_attention_heads=2
    )


@pytest.mark.parametrize("layer", [ShiftingLayer, PositionAwareShiftingLayer, AveragingLayer, GradientLayer])
def test_layers_that_look_at_neighbours_are_found(layer: type[LlamaDecoderLayer]) -> None:
    class Leaking(Patched):
        layer_class = layer

    with pytest.raises(ValueError, match=r"Leaking cannot be trained packed: a pack gives other results .* differ"):
        attach(Leaking(config()))


def test_only_gradients_differ_where_only_gradients_leak() -> None:
    class Leaking(Patched):
        layer_class = GradientLayer

    verdict = probe.probe(Leaking(config()))
    assert verdict.leak is not None
    assert "the gradient of" in verdict.leak


def test_positions_counted_by_the_model_are_found() -> None:
    class Counting(Patched):
        base_class = CountingModel

    with pytest.raises(ValueError, match="a pack gives other results than one sample at a time: outputs differ"):
        attach(Counting(config()))


def test_dropped_keyword_arguments_are_found() -> None:
    class Forgetful(Patched):
        base_class = ForgetfulModel

    with refused("model", "attn_context: did not reach"):
        attach(Forgetful(config()))


def test_the_copy_grows_until_it_has_every_kind_of_layer() -> None:
    class Late(Patched):
        layer_class = ShiftingLayer
        at = 3  # not in the config, and invisible with two layers

    with pytest.raises(ValueError, match="a pack gives other results than one sample at a time"):
        attach(Late(config(num_layers=12)))


def test_a_kind_of_layer_that_no_copy_has_is_refused() -> None:
    class TooLate(Patched):
        layer_class = ShiftingLayer
        at = 9

    with pytest.raises(ValueError, match="no small copy of it contains the module class ShiftingLayer"):
        attach(TooLate(config(num_layers=12)))


def test_an_architecture_without_a_small_copy_is_refused() -> None:
    class Stubborn(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.table = nn.Parameter(torch.empty(6_000_000))

    class Picky(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            if config.vocab_size != 99:
                raise RuntimeError("a vocabulary of 99 or nothing")
            super().__init__(config)

    with torch.device("meta"):
        stubborn = Stubborn(config())
        picky_config = config()
        picky_config.vocab_size = 99
        picky = Picky(picky_config)
    with pytest.raises(ValueError, match=r"the small copy of it for the test still has 6\d+ parameters"):
        attach(stubborn)
    with pytest.raises(ValueError, match=r"the small copy of it for the test cannot be built .*a vocabulary of 99"):
        attach(picky)


def test_a_verdict_is_kept_for_models_that_differ_in_size_alone() -> None:
    built: list[int] = []

    class Counted(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            built.append(config.hidden_size)

    small = Counted(config())
    wide = config()
    wide.hidden_size = 96
    large = Counted(wide)
    built.clear()
    attach(small)
    assert built, "the first of a kind is probed"
    built.clear()
    attach(large)
    assert not built, "the second is not"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_state_does_not_matter_and_is_left_alone(mode: Any) -> None:
    class Fresh(LlamaForCausalLM):
        pass

    model = Fresh(config())
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            assert probe.probe(model) == Verdict(leak=None, head=None)
            assert not torch.is_grad_enabled()
            assert torch.empty(1).device.type == "meta"
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_probe_of_a_second_model_does_not_disturb_the_first() -> None:
    """The probe registers another attention function than the one that models use."""
    model = attach(build("llama"))
    inputs = shard(row([7, 5])).model_inputs()
    expected = model(**inputs).logits

    class Another(LlamaForCausalLM):
        pass

    other: PreTrainedModel = attach(Another(config()))
    assert other.config._attn_implementation == model.config._attn_implementation == "padfree"
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("layer", [ShiftingLayer, AveragingLayer, GradientLayer])
def test_leaks_are_found_with_transformers_own_attention(layer: type[LlamaDecoderLayer], implementation: str) -> None:
    class Leaking(Patched):
        layer_class = layer

    model = Leaking(config())
    model.set_attn_implementation(implementation)
    assert "a pack gives other results than one sample at a time" in str(probe.stock_leak(model))


def test_verdicts_on_stock_and_attached_models_are_kept_apart() -> None:
    """OPT leaks with its own attention but not with padfree's."""
    model = build("opt")
    assert probe.stock_leak(model) is not None
    assert probe.probe(model).leak is None
    assert probe.stock_leak(model) is not None
    assert model.config._attn_implementation == "sdpa", "the model itself is only looked at"


def test_layers_that_need_positions_in_order_are_right_in_a_stock_row() -> None:
    """A pack of a data collator is never divided over ranks."""

    class Ordered(Patched):
        layer_class = PositionAwareShiftingLayer

    assert probe.stock_leak(Ordered(config())) is None
    assert probe.probe(Ordered(config())).leak is not None
