"""The table of torch's activations against the mathematics; what is in neither is said, never silently ignored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.network.activations import KINDS, ActivationSpec, activation_of_module, build_activation
from leanconv.network.sites import linear_fits
from leanconv.network.survey import survey
from leanconv.solve import activation
from leanconv.solve.activations import NAMES
from tests.support.activations import PARAMETERS
from tests.support.pictures import smooth_images

SAMPLE = torch.rand(2, 3, 8, 8)


class Behind(nn.Module):
    """A convolution and whatever ``call`` makes of its response."""

    def __init__(self, call) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.conv(x))


def test_table_and_mathematics_have_the_same_names() -> None:
    assert tuple(kind.name for kind in KINDS) == NAMES


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_parameters_are_those_the_tests_know(kind) -> None:
    assert {parameter.name for parameter in kind.parameters} == set(PARAMETERS.get(kind.name, {}))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "identity"])
def test_a_module_is_built_and_recognised_and_computes_the_same(name: str) -> None:
    parameters = {key: float(torch.as_tensor(v).flatten()[0]) for key, v in PARAMETERS.get(name, {}).items()}
    module = build_activation(ActivationSpec(name=name, parameters=parameters))
    assert module is not None
    x = torch.linspace(-8, 30, 500, dtype=torch.float64)
    torch.testing.assert_close(module(x), activation(name, **parameters)(x))
    recognised = activation_of_module(module)
    assert recognised is not None
    if name != "prelu":  # a slope a filter becomes one slope, which takes as long
        assert recognised == ActivationSpec(name=name, parameters=parameters)


def calls() -> list:
    return [
        pytest.param(kind, function, id=f"{kind.name}-{getattr(function, '__qualname__', function.__name__)}")
        for kind in KINDS
        for function in kind.functions
    ]


@pytest.mark.parametrize(("kind", "function"), calls())
def test_every_function_is_seen_in_a_network(kind, function) -> None:
    """With its parameters by position or by keyword."""
    numbers = {key: float(torch.as_tensor(v).flatten()[0]) for key, v in PARAMETERS.get(kind.name, {}).items()}
    if kind.name == "prelu":
        arguments = {"weight": torch.full((8,), numbers["slope"])}
    else:
        arguments = {parameter.argument: numbers[parameter.name] for parameter in kind.parameters}
    fixed = dict(kind.fixed) if kind.fixed != {"approximate": "none"} else {}
    by_position = Behind(lambda y: function(y, *arguments.values(), **fixed)).eval()
    found = survey(by_position, SAMPLE).sites[0].activation
    expected = {"slope": arguments["weight"]} if kind.name == "prelu" else numbers
    assert found.same_as(ActivationSpec(name=kind.name, parameters=expected))
    if kind.name != "prelu":
        by_keyword = Behind(lambda y: function(y, **arguments, **fixed)).eval()
        assert survey(by_keyword, SAMPLE).sites[0].activation.same_as(found)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (nn.Hardsigmoid(), "hardsigmoid"),
        (nn.CELU(inplace=True), "celu"),
        (nn.Softsign(), "softsign"),
        (nn.Threshold(0.1, 0.0), "threshold"),
        (nn.LogSigmoid(), "log_sigmoid"),
        (F.selu, "selu"),
        (lambda y: y.clamp_(min=0), "clamp"),
        (torch.exp, "exp"),
    ],
)
def test_an_unknown_activation_is_said(call, name: str) -> None:
    found = survey(Behind(call).eval(), SAMPLE)
    assert found.sites[0].activation.name == "identity"
    assert linear_fits(found.sites) == {"conv": f"the activation that follows, {name}, is not known to leanconv"}


@pytest.mark.parametrize("call", [nn.Identity(), nn.ReLU(), nn.Dropout(), nn.AvgPool2d(2), lambda y: 2 * y])
def test_nothing_is_said_where_nothing_is_missed(call) -> None:
    assert linear_fits(survey(Behind(call).eval(), SAMPLE).sites) == {}


@pytest.mark.parametrize(("solver", "warned"), [("nonlinear", 1), ("linear", 0)])
def test_a_run_warns_once_of_unknown_activations(capsys: pytest.CaptureFixture[str], solver, warned: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.Hardsigmoid(), nn.Conv2d(8, 16, 3), nn.Softsign(), nn.Conv2d(16, 16, 3)]
    leanconv.accelerate(
        nn.Sequential(*layers, nn.Softsign()), smooth_images(8), 1.5, solver=solver, samples=200, progress=False
    )
    said = [line for line in capsys.readouterr().err.splitlines() if "linearly" in line]
    sentence = (
        "leanconv: warning: fitted linearly: 2, 4 (the activation that follows, softsign, is not known to leanconv)."
    )
    assert said == [sentence] * warned


def test_different_activations_behind_one_layer_are_said() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            small = x[..., :6, :6]
            return F.relu(self.conv(x)), torch.tanh(self.conv(small))

    sites = survey(Pyramid().eval(), SAMPLE).sites
    assert linear_fits(sites) == {"conv": "different activations follow its calls"}
