"""Promise 11 and models as people have them: every layer is right against an oracle in float64, or named as skipped."""

import contextlib
import copy
import importlib
import importlib.util
import math
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from explicit import same_bits
from maxgain import MaxGain
from maxgain.errors import MeasurementWarning, NothingToConstrainError, PatternError, UnsupportedLayerError
from nets import compiling, frozen_sgd, mlp, rows, sgd, train, training, values
from odd_layers import RIGHT, WRONG, Cosine, Routed, Scaled, Standardised

GAMMA = 1e-3


def oracle(layer: nn.Module, x: Tensor) -> float:
    """The largest gain of a call, in float64, by the layer itself less its output for zero."""
    twin: Any = copy.deepcopy(layer).double()
    twin._forward_hooks.clear()
    x = x.detach().double()
    if isinstance(twin, nn.modules.batchnorm._BatchNorm):
        scale = twin.weight / (twin.running_var + twin.eps).sqrt()
        z, dims = x * scale.view(-1, *[1] * (x.dim() - 2)), x.dim() - 1
    else:
        bias = twin._parameters.get("bias")
        if bias is not None:
            bias.data.zero_()
        z, dims = twin(x), 1 if twin.weight.dim() == 2 else twin.weight.dim() - 1
    ratio = z.flatten(-dims).norm(dim=-1) / x.flatten(-dims).norm(dim=-1)
    return float(ratio.nan_to_num(0.0).max())


def step_once(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> tuple[Any, list[str]]:
    """One step under γ = 0.001 whose update changes nothing; every layer against the oracle. What was said."""
    expected: dict[nn.Module, float] = {}

    def note(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if layer.training and torch.is_grad_enabled() and "MultiheadAttention" not in type(layer).__name__:
            x = args[0] if args else next(iter(kwargs.values()))
            with torch.no_grad():
                expected[layer] = max(expected.get(layer, 0.0), oracle(layer, x))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeasurementWarning)
        constraint = MaxGain(model, GAMMA, **options)
        watched = [layer.module for layer in constraint._slots]
        handles = [module.register_forward_hook(note, with_kwargs=True) for module in watched]
        before = {module: module.weight.detach().clone() for module in watched}
        optimizer = frozen_sgd(model)
        constraint.attach(optimizer)
        out = model(*inputs)
        out = next((getattr(out, key) for key in ("logits", "last_hidden_state") if hasattr(out, key)), out)
        out.float().square().mean().backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    seen: set[int] = set()
    for layer in constraint._slots:
        gain, scale = constraint.gains[layer.name], constraint.scales[layer.name]
        if math.isnan(gain):
            assert any(repr(layer.name) in str(one.message) or "more" in str(one.message) for one in caught), layer.name
            continue
        assert gain == pytest.approx(expected[layer.module], rel=1e-3, abs=1e-7), layer.name
        if id(layer.module.weight) not in seen:
            torch.testing.assert_close(layer.module.weight, before[layer.module] * scale)
        seen.add(id(layer.module.weight))
    return constraint, [str(one.message) for one in caught if one.category is MeasurementWarning]


# --- Forwards of their own --------------------------------------------------------------------------------------------


def around(layer: nn.Module) -> tuple[nn.Sequential, Tensor]:
    """A network with the layer between others, and its input."""
    if isinstance(layer, nn.Conv2d):
        return nn.Sequential(nn.Conv2d(3, 3, 1), layer, nn.Flatten(), nn.LazyLinear(2)), torch.randn(4, 3, 6, 6)
    return nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(4, 2)), torch.randn(4, 6)


def network(layer_type: type, sizes: tuple[int, ...]) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model, x = around(layer_type(*sizes))
    with torch.no_grad():
        model(x)
    return model, x


@pytest.mark.parametrize("layer_type", WRONG)
def test_promise_11_a_layer_whose_weight_does_not_scale_its_output_is_left_out(layer_type: Any) -> None:
    model, x = network(layer_type, WRONG[layer_type])
    before = values(model[1])
    _, said = step_once(model, (x,), exclude="1")
    assert said == []
    model, x = network(layer_type, WRONG[layer_type])
    exclude = ["1.sigma"] if hasattr(model[1], "sigma") else ()
    constraint, optimizer = training(model, GAMMA, lr=0.0, exclude=exclude)
    model(x).sum().backward()
    with pytest.warns(MeasurementWarning, match="'1' .*halv|'1' .*its bias") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert list(constraint.gains) == ["0", list(constraint.gains)[1]]
    assert "1" in constraint.skipped
    assert "1" in str(constraint)
    assert same_bits(values(model[1]), before)
    assert constraint.scales["0"] < 1


