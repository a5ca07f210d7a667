"""Fused kernels: the numbers of the layers they stand for, and of every element of them."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.errors import LeanconvError
from leanconv.kernels import availability, describe, fused_layers, modules, optimize_, pack, tune
from leanconv.kernels.launch import run, run_eagerly
from leanconv.kernels.modules import Absorbed, FusedConv2d, FusedFactored
from leanconv.kernels.op import eager, factored
from leanconv.kernels.pack import aligned, packed
from leanconv.kernels.stage import EAGER, WIDEST, Plan, Stage, plans, powers, precision, up
from leanconv.network.factored import Factored
from leanconv.network.survey import survey
from tests.conftest import plain_network, relative, settle_batch_norms, smooth_images

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def stage_of(**changes: object) -> Stage:
    usual = {
        "dtype": torch.bfloat16,
        "images": 64,
        "size": (56, 56),
        "channels": 256,
        "rank": 51,
        "filters": 256,
        "kernel": (3, 3),
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
        "bias": True,
        "addend": False,
        "activation": "relu",
        "pool": False,
    }
    return Stage(**{**usual, **changes})  # type: ignore[arg-type]


def pair(c: int = 16, rank: int = 5, d: int = 24, **changes: object) -> Factored:
    modules = [("reduce", nn.Conv2d(c, rank, 3, padding=1, bias=False)), ("expand", nn.Conv2d(rank, d, 1))]
    return Factored(modules, (d, c, 3, 3))


def row(*following: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(pair(), *following).eval().requires_grad_(False)


# The kernels themselves.


@triton
@pytest.mark.parametrize("form", ["conv", "pair", "shifted", "split", "chain"])
def test_kernels_give_the_numbers_of_float64(form: str) -> None:
    """Strides, dilations, odd sizes, ranks that are no multiple of 16, every activation, addends, pooling: right, every
    element written and nothing beside them."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-m", "tests.kernel_cases", form, "5", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    worst = json.loads(done.stdout)
    assert worst["torch.float32"] < 1e-6
    assert worst["torch.float16"] < 1e-3


@pytest.mark.parametrize("rank", range(1, WIDEST + 1, 7))
def test_little_is_computed_beyond_the_rank(rank: int) -> None:
    stage = stage_of(rank=rank)
    assert sum(powers(stage.columns)) == stage.columns == up(rank, 16)
    assert len(powers(stage.columns)) <= 4


def test_plans_fit_the_layer() -> None:
    forms = {plan.form for plan in plans(stage_of(), 132)}
    assert forms == {"shifted", "pair", "eager"}
    assert "shifted" not in {plan.form for plan in plans(stage_of(stride=(1, 2)), 132)}
    assert "split" in {plan.form for plan in plans(stage_of(images=1, size=(14, 14), channels=512), 132)}
    assert {plan.form for plan in plans(stage_of(filters=None), 132)} == {"conv", "eager"}
    for stage in (stage_of(), stage_of(rank=300), stage_of(channels=3), stage_of(images=1)):
        assert plans(stage, 132)[-1] == EAGER


def test_float32_keeps_its_bits_unless_tf32_is_allowed() -> None:
    stage, wide = stage_of(dtype=torch.float32), stage_of(dtype=torch.float32, rank=200)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        allowed = stage.words
        assert precision(torch.float32) == "tf32"
        assert len(plans(wide, 132)) > 1
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert precision(torch.float32) == "tf32x3"
        assert stage.words != allowed  # measured apart
        assert plans(wide, 132) == [EAGER]


def test_packed_filters_follow_their_parameter() -> None:
    weight = nn.Parameter(torch.randn(5, 16, 3, 3))
    first = packed(weight, flat=False, columns=16)
    # tap x channel, filter: zeros where it is padded.
    assert torch.equal(first.values[4 * first.rows + 3, :5], weight[:, 3, 1, 1])
    assert not first.values[:, 5:].any()
    assert packed(weight, flat=False, columns=16) is first
    before = first.values.clone()
    with torch.no_grad():
        weight.mul_(2)
    again = packed(weight, flat=False, columns=16)
    assert torch.equal(again.values, 2 * before)
    weight.data = torch.zeros_like(weight)
    assert not packed(weight, flat=False, columns=16).values.any()


