"""The two streams: cut or run again, on few or many images at a time, they see the same and end the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.calibrate import gradients as gradients_module
from leanconv.calibrate import streams as streams_module
from leanconv.calibrate.batches import Batch, take
from leanconv.calibrate.memory import Memory, Packed, parse_memory
from leanconv.calibrate.streaming import partition as cutting_module
from leanconv.calibrate.streaming.partition import Cutting
from leanconv.errors import LeanconvError
from leanconv.pipeline.prepare import Prepared
from leanconv.system import process_memory as heap
from tests.support.equality import assert_equal, assert_same, relative
from tests.support.networks import Centres, plain_network, residual_network
from tests.support.pictures import smooth_images
from tests.support.runs import accelerate


@pytest.fixture(params=["plain", "residual"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """In float64, where other orders of summation show nothing."""
    return (plain_network() if request.param == "plain" else residual_network()).double()


@pytest.fixture
def images() -> Tensor:
    return smooth_images(24, 32).double()


def test_the_cut_stream_is_the_network_run_again(
    model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the paper's fit. Gradients and patches are of other images, or of images in another order, in a network that
    is not known to take them one by one."""
    cut = accelerate(model, images, refine="none")
    monkeypatch.setattr(streams_module, "cutting", lambda *_: Cutting("a test says so"))
    assert_same(cut, accelerate(model, images, refine="none"))


def test_batches_make_no_difference(model: nn.Module, images: Tensor) -> None:
    """The positions looked at belong to the image; on a CPU batches are cut anyway."""
    whole, plain = accelerate(model, [images]), accelerate(model, [images], refine="none")
    for size in (5, 8):
        assert_same(whole, accelerate(model, list(images.split(size))))
    # Two images show that they go through one by one.
    assert_same(plain, accelerate(model, list(images.split(1)), refine="none"))
    # By default others show patches then, which may move a rank.
    alone = accelerate(model, list(images.split(1)))
    with torch.no_grad():
        assert relative(alone.model(images), whole.model(images)) < 0.05


def test_the_original_along_its_tape_gives_what_hooks_see(
    model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a response is the layer's own output or computed from its input, one image at a time or many."""
    usual = accelerate(model, images)
    monkeypatch.setattr(streams_module, "CACHED", 1 << 12)  # one image a batch
    assert_same(usual, accelerate(model, images))
    own = Prepared.probe
    monkeypatch.setattr(Prepared, "probe", lambda self, site: replace(own(self, site), own_output=False))
    assert_same(usual, accelerate(model, images))
    monkeypatch.setattr("leanconv.calibrate.streaming.passes.Walk.knows", lambda *_: False)
    assert_same(usual, accelerate(model, images))


def test_layers_that_stay_whole_run_on_any_number_of_images() -> None:
    """Inside a layer with padding of its own there are operations that know how many images they were recorded with."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1, padding_mode="circular"), nn.ReLU()
    model = nn.Sequential(*layers, nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()
    with leanconv.analyze(model, smooth_images(10), skip=[], samples=400, progress=False) as analysis:
        plan = analysis.plan(2, asymmetric=False)
        plan.pop("2", None)
        plan["6"] = (4, 3)
        found = analysis.apply(plan)
    assert [layer.ranks for layer in found.layers if layer.name == "6"] == [(4, 3)]


def test_every_layer_runs_about_twice(images: Tensor) -> None:
    """Once in either stream, and on a few images to look at the network; not once a site."""
    model = plain_network((16, 16, 16, 16, 16, 16, 16, 16))
    seen = 0

    class Counting(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal seen
            seen += len(x)
            return super().forward(x)

    first = model[0]
    model[0] = Counting(3, 16, 3, padding=1)
    model[0].load_state_dict(first.state_dict())
    many = smooth_images(200, 16)
    accelerate(model, many)
    assert seen <= 2 * 200 + 30


class Counts(nn.Module):
    """Data-dependent: what it does next depends on the values it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * (2.0 if x.mean().item() > 0 else 1.0))