@pytest.mark.parametrize("layer_type", RIGHT)
def test_promise_11_a_layer_with_a_forward_of_its_own_that_is_linear_is_bounded(layer_type: Any) -> None:
    model, x = network(layer_type, RIGHT[layer_type])
    plain, _ = network(layer_type, RIGHT[layer_type])
    random = torch.get_rng_state()
    plain(x)
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    constraint = MaxGain(model, GAMMA)
    model(x)
    assert torch.equal(torch.get_rng_state(), after), "trying it draws nothing"
    assert same_bits(list(model[1].buffers()), list(plain[1].buffers())), "and counts nothing"
    constraint.step()
    assert constraint.scales["1"] < 1
    assert constraint.skipped == {}


def test_promise_11_zero_shows_nothing_so_the_next_batch_is_tried() -> None:
    """As SkipInit: a gain of zero that is learned."""

    class SkipInit(Standardised):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes, bias=False)
            self.gain = nn.Parameter(torch.zeros(()))

        def forward(self, input: Tensor) -> Tensor:
            return self.gain * super().forward(input)

    model, x = network(SkipInit, (3, 4, 3))
    constraint, optimizer = training(model, GAMMA, lr=0.0)
    train(model, optimizer, [x])
    assert constraint.gains["1"] == 0
    model[1].gain.data.fill_(1.0)
    with pytest.warns(MeasurementWarning, match="'1' .*halv"):
        train(model, optimizer, [x])


def test_promise_11_all_that_fail_are_named_in_one_warning_and_training_goes_on() -> None:
    model = nn.Sequential(*[Cosine(6, 6) for _ in range(9)])
    constraint, optimizer = training(model, GAMMA)
    with pytest.warns(MeasurementWarning, match="'5' and 3 more") as caught:
        train(model, optimizer, map(rows, range(3)))
    assert len(caught) == 1
    assert constraint.gains == {}
    constraint.gamma = {"3": 0.1, "*": 2.0}  # the names of what was left out are still known


class TestCompiled:
    pytestmark = compiling

    @pytest.mark.parametrize("layer_type", [Standardised, Cosine, Scaled])
    def test_promise_11_compiled_forwards_are_tried_too(self, layer_type: Any) -> None:
        model, x = network(layer_type, (WRONG | RIGHT)[layer_type])
        constraint, optimizer = training(model, GAMMA, lr=0.0)
        before, is_wrong = values(model[1]), layer_type in WRONG
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(x).sum().backward()
        with pytest.warns(MeasurementWarning, match="'1' .*halv") if is_wrong else contextlib.nullcontext():
            optimizer.step()
        assert same_bits(values(model[1]), before) is is_wrong
        train(compiled, optimizer, [x])
        assert constraint.scales["0"] < 1 or constraint.gains["0"] == pytest.approx(GAMMA, rel=1e-4)

    @pytest.mark.parametrize("disable", [True, False])
    def test_promise_11_a_layer_that_returns_more_than_one_tensor_is_named(self, disable: bool) -> None:
        model = nn.Sequential(nn.Linear(6, 4), Routed(4, 2))
        _, optimizer = training(model, GAMMA, lr=0.0)
        compiled = torch.compile(model, backend="eager", fullgraph=True, disable=disable)
        with pytest.warns(MeasurementWarning, match=r"'1\.0' .its output is not one tensor"):
            train(compiled, optimizer, [rows()])


# --- Layers that are skipped, and those that only look as if they had to be -------------------------------------------


