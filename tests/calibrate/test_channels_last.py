"""Images go through the networks channels-last, where these take them and the device is quicker so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leanconv.calibrate import streams as streams_module
from leanconv.calibrate.batches import Batch, take
from leanconv.calibrate.observe import Seen
from leanconv.calibrate.positions import Chosen
from leanconv.calibrate.probes import PatchProbe, Probe
from leanconv.calibrate.processes import Processes
from leanconv.calibrate.streaming import partition
from leanconv.calibrate.streaming.partition import suits_channels_last
from tests.support.equality import assert_equal, assert_same
from tests.support.networks import Centres, plain_network, residual_network
from tests.support.pictures import smooth_images
from tests.support.runs import accelerate


def layouts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every site's input and output that a stream looks at from now on: whether it is channels-last. The few images
    that show patches come as they were given."""
    seen: list[bool] = []
    for usual in (Probe.from_input, Probe.outputs):

        def noted(self: Probe, x: Tensor, chosen: Chosen, usual: Any = usual) -> Tensor:
            if not isinstance(self, PatchProbe):
                seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return usual(self, x, chosen)  # type: ignore[no-any-return]

        monkeypatch.setattr(Probe, usual.__name__, noted)
    return seen


def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network is given its images channels-last any more."""
    monkeypatch.setattr(streams_module, "suits_channels_last", lambda *_: False)


@pytest.mark.parametrize("make", [plain_network, residual_network])
@pytest.mark.parametrize("other", [{}, {"scheme": "spatial"}, {"solver": "linear", "refine": "none"}])
def test_on_a_cpu_images_go_through_channels_last_and_nothing_else_is_so(
    make: Callable[[], nn.Module], other: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gradients in bfloat16 round otherwise in another layout, which may move a rank by one.
    monkeypatch.setattr("leanconv.calibrate.gradients.multiplies_bfloat16", lambda _: False)
    images, seen = smooth_images(24, 32), layouts(monkeypatch)
    before = images.clone()
    found = accelerate(make(), images, **other)
    assert seen
    assert all(seen)
    assert torch.equal(images, before)
    assert images.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in found.model.state_dict().values())
    as_given(monkeypatch)
    seen.clear()
    # A layer may be fitted by one iteration more or less, where the errors that decide round otherwise.
    assert_same(found, accelerate(make(), images, **other), 3e-3)
    assert not any(seen)


@pytest.mark.parametrize("limit", [1, 100_000])
def test_little_memory_keeps_channels_last_frontiers(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = residual_network(), smooth_images(24, 32)
    whole, seen = accelerate(model, images), layouts(monkeypatch)
    assert_equal(whole, accelerate(model, images, memory=limit))
    assert all(seen)


def test_channels_last_images_of_the_users_own_are_left_so(monkeypatch: pytest.MonkeyPatch) -> None:
    images, seen = smooth_images(24, 32), layouts(monkeypatch)
    found = accelerate(plain_network(), images.to(memory_format=torch.channels_last))
    as_given(monkeypatch)
    assert_equal(found, accelerate(plain_network(), images.to(memory_format=torch.channels_last)))
    assert all(seen)


class Views(nn.Module):
    """Takes no channels-last maps, in its own way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        network = plain_network()
        self.first, self.rest, self.way = network[:3], network[3:], way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        size, channels, height, width = x.shape
        if self.way == "flat":
            x = x.view(size, -1).view(x.shape)
        elif self.way == "several":  # a single image's maps can be viewed like this
            x = x.view(-1, height, width).view(x.shape)
        elif self.way == "memory":  # no error: other numbers
            x = x.as_strided(x.shape, (channels * height * width, height * width, width, 1))
        return self.rest(x)  # type: ignore[no-any-return]


def test_a_plain_run_to_compare_with_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, usual = [], partition.see

    def counted(model: nn.Module, batch: Batch, *rest: Any, **options: Any) -> dict[str, Seen]:
        plain.append(batch.size == 2 and not batch.channels_last)
        return usual(model, batch, *rest, **options)

    monkeypatch.setattr(partition, "see", counted)
    accelerate(Views("flat").eval(), smooth_images(24, 32))
    assert len(plain) > 1
    assert plain.count(True) == 1


@pytest.mark.parametrize("way", ["flat", "several", "memory"])
def test_a_network_that_takes_no_channels_last_maps_gets_its_images_as_they_are(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, images, seen = Views(way).eval(), smooth_images(24, 32), layouts(monkeypatch)
    with caplog.at_level(logging.WARNING, "leanconv"):
        found = accelerate(model, images)
    assert caplog.text == ""  # it is cut
    assert seen
    assert not any(seen)
    as_given(monkeypatch)
    assert_equal(found, accelerate(model, images))


def test_images_of_another_size_than_was_tried_go_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Views):
        def forward(self, x: Tensor) -> Tensor:
            self.way = "flat" if x.shape[3] % 2 else "none"
            return super().forward(x)

    seen = layouts(monkeypatch)
    assert accelerate(Odd("none").eval(), [smooth_images(8, 16), smooth_images(4, 16)[..., :15]]).speedup >= 2.0
    assert set(seen) == {True, False}


@pytest.mark.parametrize("size", [2, 3, 16])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_kind_of_a_channels_last_batch_is_that_of_its_copy_however_it_is_cut_or_joined(
    size: int, channels: int
) -> None:
    images = smooth_images(24, 16, channels)
    batches = take(list(images.split(6)))
    batches.channels_last(batches.sample())
    (batches.cut if size < 6 else batches.join)(size)
    assert sum(batch.size for batch in batches) == 24
    for batch in batches:
        given = batch.on(torch.device("cpu"))
        assert batch.kind == ((tuple(given.shape), given.stride(), given.dtype),)
        assert given.stride()[1] == 1
        assert torch.equal(given, images[batch.first : batch.first + batch.size])


def test_where_one_process_cannot_none_takes_its_images_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, seen = Processes.all_gather, layouts(monkeypatch)
    monkeypatch.setattr(
        Processes, "all_gather", lambda self, word: [True, False] if word is True else usual(self, word)
    )
    accelerate(plain_network(), smooth_images(24, 32))
    assert seen
    assert not any(seen)


def test_what_lies_behind_the_last_site_is_given_no_channels_last_maps() -> None:
    """It has not been tried on them: only sensitivity runs it at all."""

    class Ends(Centres):
        def forward(self, x: Tensor) -> Tensor:
            maps = self.body[:-3](x - x.mean(0, keepdim=True))
            return maps.view(len(maps), -1)

    assert accelerate(Ends().eval(), list(smooth_images(24, 32).split(8)), ranks="sensitivity").speedup >= 2.0


@pytest.mark.parametrize(
    ("cores", "dtype", "tf32", "last"),
    [
        ((9, 0), torch.float32, True, True),
        ((9, 0), torch.float32, False, False),
        ((7, 5), torch.float32, True, False),
        ((7, 5), torch.float16, False, True),
        ((7, 5), torch.bfloat16, False, False),
        ((8, 0), torch.bfloat16, False, True),
        ((6, 1), torch.float16, True, False),
        ((9, 0), torch.float64, True, False),
    ],
)
def test_on_a_gpu_images_go_channels_last_where_its_tensor_cores_are_used(
    cores: tuple[int, int], dtype: torch.dtype, tf32: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: cores)
    images = torch.rand(2, 3, 8, 8, dtype=dtype)
    probe = SimpleNamespace(site=SimpleNamespace(geometry=SimpleNamespace(kind="conv2d")))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        assert suits_channels_last(images, [probe], torch.device("cuda:0")) is last  # type: ignore[list-item]
