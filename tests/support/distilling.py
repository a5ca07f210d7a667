"""A small network and how its runs with ``refine="distill"`` are asked for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.config import Distill
from leanconv.result import Accelerated
from leanconv.train import distill as refine
from leanconv.train.finetune import finetune
from tests.support.equality import relative
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

SIZE = 12


def network() -> nn.Module:
    return plain_network((12, 16, 16, 16))


def images(count: int = 40, seed: int = 0) -> Tensor:
    return smooth_images(count, SIZE, seed=seed)


def run(refined: str | Distill = "distill", model: nn.Module | None = None, **other: object) -> Accelerated:
    arguments: dict[str, object] = {"speedup": 2.0, "samples": 2000, "progress": False, **other}
    given = arguments.pop("images", None)
    return leanconv.accelerate(
        network() if model is None else model,
        images() if given is None else given,  # type: ignore[arg-type]
        refine=refined,  # type: ignore[arg-type]
        **arguments,  # type: ignore[arg-type]
    )


def trained_with(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    monkeypatch.setattr(refine, "finetune", partial(finetune, **settings))  # type: ignore[arg-type]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "EPOCHS", 4)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images enough to fit layers to all of them."""
    monkeypatch.setattr(refine, "FEW", 0)


@pytest.fixture(scope="module")
def distilled() -> Accelerated:
    return run()


@pytest.fixture(scope="module")
def closed_form() -> Accelerated:
    return run("closed-form")


def distance(result: Accelerated) -> float:
    """From the original's answers, on images nobody has seen."""
    unseen = images(100, seed=9)
    with torch.no_grad():
        return relative(result.model(unseen), network()(unseen))