class Remembers(nn.Module):
    """Numbers leave torch and come back, where no one can follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain_network()

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.from_numpy(x.numpy().std(axis=(1, 2, 3), keepdims=True).astype("float64"))
        return self.body(x / scale)


class Lists(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x / max(x.abs().amax((1, 2, 3)).tolist()))


@pytest.mark.parametrize("kind", [Counts, Remembers, Lists])
def test_what_cannot_be_cut_is_run_again_and_said_once(
    kind: type[nn.Module], images: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "leanconv"):
        result = accelerate(kind().double().eval(), images)
    assert result.speedup >= 2.0
    lines = [record.getMessage() for record in caplog.records if "cannot be stopped" in record.getMessage()]
    assert len(lines) == 1


def test_a_network_that_mixes_its_batch_keeps_its_batches(
    images: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches = Centres().double().eval(), list(images.split(8))
    found = cutting_module.cutting
    seen: list[Cutting] = []

    def noted(*given: object) -> Cutting:
        seen.append(found(*given))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(streams_module, "cutting", noted)
    cut = accelerate(model, batches)
    assert seen[0].reason is None
    assert not seen[0].one_by_one
    monkeypatch.setattr(streams_module, "cutting", lambda *_: Cutting("a test says so"))
    assert_same(cut, accelerate(model, batches))


@pytest.mark.parametrize("limit", [1, 200_000, 10**9])
def test_little_memory_gives_the_same(
    model: nn.Module, images: Tensor, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, on disk, or computed again from the images: the same bits."""
    assert_equal(accelerate(model, images), accelerate(model, images, memory=limit))
    monkeypatch.setattr("leanconv.calibrate.memory._disk_folder", lambda: None)
    if limit > 1:
        assert_equal(accelerate(model, images), accelerate(model, images, memory=60_000_000))


def test_no_room_for_samples_is_said(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanconv.calibrate.memory._disk_folder", lambda: None)
    with pytest.raises(LeanconvError, match="fit neither in memory nor on disk; give more memory"):
        accelerate(plain_network().double(), images, memory="1KB")


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("512 MiB", 512 << 20), ("1.5g", 1_500_000_000), (100, 100), ("7", 7)]
)
def test_amounts_of_memory(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "8 bananas", "-1GB", -5, 0, 2.5, True, "0GB", "GB"])
def test_what_is_no_amount_of_memory(text: object) -> None:
    with pytest.raises(LeanconvError, match="is no amount of memory; give bytes"):
        parse_memory(text)


def test_tensors_that_share_memory_still_do_when_unpacked(tmp_path: object) -> None:
    base = torch.randn(4, 6)
    env = {0: base, 1: base[:, ::2], 2: base.T, 3: torch.randn(3).to(torch.float64), 4: torch.empty(0)}
    cpu = torch.device("cpu")
    memory = Memory(cpu, None)
    written = [Packed.of(env).written(memory.file) for _ in range(2)] if memory.file else []
    for packed in [Packed.of(env), Packed.of(env).moved(cpu), *written]:
        found = packed.unpacked(cpu)
        assert all(torch.equal(found[slot], tensor) for slot, tensor in env.items())
        found[0].add_(1)
        assert torch.equal(found[1], base[:, ::2] + 1)
        assert torch.equal(found[2], base.T + 1)
        assert not torch.equal(found[0], base)


class Hungry(nn.Module):
    """Runs out of memory on more than ``most`` images."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.body, self.most = plain_network(), most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.body(x)


def test_out_of_memory_halves_the_batch_and_goes_on(images: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "leanconv"):
        small = accelerate(Hungry(3).double().eval(), [images], scheme="spatial")  # no stream is cut, no batch either
    assert "out of memory with 24 images a batch; going on with 12." in caplog.text
    assert "going on with 3." in caplog.text
    large = accelerate(Hungry(10**6).double().eval(), [images], scheme="spatial")
    assert_same(large, small)


class Quarters(nn.Module):
    """Its layers run on four rows an image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.cat([part for half in x.chunk(2, 2) for part in half.chunk(2, 3)]))