def test_what_is_made_of_filters_is_kept_in_inference_mode_too() -> None:
    first, second = torch.randn(5, 16, 3, 1), torch.randn(7, 5, 1, 3)
    with torch.inference_mode():
        wide, deep = aligned(first, second)
        assert (wide.shape, deep.shape) == ((16, 16, 3, 1), (7, 16, 1, 3))
        assert aligned(first, second)[0] is wide
        assert packed(wide, flat=False, columns=16) is packed(wide, flat=False, columns=16)
    x = torch.randn(1, 16, 6, 6)
    assert torch.allclose(F.conv2d(F.conv2d(x, wide), deep), F.conv2d(F.conv2d(x, first), second), atol=1e-4)


# Choosing among them.


def test_the_fastest_way_that_answers_rightly_is_chosen() -> None:
    stage = stage_of(dtype=torch.float16)
    slow, quick, wrong, failing = (Plan(form="pair", block_m=m) for m in (1, 2, 3, 4))
    times = {EAGER: 5.0, slow: 3.0, quick: 1.0, wrong: 0.1}

    def attempt(plan: Plan) -> Tensor:
        if plan == failing:
            raise RuntimeError("out of resources")
        return torch.full((4,), 2.0 if plan == wrong else 1.0)

    def seconds(call: Callable[[], Tensor]) -> float:
        return times[call.args[0]]  # type: ignore[attr-defined]

    assert tune.fastest(stage, [failing, wrong, slow, quick, EAGER], attempt, seconds) == quick
    assert tune.fastest(stage, [failing, wrong, EAGER], attempt, seconds) == EAGER
    assert tune.fastest(stage, [failing, wrong], attempt, seconds) is None
    assert tune.likeliest([failing, slow, quick], attempt) == slow
    assert tune.likeliest([failing], attempt) == EAGER


def test_choices_are_kept_and_a_damaged_file_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_CACHE", str(tmp_path / "kept"))
    plan = Plan(form="pair", block_m=64, block_k=32, block_n=16)
    assert tune._read() == {}
    tune._write("one", plan)
    tune._write("two", EAGER)
    assert tune._read() == {"one": plan, "two": EAGER}
    tune.cache_file().write_text("{")
    assert tune._read() == {}
    tune._write("one", plan)
    assert tune._read() == {"one": plan}


# The operation.

GEOMETRY = [2, 1, 1, 0, 1, 2]
ONE = [1, 1, 0, 0, 1, 1]


def operands(number: int, *, last: bool = False) -> tuple[object, ...]:
    g = torch.Generator().manual_seed(0)
    sizes = [(5, 16, 3, 3), (7, 5, 1, 1), (9, 7, 1, 1)][:number]
    weights = [torch.randn(size, generator=g) for size in sizes]
    x = torch.randn(2, 16, 12, 12, generator=g)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return x, weights, torch.randn(sizes[-1][0], generator=g), None, [*GEOMETRY, *ONE * (number - 1)], "silu", True


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_the_operation_is_a_proper_one(number: int, last: bool) -> None:
    arguments = operands(number, last=last)
    torch.library.opcheck(torch.ops.leanconv.factored.default, arguments)
    assert torch.equal(factored(*arguments), eager(*arguments))  # type: ignore[arg-type]
    assert factored(*arguments).is_contiguous(memory_format=torch.channels_last) or not last


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _, weights, bias, *self.rest = operands(2)
        self.tensors = nn.ParameterList([*weights, bias]).requires_grad_(False)  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        *weights, bias = self.tensors
        return torch.ops.leanconv.factored(x, weights, bias, *self.rest)


def test_the_operation_can_be_exported_and_compiled() -> None:
    x, *rest = operands(2)
    assert isinstance(x, Tensor)
    wanted = eager(x, *rest)  # type: ignore[arg-type]
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(Calling(), (x,), dynamic_shapes=({0: batch},))
    assert "leanconv.factored" in program.graph_module.code
    assert torch.equal(program.module()(x), wanted)
    assert program.module()(x[:1]).shape == wanted[:1].shape
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(Calling(), backend=backend, fullgraph=True)(x), wanted)


# Putting it in place.


