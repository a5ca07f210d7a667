"""Steps recorded as CUDA graphs: the same weights as without, and networks that cannot be recorded are trained too."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.train import cuda_graphs as recorded
from leanconv.train import loop
from leanconv.train.augment import crop_and_flip
from leanconv.train.finetune import FineTuned
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images
from tests.support.training import assert_same_bits

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Around(nn.Module):
    """A small network that does something else on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = plain_network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        answer: Tensor = self.inner(self.before(x))
        return answer

    def before(self, x: Tensor) -> Tensor:
        return x


class Reading(Around):
    def before(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > -1e9 else -x


class Waiting(Around):
    def before(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x


class Drawing(Around):
    def before(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn_like(x)


class Counting(Around):
    counting = False

    def before(self, x: Tensor) -> Tensor:
        return x * (1 + self.calls) if self.counting else x


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[recorded.Steps]:
    """The steps of every training."""
    made: list[recorded.Steps] = []

    class Noted(recorded.Steps):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(loop, "Steps", Noted)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    return made


def tuned(model: nn.Module, **other: object) -> FineTuned:
    model = model.cuda().eval()
    images = smooth_images(64).cuda()
    result = leanconv.accelerate(model, images, 2.0, samples=2000, progress=False, refine="none")
    if isinstance(result.model, Counting):  # accelerate would not have it
        result.model.counting = True
    arguments = {"epochs": 3, "batch": 8, "augment": crop_and_flip(1), **other}
    return leanconv.finetune(result, images, model, progress=False, **arguments)  # type: ignore[arg-type]


def unrecorded(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **other: object) -> FineTuned:
    with monkeypatch.context() as changed:
        changed.setattr(loop.Stepper, "_recordable", lambda _: False)
        return tuned(model, **other)


@pytest.mark.parametrize(
    "other",
    [{}, {"optimizer": "adam"}, {"precision": "off"}, {"clip": 1e-3}, {"weight_decay": 0.1}, {"optimizer": "sgd"}],
    ids=str,
)
class TestOnAGpu:
    pytestmark = on_a_gpu

    def test_the_same_weights_as_without(self, other, noted, monkeypatch):
        found, plain = tuned(plain_network(), **other), unrecorded(monkeypatch, plain_network(), **other)
        assert [steps._recording is not None for steps in noted] == [True] * (other != {"optimizer": "sgd"})
        assert_same_bits(found.model, plain.model)
        assert found.history.best > 0


class TestOddNetworks:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("kind", [Reading, Waiting])
    def test_are_trained_as_they_are(self, kind, noted, monkeypatch):
        stream = torch.cuda.current_stream()
        found, plain = tuned(kind()), unrecorded(monkeypatch, kind())
        assert [steps._recording for steps in noted] == [None]
        assert_same_bits(found.model, plain.model)
        assert found.history.best > 0
        assert torch.isfinite(torch.rand(3, device="cuda")).all()  # the generator is whole
        assert torch.cuda.current_stream() == stream

    @pytest.mark.parametrize("kind", [Drawing, Counting])
    def test_that_are_another_every_time_are_not_recorded(self, kind, noted):
        found = tuned(kind())
        assert [steps._recording for steps in noted] == [None]
        assert found.history.rows[-1].step == 21

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
    def test_on_a_device_that_is_not_the_current_one(self, noted, monkeypatch):
        found = tuned(plain_network(), device="cuda:1")
        plain = unrecorded(monkeypatch, plain_network(), device="cuda:1")
        assert [steps._recording is not None for steps in noted] == [True]
        assert_same_bits(found.model, plain.model)

    def test_that_a_graph_has_moved_the_weights_shows(self, noted):
        versions: list[int] = []

        def watching(images: Tensor) -> Tensor:
            versions.append(next(noted[0]._gradients.__self__.model.parameters())._version)  # type: ignore[attr-defined]
            return images

        tuned(plain_network(), augment=watching)
        assert all(a < b for a, b in pairwise(versions))

    def test_a_run_that_was_ended_goes_on_to_the_same_weights(self, noted, tmp_path):
        whole, shift, calls = tuned(plain_network()), crop_and_flip(1), 0

        def ending(images: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 13:
                raise KeyboardInterrupt
            return shift(images)

        with pytest.raises(KeyboardInterrupt):
            tuned(plain_network(), augment=ending, workdir=tmp_path)
        again = tuned(plain_network(), augment=ending, workdir=tmp_path)
        assert_same_bits(whole.model, again.model)


class Pretended:
    """A GPU's generator, and a recording that runs the step instead: what is asked of them, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, off: float = 0.0, breaks: bool = False, free: int = 100):
        self.offset, self.put_back, self.moves, self.replayed = 0, False, 0, 0
        self.streams: list[object] = []
        pretended = self

        class Recording:
            def __init__(self, gradients, move, images: Tensor) -> None:
                if breaks:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self._gradients, self._move, self._shape = gradients, move, images.shape

            def fits(self, images: Tensor) -> bool:
                return images.shape == self._shape

            def gradients(self, images: Tensor) -> Tensor:
                return self._gradients(images) + off

            def step(self, images: Tensor) -> Tensor:
                pretended.replayed += 1
                loss = self.gradients(images)
                self._move()
                return loss

        monkeypatch.setattr(recorded, "_Recording", Recording)
        memory = {"reset_peak_memory_stats": None, "max_memory_allocated": 40, "mem_get_info": (free, 200)}
        for name, value in {**memory, "memory_allocated": 0, "memory_reserved": 0}.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        monkeypatch.setattr(recorded, "_no_waiting", nullcontext)
        monkeypatch.setattr(torch.cuda, "default_generators", {None: self})
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "theirs")
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: self.streams.append(stream))

    def get_offset(self) -> int:
        return self.offset

    def clone_state(self) -> Pretended:
        return self

    def graphsafe_set_state(self, state: object) -> None:
        self.put_back = state is self

    def moved(self) -> None:
        self.moves += 1

    def run(self, gradients=lambda images: images.sum(), steps: int = 10) -> tuple[float, ...]:
        taken = recorded.Steps(gradients, self.moved)
        return tuple(float(taken(torch.full((2,), float(number)))) for number in range(steps))


class TestRules:
    """Every step moves the weights once and has the loss of its own images, recorded or not."""

    expected = tuple(2.0 * number for number in range(10))

    def test_from_the_fourth_step_on_it_is_recorded(self, monkeypatch):
        gpu = Pretended(monkeypatch)
        assert gpu.run() == self.expected
        assert (gpu.moves, gpu.replayed) == (10, 10 - recorded.BEFORE)

    def test_images_of_another_shape_are_run(self, monkeypatch):
        gpu = Pretended(monkeypatch)
        steps = recorded.Steps(lambda images: images.sum(), gpu.moved)
        found = [float(steps(torch.ones(count))) for count in (2, 2, 2, 2, 3, 2)]
        assert found == [2, 2, 2, 2, 3, 2]
        assert (gpu.moves, gpu.replayed) == (6, 2)

    def test_a_recording_of_another_loss_is_not_believed(self, monkeypatch):
        gpu = Pretended(monkeypatch, off=1.0)
        assert gpu.run() == self.expected
        assert (gpu.moves, gpu.replayed) == (10, 0)

    def test_one_that_breaks_off_leaves_the_generator_whole(self, monkeypatch):
        gpu = Pretended(monkeypatch, breaks=True)
        assert gpu.run() == self.expected
        assert (gpu.moves, gpu.replayed, gpu.put_back, gpu.streams) == (10, 0, True, ["theirs"])

    @pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
    def test_what_draws_on_the_cpu_is_not_recorded(self, draw, monkeypatch):
        gpu = Pretended(monkeypatch)
        assert gpu.run(lambda images: images.sum() + 0 * float(draw())) == self.expected
        assert (gpu.moves, gpu.replayed) == (10, 0)

    def test_what_draws_or_finds_no_room_is_not_recorded(self, monkeypatch):
        gpu = Pretended(monkeypatch)

        def drawing(images: Tensor) -> Tensor:
            gpu.offset += 4
            return images.sum()

        assert gpu.run(drawing) == self.expected
        assert (gpu.moves, gpu.replayed) == (10, 0)
        full = Pretended(monkeypatch, free=49)
        assert full.run() == self.expected
        assert (full.moves, full.replayed) == (10, 0)

    def test_an_error_of_the_network_itself_is_raised(self, monkeypatch):
        gpu, calls = Pretended(monkeypatch), 0

        def failing(images: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls >= recorded.BEFORE:
                raise ValueError("the network's own")
            return images.sum()

        with pytest.raises(ValueError, match="the network's own"):
            gpu.run(failing)
        assert gpu.moves == recorded.BEFORE - 1


def test_on_a_cpu_nothing_is_recorded(monkeypatch):
    made: list[object] = []
    monkeypatch.setattr(loop, "Steps", lambda *given: made.append(given))
    model, images = plain_network(), smooth_images(16)
    result = leanconv.accelerate(model, images, 2.0, samples=500, progress=False, refine="none")
    tuned = leanconv.finetune(result, images, model, epochs=5, batch=4, progress=False)
    assert tuned.history.rows[-1].step == 15
    assert not made