def test_after_running_out_of_memory_both_streams_look_at_the_same_places(
    images: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even where rows are not images: the pass begins anew."""
    model = Quarters().double().eval()
    expected = accelerate(model, list(images.split(4)))
    walk = streams_module.Walk.__call__

    def hungry(self: Any, batch: Batch) -> Any:
        if batch.size == 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return walk(self, batch)

    monkeypatch.setattr(streams_module.Walk, "__call__", hungry)
    with caplog.at_level(logging.WARNING, "leanconv"):
        found = accelerate(model, list(images.split(8)))
    assert "out of memory with 8 images a batch; going on with 4." in caplog.text
    assert_same(found, expected)


@pytest.mark.parametrize("most", [1, 5, 23])
def test_some_images_go_through_as_many_at_a_time_as_there_is_memory_for(
    most: int, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that gradients are taken of, and those that show patches."""
    usual, sizes = accelerate(plain_network().double(), images), []
    network = streams_module.observe, gradients_module._answers

    def hungry(run: Any, size: int, *given: Any, **named: Any) -> Any:
        sizes.append(size)
        if size > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(*given, **named)

    monkeypatch.setattr(
        gradients_module, "_answers", lambda *given, **named: hungry(network[1], given[1].size, *given, **named)
    )
    monkeypatch.setattr(
        streams_module,
        "observe",
        lambda *given, **named: (
            network[0](*given, **named)
            if "tapes" in named
            else hungry(network[0], max(batch.size for batch in given[1]), *given, **named)
        ),
    )
    found = accelerate(plain_network().double(), images)
    assert max(sizes) == 24
    assert_same(found, usual)


def test_a_loader_that_gives_more_than_it_says(images: Tensor) -> None:
    from torch.utils.data import DataLoader

    def doubled(items: list[Tensor]) -> Tensor:
        batch = torch.stack(items)
        return torch.cat([batch, batch.flip(3)])

    model = plain_network().double()
    found = accelerate(model, DataLoader(images, batch_size=8, collate_fn=doubled))  # type: ignore[arg-type]
    expected = accelerate(model, [torch.cat([batch, batch.flip(3)]) for batch in images.split(8)])
    assert found.images == expected.images == 48
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert a.error == pytest.approx(b.error, rel=0.1)


def test_images_of_several_sizes(caplog: pytest.LogCaptureFixture) -> None:
    """A tape that serves any number of images of one size need not serve those of another."""

    class Evens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[3] % 2:
                x = torch.cat([x, x.new_zeros(x.shape[0], x.shape[1], x.shape[2], 1)], 3)
            return self.body(x)

    batches = [smooth_images(8, 16), smooth_images(4, 16)[..., :15], smooth_images(3, 16)[..., :15]]
    assert accelerate(Evens().eval(), batches).speedup >= 2.0


def test_out_of_memory_on_one_image_is_raised(images: Tensor) -> None:
    class Never(Hungry):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.most = 10**6 if self.calls < 20 else 0
            return super().forward(x)

    with pytest.raises(torch.OutOfMemoryError):
        accelerate(Never(0).double().eval(), list(images.repeat(4, 1, 1, 1).split(3)), scheme="spatial")


def test_a_loader_is_read_while_the_network_runs(images: Tensor) -> None:
    """Decoding must not come before everything else."""
    from torch.utils.data import DataLoader

    batches = take(DataLoader(images, batch_size=5))  # type: ignore[arg-type]
    assert batches.images == 24
    read = [batch.size for _, batch in zip(range(2), batches, strict=False)]
    assert read == [5, 5]
    assert len(batches.at_hand()) == 2
    assert_same(
        accelerate(plain_network().double(), DataLoader(images, batch_size=5)),
        accelerate(plain_network().double(), list(images.split(5))),
    )


def test_seconds_are_reported(images: Tensor) -> None:
    result = accelerate(plain_network().double(), images)
    assert set(result.seconds) >= {"preparing", "original network", "accelerated network", "solving"}
    assert result.to_json()["seconds"] == result.seconds


@pytest.mark.parametrize("theirs", [False, True])
def test_the_heap_is_told_twice_and_never_where_its_owner_has_set_it(
    theirs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if theirs:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    kept: list[int] = []
    monkeypatch.setattr(heap, "_set", kept.append)
    with pytest.raises(KeyError), heap.heap_at_hand():
        raise KeyError
    assert kept == ([] if theirs else [heap.AT_HAND, heap._FREE])