@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_an_optimised_network_answers_the_same(scheme: str) -> None:
    images = smooth_images()
    result = leanconv.accelerate(plain_network(), images, 2.0, scheme=scheme, progress=False, samples=1000)  # type: ignore[arg-type]
    before, state = result.model(images), result.model.state_dict()
    model = optimize_(result.model)
    assert model is result.model
    assert [(one.activation, one.pooled) for one in fused_layers(model)] == [("relu", n == 0) for n in range(3)]
    assert torch.equal(model(images), before)
    assert list(model.state_dict()) == list(state)
    assert torch.equal(optimize_(model)(images), before)
    assert torch.equal(copy.deepcopy(model)(images), before)
    assert "2 x 2" in describe(model)


def test_a_saved_result_is_that_of_the_plain_network(tmp_path: Path) -> None:
    network, images = leanconv.models.character_cnn(), torch.rand(16, 1, 24, 24)
    result = leanconv.accelerate(network, images, 2, solver="linear", samples=500, progress=False)
    before = result.model(images)
    optimize_(result.model)
    loaded = leanconv.load(result.save(tmp_path / "saved"))
    assert not any(isinstance(module, FusedFactored) for module in loaded.modules())
    assert torch.equal(loaded(images), before)


def test_whoever_looks_inside_sees_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace records operations, and a hook on a factor, such as one that counts, is called."""
    monkeypatch.setattr(modules, "runs_here", lambda x: True)
    monkeypatch.setattr(modules, "compute", lambda x, *_: pytest.fail("nobody would see it"))
    model, x = row(nn.ReLU()), torch.randn(2, 16, 8, 8)
    macs = survey(model, x).macs
    wanted, doubled = model(x), model(2 * x)
    optimize_(model)
    assert torch.equal(torch.jit.trace(model, x, check_trace=False)(2 * x), doubled)
    assert survey(model, x).macs == macs
    seen: list[object] = []
    handle = next(model[0].children()).register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model(x), wanted)
    assert seen
    handle.remove()


def test_weights_changed_behind_its_back_are_packed_again_on_demand() -> None:
    weight = nn.Parameter(torch.randn(5, 16, 3, 3))
    first = packed(weight, flat=False, columns=16)
    where = first.values.data_ptr()
    with torch.no_grad():
        weight.mul_(2)
    again = packed(weight, flat=False, columns=16)
    assert again.values.data_ptr() == where  # a recorded graph reads it there
    weight.data.mul_(2)  # which no version shows
    assert packed(weight, flat=False, columns=16) is again
    pack.forget(weight)
    assert torch.equal(packed(weight, flat=False, columns=16).values, 2 * again.values)


def test_an_optimised_network_compiles_and_exports_without_leanconv(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = row(nn.ReLU(inplace=True), nn.MaxPool2d(2)), torch.randn(2, 16, 8, 8)
    wanted = model(x)
    optimize_(model)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), wanted)
    monkeypatch.setattr(modules, "runs_here", lambda x: True)
    program = torch.export.export(model, (x,))
    assert "leanconv" not in program.graph_module.code
    assert torch.equal(program.module()(x), wanted)


def test_a_compiled_network_calls_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels run; the operation itself answers on a CPU too."""
    from leanconv.kernels import modules

    model, x = row(nn.ReLU(inplace=True), nn.MaxPool2d(2)), torch.randn(2, 16, 8, 8)
    wanted = model(x)
    optimize_(model.requires_grad_(False))
    monkeypatch.setattr(modules, "runs_here", lambda x: True)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(x), wanted)
    assert any("factored" in name for name in called)
    assert not any("conv" in name and "leanconv" not in name for name in called)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.Hardswish()], ids=lambda m: type(m).__name__
)
def test_every_activation_the_kernels_know_is_found(activation: nn.Module) -> None:
    model, x = row(nn.Identity(), activation), torch.randn(2, 16, 8, 8)
    wanted = model(x)
    optimize_(model)
    assert [type(module) for module in model] == [FusedFactored, nn.Identity, Absorbed]
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize(
    "following",
    [
        (nn.Tanh(), nn.MaxPool2d(2)),
        (nn.GELU(approximate="tanh"),),
        (nn.BatchNorm2d(24), nn.ReLU()),
        (nn.Dropout(), nn.ReLU()),
        (nn.MaxPool2d(2), nn.ReLU()),
        (),
    ],
)
def test_what_the_kernels_do_not_know_stays(following: tuple[nn.Module, ...]) -> None:
    model, x = row(*following), torch.randn(2, 16, 8, 8)
    wanted = model(x)
    optimize_(model)
    assert [type(module) for module in model][1:] == [type(module) for module in following]
    assert [one.activation for one in fused_layers(model)] == ["none"]
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize(
    "pooling", [nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, padding=1)]
)
def test_other_poolings_stay(pooling: nn.Module) -> None:
    model, x = row(nn.ReLU(), pooling), torch.randn(2, 16, 9, 9)
    wanted = model(x)
    optimize_(model)
    assert type(model[2]) is nn.MaxPool2d
    assert torch.equal(model(x), wanted)


