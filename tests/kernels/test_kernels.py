"""Fused kernels: the numbers of the layers they stand for, and which of them is chosen."""

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
from leanconv.kernels import optimize_, pack, tune
from leanconv.kernels.eager import run_eagerly
from leanconv.kernels.fused_stage import EAGER, WIDEST, Plan, Stage, plans, powers, precision, up
from leanconv.kernels.launch import run
from leanconv.kernels.pack import aligned, packed
from tests.support.equality import relative
from tests.support.fused import operands
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

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


# The kernels themselves.


@triton
@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("pair", 2),
        *(pytest.param(form, 5, marks=pytest.mark.nightly) for form in ("conv", "pair", "shifted", "split", "chain")),
    ],
)
def test_kernels_give_the_numbers_of_float64(form: str, count: int) -> None:
    """Strides, dilations, odd sizes, ranks that are no multiple of 16, every activation, addends, pooling: right, every
    element written and nothing beside them."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-m", "tests.support.kernel_cases", form, str(count), "0"]
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


# Packed filters.


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


@triton
def test_choices_of_another_version_of_the_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    before = tune._machine.__wrapped__(torch.device("cuda"))
    assert before.startswith(f"H200 torch {torch.__version__} triton ")
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == "tiles.py" else b""))
    assert tune._machine.__wrapped__(torch.device("cuda")) != before


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@triton
class TestOnTheDevice:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("form", ["conv", "pair", "shifted", "split"])
    def test_compiled_kernels_give_the_numbers_of_float64(self, form: str, dtype: torch.dtype) -> None:
        from tests.support.kernel_cases import error, stages

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
