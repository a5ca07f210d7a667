"""The operation of the kernels: exported and compiled as torch's own, called where they run, unseen where one looks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leanconv.kernels import modules, optimize_
from leanconv.kernels.custom_op import factored
from leanconv.kernels.eager import eager
from leanconv.network.survey import survey
from tests.support.fused import operands, row


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
        self.weights = nn.ParameterList(weights).requires_grad_(False)
        self.bias = nn.Parameter(bias, requires_grad=False)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.leanconv.factored(x, [*self.weights.parameters()], self.bias, *self.rest)


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


# In a network.


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


def test_an_optimised_network_compiles_and_exports_without_leanconv(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = row(nn.ReLU(inplace=True), nn.MaxPool2d(2)), torch.randn(2, 16, 8, 8)
    wanted = model(x)
    optimize_(model)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), wanted)
    monkeypatch.setattr(modules, "runs_here", lambda x: True)
    program = torch.export.export(model, (x,))
    assert "leanconv" not in program.graph_module.code
    assert torch.equal(program.module()(x), wanted)


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