def test_hooks_and_shared_layers_keep_what_follows_them() -> None:
    x = torch.randn(2, 16, 8, 8)
    hooked = row(nn.ReLU())
    hooked[1].register_forward_hook(lambda module, given, answer: answer + 1)
    one = pair(16, 5, 16)
    shared = nn.Sequential(nn.Sequential(one, nn.ReLU()), nn.Sequential(one, nn.Tanh())).eval()
    for model in (hooked, shared):
        wanted = model(x)
        assert [layer.activation for layer in fused_layers(optimize_(model))] == ["none"]
        assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_residual_blocks_add_and_activate_in_the_last_launch(name: str) -> None:
    import torchvision

    torch.manual_seed(0)
    network = settle_batch_norms(getattr(torchvision.models, name)())
    x = torch.randn(2, 3, 64, 64)
    for block in network.layer2:
        assert isinstance(block.conv2, nn.Conv2d)
        c, d, stride = block.conv2.in_channels, block.conv2.out_channels, block.conv2.stride
        reduce = nn.Conv2d(c, 6, 3, stride, padding=1, bias=False)
        block.conv2 = Factored([("reduce", reduce), ("expand", nn.Conv2d(6, d, 1))], (d, c, 3, 3))
        block.bn2 = nn.Identity()
    network.eval()
    with torch.no_grad():
        wanted = network(x)
        optimize_(network)
        assert torch.allclose(network(x), wanted, rtol=1e-5, atol=1e-5)
    found = fused_layers(network)
    assert {one.name.split(".")[0] for one in found} == {"layer2"}
    assert all(one.activation == "relu" and one.addend == (name == "resnet18") for one in found)
    assert type(network.layer1[0]).__name__ in ("BasicBlock", "Bottleneck")


def test_a_first_convolution_of_few_channels_is_fused_too() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), pair(), nn.ReLU(), nn.Conv2d(24, 8, 3), nn.ReLU()]
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    wanted, keys = model(x), list(model.state_dict())
    optimize_(model)
    kinds = [FusedConv2d, Absorbed, FusedFactored, Absorbed, nn.Conv2d, nn.ReLU]
    assert [type(module) for module in model] == kinds
    assert torch.equal(model(x), wanted)
    assert list(model.state_dict()) == keys


def test_a_fused_layer_adds_before_its_activation() -> None:
    layer = optimize_(row(nn.ReLU()))[0]
    x, addend = torch.randn(2, 16, 8, 8), torch.randn(2, 24, 8, 8)
    assert torch.equal(layer(x, addend), F.relu(layer.unfused(x) + addend))


