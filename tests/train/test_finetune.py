"""Fine-tuning and distillation: what is trained, which weights are kept, and when a run ends."""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.system.fields import options
from leanconv.train.augment import crop_and_flip
from leanconv.train.dataset import Examples
from leanconv.train.finetune import finetune
from leanconv.train.settings import FinetuneConfig
from tests.support.networks import plain_network
from tests.support.option_table import table_of
from tests.support.pictures import smooth_images
from tests.support.training import (
    CLASSES,
    SETTINGS,
    assert_same_bits,
    known,
    quadrants,
    small,
    tune,
)


def test_the_learning_rate_rises_and_falls() -> None:
    constant = FinetuneConfig(**{**SETTINGS, "warmup": 4})
    assert [constant.rate(step, 10) for step in (0, 1, 3, 4, 9)] == pytest.approx([0.05, 0.1, 0.2, 0.2, 0.2])
    cosine = FinetuneConfig(**{**SETTINGS, "warmup": 2, "schedule": "cosine"})
    # From lr behind the warm-up, through half of it in the middle, to zero at the end.
    assert [cosine.rate(step, 10) for step in (0, 1, 2, 6, 10)] == pytest.approx([0.1, 0.2, 0.2, 0.1, 0.0])
    # A run that is shorter than its warm-up still gets to lr.
    assert max(cosine.rate(step, 3) for step in range(3)) == pytest.approx(0.2)
    rates = {
        (distill, optimizer): FinetuneConfig(**{**SETTINGS, "lr": None, "distill": distill, "optimizer": optimizer}).lr
        for distill in (False, True)
        for optimizer in (None, "adam", "muon")
    }
    assert list(rates.values()) == [1e-5, 1e-5, 2e-3, 2e-3, 3e-4, 2e-3]
    assert [FinetuneConfig(**{**SETTINGS, "distill": d}).optimizer for d in (False, True)] == ["sgd", "muon"]