class EightBits(nn.Linear):
    """As those of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.weight = nn.Parameter(torch.zeros(6, 6, dtype=torch.uint8), requires_grad=False)


SKIPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "attention": (lambda: nn.MultiheadAttention(6, 2), r"split_attention\(model\)"),
    "LSTM": (lambda: nn.LSTM(6, 6), "one operation"),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), "computed"),
    "spectral norm, old": (lambda: nn.utils.spectral_norm(nn.Linear(6, 6)), "computed"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.5), "computed"),
    "bilinear": (lambda: nn.Bilinear(6, 6, 6), "two inputs"),
    "quantised": (EightBits, "quantised"),
    "complex": (lambda: nn.Linear(6, 6, dtype=torch.complex64), "complex"),
    "lazy": (lambda: nn.LazyLinear(6), "before a first batch"),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), "running variance"),
}


@pytest.mark.filterwarnings("ignore:.*(deprecated|Lazy)")
@pytest.mark.parametrize("name", SKIPPED)
def test_promise_10_what_cannot_be_bounded_is_skipped_in_one_warning(name: str) -> None:
    make, why = SKIPPED[name]
    layer = make()
    before = [value.clone() for value in layer.state_dict().values() if isinstance(value, Tensor) and name != "lazy"]
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "odd": layer})
    with pytest.warns(MeasurementWarning, match=f"weights have no bound: 'odd' .*{why}") as caught:
        constraint = MaxGain(model)
    assert len(caught) == 1
    assert list(constraint.gains) == ["first"]
    after = [value for value in layer.state_dict().values() if isinstance(value, Tensor) and name != "lazy"]
    assert same_bits(after, before), "constructing moves no power iteration"
    constraint.detach()
    assert list(MaxGain(model, exclude="odd").gains) == ["first"], "and exclude silences it"
    with pytest.raises(NothingToConstrainError):
        MaxGain(nn.ModuleDict({"odd": make()}))


def test_what_holds_nothing_to_bound_is_not_mentioned() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.LayerNorm(6), nn.Embedding(50, 6))
    assert list(MaxGain(model).gains) == ["0"]


def test_a_name_of_a_container_is_no_pattern() -> None:
    model = nn.ModuleDict({"body": mlp(), "head": nn.Linear(3, 2)})
    with pytest.raises(PatternError, match=r"'body' matches no layer; the layers are 'body\.0'"):
        MaxGain(model, exclude="body")
    assert list(MaxGain(model, exclude="body.*").gains) == ["head"]


def test_weights_that_overlap_in_another_layout_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().T)
    with pytest.raises(UnsupportedLayerError, match="'1' overlaps in memory with that of '0'"):
        MaxGain(model)
    memory = torch.randn(100)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[0].weight, model[1].weight = (nn.Parameter(memory[i : i + 36].view(6, 6)) for i in (0, 20))
    with pytest.raises(UnsupportedLayerError, match="overlaps"):
        MaxGain(model)
    assert MaxGain(model, exclude="1").gains.keys() == {"0"}


def test_a_parameter_that_two_modules_hold_as_separate_views_is_divided_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach())  # the same memory, another parameter
    before = model[0].weight.detach().clone()
    constraint = MaxGain(model, GAMMA)
    model(rows())
    constraint.step()
    torch.testing.assert_close(model[0].weight.detach(), before * constraint.scales["0"])
    assert constraint.scales["0"] == constraint.scales["1"]


# --- Parts of a layer's outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 6, 3), nn.Conv1d(4, 6, 3)])
def test_parts_of_convolutions_are_blocks_of_channels(layer: Any) -> None:
    x = torch.randn(3, 4, *[5] * len(layer.kernel_size))
    axis = 1 if layer.transposed else 0
    before = layer.weight.detach().clone()
    constraint = MaxGain(nn.Sequential(layer), 0.01, parts={"0": ("a", "b")})
    z = layer(x).detach() - layer.bias.detach().view(-1, *[1] * len(layer.kernel_size))
    constraint.step()
    constraint.detach()
    for part, own, old, new in zip(
        "ab", z.chunk(2, 1), before.chunk(2, axis), layer.weight.chunk(2, axis), strict=True
    ):
        expected = (own.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).max().item()
        assert constraint.gains[f"0[{part}]"] == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(new.detach(), old * 0.01 / expected)


def test_parts_that_fail_are_left_out_without_another_word() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Cosine(6, 6))
    _, optimizer = training(model, 0.1, parts={"1": ("a", "b")})
    with pytest.warns(MeasurementWarning) as caught:
        train(model, optimizer, map(rows, range(4)))
    assert len(caught) == 1


def test_parts_are_told_apart_by_name_and_must_be_equal() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(6, 12)})
    constraint = MaxGain(model, {"qkv[q]": 0.1, "*": math.inf}, parts={"qkv": ("q", "k", "v")})
    model["qkv"](rows())
    constraint.step()
    assert [scale < 1 for scale in constraint.scales.values()] == [True, False, False]
    with pytest.raises(PatternError, match="12 outputs, which do not divide into 5"):
        MaxGain(model, parts={"qkv": tuple("abcde")})
    for parts in (["qkv"], {"qkv": 3}, {"qkv": "qkv"}, {"qkv": ("q", "q", "v")}):
        with pytest.raises(PatternError, match="such as"):
            MaxGain(model, parts=parts)
    with pytest.raises(PatternError, match="'nowhere'"):
        MaxGain(model, parts={"nowhere": ("q", "k")})


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_parts_train_as_layers_do_under_accumulation_two_optimizers_every_and_pauses(p: float, every: int) -> None:
    found = []
    for is_split in (True, False):
        torch.manual_seed(0)
        a, b, second = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 2)
        fused = nn.Linear(6, 8)
        fused.load_state_dict({name: torch.cat([p, b.get_parameter(name)]) for name, p in a.named_parameters()})
        first: Any = nn.ModuleList([a, b]) if is_split else nn.ModuleList([fused])
        model = nn.ModuleDict({"first": first, "second": second})
        optimizers = sgd(first, 0.01), sgd(second, 0.01)
        bounds, parts = {"first.1" if is_split else "*[[]b]": 10.0, "*": 0.2}, {"first.*": ("a", "b")}
        constraint = MaxGain(model, bounds, p=p, every=every, parts=None if is_split else parts)
        for optimizer in optimizers:
            constraint.attach(optimizer)
        for step in range(6):
            for microbatch in range(2):
                x = rows(10 * step + microbatch)
                second(torch.cat([layer(x) for layer in first], -1)).square().mean().backward()
            with constraint.paused():
                first[0](100 * rows(99))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append((list(constraint.gains.values()), torch.cat([layer.weight for layer in first]), second.weight))
    (gains, *weights), (expected, *others) = found
    assert gains == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(weights, others)


# --- Models of other packages -----------------------------------------------------------------------------------------


def timm() -> Any:
    """Timm, with stand-ins for what it imports of torchvision where that has no build for this torch."""
    pytest.importorskip("huggingface_hub")
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if "timm" in sys.modules:
        return sys.modules["timm"]
    parts = ("", ".ops", ".ops.misc", ".models", ".models.feature_extraction", ".transforms", ".datasets")
    names = [*(f"torchvision{part}" for part in parts), "torchvision.transforms.functional"]
    stand_ins = {name: MagicMock() for name in names}
    stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    with patch.dict(sys.modules, stand_ins):
        package = importlib.import_module("timm")
        loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "timm"}
    sys.modules.update(loaded)
    return package


def created(name: str, size: int) -> tuple[nn.Module, Tensor]:
    return timm().create_model(name, num_classes=4), torch.randn(2, 3, size, size)


def swin() -> tuple[nn.Module, Tensor]:
    make = timm().models.swin_transformer.SwinTransformer
    sizes = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2)}
    return make(num_classes=4, **sizes), torch.randn(2, 3, 32, 32)


def beit() -> tuple[nn.Module, Tensor]:
    make = timm().models.beit.Beit
    return make(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=4), torch.randn(2, 3, 32, 32)


def transformer(name: str, config: str, **options: Any) -> tuple[nn.Module, Tensor]:
    package = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    made = getattr(package, config)(
        vocab_size=50, bos_token_id=1, eos_token_id=2, pad_token_id=0, **{**sizes, **options}
    )
    return getattr(package, name)(made), torch.randint(0, 50, (2, 8))


GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], str]] = {
    "ViT": (lambda: created("test_vit", 160), ""),
    "ResNet": (lambda: created("test_resnet", 64), ""),
    "ConvNeXt": (lambda: created("test_convnext", 64), ""),
    "EfficientNet": (lambda: created("test_efficientnet", 64), ""),
    "NFNet": (lambda: created("test_nfnet", 64), "Left out from now on: 'stem.conv1'.*and 15 more.*halv"),
    "Swin": (swin, ""),
    "BEiT": (beit, "'blocks.0.attn.qkv' .*no training forward.*used directly"),
    "GPT-2": (lambda: transformer("GPT2LMHeadModel", "GPT2Config", **GPT), ""),
    "BERT": (lambda: transformer("BertForSequenceClassification", "BertConfig"), ""),
    "ALBERT": (lambda: transformer("AlbertForSequenceClassification", "AlbertConfig", embedding_size=16), ""),
    "Llama": (lambda: transformer("LlamaForCausalLM", "LlamaConfig"), ""),
    "Mixtral": (
        lambda: transformer("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_key_value_heads=2),
        r"% of the weights have no bound: .*experts.*split_experts\(model\)",
    ),
    "nn.TransformerEncoderLayer": (
        lambda: (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)),
        r"% of the weights have no bound: 'self_attn' .*split_attention\(model\)",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_promise_11_every_layer_of_a_model_is_right_or_named(name: str) -> None:
    make, expected = MODELS[name]
    torch.manual_seed(0)
    model, x = make()
    constraint, said = step_once(model.train(), (x,))
    assert len(said) == bool(expected), said
    assert not expected or re.search(expected, said[0])
    assert len(constraint.gains) > 1