def test_an_optimised_network_can_be_trained() -> None:
    model = optimize_(row(nn.ReLU()).requires_grad_(True).train())
    model(torch.randn(2, 16, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_layers_call_the_operation_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same path a GPU takes, with the operation's own fallback behind it."""
    monkeypatch.setattr(modules, "runs_here", lambda x: True)
    called = []

    def noticed(*arguments: object) -> Tensor:
        called.append(arguments)
        return factored(*arguments)

    monkeypatch.setattr(modules, "compute", noticed)
    model, x = row(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(2, 16, 9, 9)
    wanted = model(x)
    optimize_(model)
    assert torch.equal(model(x), wanted)
    assert len(called) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    model.requires_grad_(True)
    model(x).sum().backward()
    assert len(called) == 1
    with torch.inference_mode():
        assert torch.equal(model(x), wanted)
    assert len(called) == 2


# Refusals.


def test_what_cannot_be_optimised_is_refused_in_a_sentence() -> None:
    with pytest.raises(LeanconvError, match=r"model is a str; give a network"):
        optimize_("vgg16")  # type: ignore[type-var]
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    with pytest.raises(LeanconvError, match=r"Sequential has no factorised layer .* leanconv\.accelerate"):
        optimize_(plain)
    assert type(plain[0]) is nn.Conv2d
    grouped = Factored([("reduce", nn.Conv2d(8, 4, 3, groups=2, bias=False)), ("expand", nn.Conv2d(4, 8, 1))], ())
    linear = Factored([("reduce", nn.Linear(8, 2, bias=False)), ("expand", nn.Linear(2, 8))], ())
    with pytest.raises(LeanconvError, match=r"\(0: it has groups, 1: it is not made of two-dimensional conv"):
        optimize_(nn.Sequential(grouped, linear))


def test_a_gpu_that_cannot_run_them_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.missing(torch.device("cpu")) == (
        "leanconv's kernels run on an NVIDIA GPU, and the network is on cpu; move it there first."
    )
    assert not availability.available(torch.device("cpu"))
    old = {"get_device_capability": lambda number: (7, 5), "get_device_name": lambda number: "Tesla T4"}
    for name, answer in old.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "Tesla T4 has 7.5" in str(availability._missing_on.__wrapped__(0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert str(availability._missing_on.__wrapped__(0)).endswith("pip install 'leanconv[kernels]'.")


def test_kernels_of_accelerate() -> None:
    network, images = leanconv.models.character_cnn(), torch.rand(8, 1, 24, 24)
    with pytest.raises(LeanconvError, match=r"kernels='yes' is not known; use 'auto', 'none'\."):
        leanconv.accelerate(network, images, 2, kernels="yes")  # type: ignore[arg-type]
    result = leanconv.accelerate(network, images, 2, solver="linear", samples=500, progress=False, kernels="auto")
    # On the CPU there is nothing to put in place.
    assert fused_layers(result.model) == []


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@triton
class TestOnTheDevice:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("form", ["conv", "pair", "shifted", "split"])
    def test_compiled_kernels_give_the_numbers_of_float64(self, form: str, dtype: torch.dtype) -> None:
        from tests.kernel_cases import error, stages

        limit = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-3}[dtype]
        for stage in stages(form, dtype, 6, 1):
            plan = Plan(form=form, block_m=64, block_k=32, block_n=32, share=2)  # type: ignore[arg-type]
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
                assert error(stage, plan, "cuda") <= limit, stage
            if dtype == torch.float32 and stage.columns <= 128:
                with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                    assert error(stage, plan, "cuda") <= 2e-5, stage

    def test_an_optimised_network_answers_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LEANCONV_CACHE", str(tmp_path))
        images = smooth_images().cuda()
        result = leanconv.accelerate(plain_network().cuda(), images, 2.0, scheme="channel", progress=False)
        model = copy.deepcopy(result.model).bfloat16().to(memory_format=torch.channels_last)
        x = images.bfloat16().contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            wanted = model(x)
            optimize_(model)
            assert relative(model(x).float(), wanted.float()) < 2e-2
            assert tune.cache_file().is_file()
            compiled = torch.compile(model, fullgraph=True)(x)
            assert relative(compiled.float(), wanted.float()) < 2e-2
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                answer = model(x)
            graph.replay()
            assert relative(answer.float(), wanted.float()) < 2e-2

    def test_the_operation_is_a_proper_one(self) -> None:
        x, weights, bias, *rest = operands(2)
        arguments = (x.cuda(), [w.cuda() for w in weights], bias.cuda(), *rest)  # type: ignore[attr-defined]
        torch.library.opcheck(
            torch.ops.leanconv.factored.default, arguments, test_utils=("test_schema", "test_faketensor")
        )

    def test_repeated_calls_pack_once(self) -> None:
        stage = stage_of(images=2, size=(16, 16))
        x, weight, second = (
            torch.randn(s).cuda().bfloat16() for s in ((2, 256, 16, 16), (51, 256, 3, 3), (256, 51, 1, 1))
        )
        x = x.contiguous(memory_format=torch.channels_last)
        plan = plans(stage, 132)[0]
        wanted = run_eagerly(stage, x, weight, second, None, None)
        found = run(stage, plan, x, weight, second, None, None)
        assert relative(found.float(), wanted.float()) < 2e-2
        assert packed(weight, flat=False, columns=stage.columns) is packed(weight, flat=False, columns=stage.columns)