def test_the_documentation_lists_the_options() -> None:
    assert f"\n{table_of(FinetuneConfig)}\n" in (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()


def test_the_function_and_its_config_have_the_same_defaults() -> None:
    arguments = inspect.signature(finetune).parameters
    assert {option.name: option.default for option in options(FinetuneConfig)} == {
        option.name: arguments[option.name].default for option in options(FinetuneConfig)
    }


def by_hand(*, ema: float, steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """SGD with momentum over the same images in the same order, and the average of the weights after every step."""
    network, (images, labels) = small(), quadrants()
    speeds = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    average: dict[str, Tensor] = {}
    order = Examples((images, labels), True).training(range(96), batch=16, seed=0, epoch=0, start=0, rank=0, world=1)
    for step, batch in zip(range(steps), order, strict=False):
        decay = min(ema, (1 + step) / (10 + step))
        network.zero_grad()
        F.cross_entropy(network(batch.images), batch.labels).backward()
        for name, value in network.named_parameters():
            speeds[name] = 0.9 * speeds[name] + value.grad
            value.data -= 0.05 * speeds[name]
            new = value.detach().clone()
            average[name] = decay * average[name] + (1 - decay) * new if name in average else new
    return network, average


@pytest.mark.parametrize("ema", [0.0, 0.2, 0.9])
def test_training_is_plain_sgd_and_an_average_of_its_weights_on_request(ema: float) -> None:
    tuned = tune(epochs=1, holdout=0.0, ema=ema)
    _, average = by_hand(ema=ema, steps=6)
    for name, value in tuned.model.named_parameters():
        assert torch.allclose(value, average[name], atol=1e-5)
    assert tuned.history.rows[-1].step == tuned.history.best == 6
    assert tuned.history.verdict() == (
        "nothing was held out, so whether the network got better is not known; the weights of step 6 were kept."
    )


def test_the_best_weights_are_kept() -> None:
    validation = quadrants(64, seed=5)
    tuned = tune(epochs=30, batch=96, lr=0.3, validation=validation)
    history = tuned.history
    assert history.best > 0
    assert max(row.held_right for row in history.rows) == history.kept.held_right > history.first.held_right
    assert len({row.held_right for row in history.rows}) > 3
    with torch.no_grad():
        scores = tuned.model(validation[0])
    assert float((scores.argmax(1) == validation[1]).float().mean()) == pytest.approx(history.kept.held_right)
    assert float(F.cross_entropy(scores, validation[1])) == pytest.approx(history.kept.held_loss, abs=1e-5)
    said = (
        f"held-out top-1 {100 * history.first.held_right:.2f} % -> {100 * history.kept.held_right:.2f} %, loss "
        f"{history.first.held_loss:.4f} -> {history.kept.held_loss:.4f}; the weights of step {history.best} were kept."
    )
    assert history.verdict() == said


def test_weights_that_cannot_get_better_stay_as_they_were_given() -> None:
    network = small()
    tuned = tune(network, quadrants()[0], copy.deepcopy(network), lr=0.1)
    assert tuned.history.best == 0
    assert tuned.history.first.held_loss == 0 < tuned.history.rows[-1].held_loss
    assert_same_bits(tuned.model, network)
    assert tuned.history.verdict().startswith("training made the network no better (held-out loss 0.0000 -> ")
    assert tuned.history.verdict().endswith("its weights stay as they were given.")


def test_nothing_of_the_user_is_touched() -> None:
    network, (images, labels) = small(0.5).train(), quadrants()
    network[0].weight.requires_grad_(False)
    before, frozen = copy.deepcopy(network), images.clone()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    wanted = torch.rand(3).tolist(), random.random(), np.random.rand()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    tuned = tune(network, (images, labels), augment=crop_and_flip(1))
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == wanted
    assert_same_bits(network, before)
    assert network.training
    assert all(parameter.grad is None for parameter in (*network.parameters(), *tuned.model.parameters()))
    assert torch.equal(images, frozen)
    # What the user froze stays frozen.
    assert torch.equal(tuned.model[0].weight, network[0].weight)
    assert not tuned.model[0].weight.requires_grad
    assert not torch.equal(tuned.model[5].weight, network[5].weight)


@pytest.mark.parametrize("original", [None, plain_network()])
def test_batch_norms_keep_their_statistics(original: nn.Module | None) -> None:
    network, images = plain_network(), smooth_images(32, seed=1)
    data = images if original is not None else (images, torch.arange(32) % 10)
    if original is not None:
        network[0].weight.data *= 1.5
    tuned = tune(network, data, original, ema=0.9, holdout=0.0, lr=1e-3)
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, tuned.model.get_buffer(name))
    assert not torch.equal(tuned.model[0].weight, network[0].weight)


def test_a_network_comes_back_in_its_own_precision() -> None:
    images, labels = quadrants()
    half = small().half()
    half[5].bias.data = half[5].bias.data.float()
    tuned = tune(half, (images.half(), labels), lr=0.1)
    assert tuned.history.best > 0
    assert {name: p.dtype for name, p in tuned.model.named_parameters()} == {
        name: p.dtype for name, p in half.named_parameters()
    }
    assert tune(half, images, small().bfloat16()).history.first.held_right > 0.9
    mixed = tune(small(), (images, labels), precision="bf16")
    assert mixed.history.best > 0
    assert mixed.model[0].weight.dtype == torch.float32


def test_a_network_that_was_loaded_frozen_is_trained() -> None:
    tuned = tune(small().requires_grad_(False))
    assert tuned.history.best > 0
    assert not any(parameter.requires_grad for parameter in tuned.model.parameters())


class WithAuxiliaryHead(nn.Module):
    """Answers with two tensors while it trains, as Inception does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = small(), nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> object:
        answer = self.net(images)
        return Two(answer, self.head(images.mean((2, 3)))) if self.training else answer


Two = namedtuple("Two", ["logits", "aux"])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_trained_and_averaged() -> None:
    network = small()
    network[5] = nn.utils.weight_norm(network[5])
    network(torch.zeros(1, 3, 8, 8))
    assert tune(network, ema=0.5).history.best > 0


def test_networks_with_auxiliary_heads_can_be_trained() -> None:
    torch.manual_seed(0)
    assert tune(WithAuxiliaryHead()).history.best > 0


@pytest.mark.parametrize("holdout", [0.25, 0.0])
@pytest.mark.parametrize("epochs", [1, 4])
def test_a_loss_that_is_no_number_ends_the_run_and_not_the_network(holdout: float, epochs: int) -> None:
    network, (images, labels) = known(), quadrants()
    wrong = 1e4 * images, (labels + 1) % CLASSES  # large gradients
    tuned = tune(network, wrong, lr=1e38, holdout=holdout, epochs=epochs, batch=72)
    assert "became NaN or infinite by step" in tuned.history.stopped
    assert "Try a smaller lr" in tuned.history.stopped
    assert_same_bits(tuned.model, network)
    json.dumps(tuned.history.to_json(), allow_nan=False)
    assert tuned.history.verdict().endswith("its weights stay as they were given.")


def test_a_network_of_nan_is_never_the_best() -> None:
    """Its answer is always class 0, which here is right, and that of the network given never."""
    images, _ = quadrants()
    network = small()
    network[5].bias.data[1] = 100
    tuned = tune(network, (images, torch.zeros(96, dtype=torch.int64)), lr=1e30, epochs=1, batch=86)
    assert tuned.history.first.held_right == 0
    assert_same_bits(tuned.model, network)


def test_a_collapse_is_said_plainly() -> None:
    tuned = tune(known(), lr=3.0, optimizer="adam", epochs=8, batch=24, holdout=0.5)
    assert "held-out top-1 collapsed from" in tuned.history.stopped
    assert "lr=3 is too large" in tuned.history.stopped
    assert tuned.history.kept.held_right == max(row.held_right for row in tuned.history.rows)
    assert tuned.history.rows[-1].step < 8 * 2


def test_one_image_more_or_less_is_no_collapse() -> None:
    """Ten images, one of them held out: it may well become wrong."""
    torch.manual_seed(0)
    network, images = nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)), torch.randn(10, 3, 2, 2)
    labels = network(images).argmax(1)
    tuned = finetune(network, (images, (labels + 1) % CLASSES), lr=1.0, epochs=4, batch=4, progress=False)
    swapped = finetune(network, (images, labels), lr=1.0, epochs=4, batch=4, progress=False)
    assert tuned.history.stopped is None
    assert swapped.history.stopped is None


def test_patience() -> None:
    network = small()
    tuned = tune(network, quadrants()[0], copy.deepcopy(network), lr=0.01, epochs=9, patience=2)
    assert tuned.history.stopped == "no better for 2 checks; training stopped at step 10."
    assert len(tuned.history.rows) == 3
