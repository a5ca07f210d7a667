"""Images on their way to a GPU while the network is looked at: the same network in the end, and nothing left behind."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import leanconv
from leanconv.calibrate import prefetch as inputs_module
from leanconv.calibrate.batches import Batch, Batches, take
from leanconv.calibrate.memory import Memory, device_share
from leanconv.calibrate.prefetch import Inputs, Travel, staged_copy, travelling
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_pieces_are_known_by_their_places_among_the_images() -> None:
    images = torch.rand(9, 3, 4, 4)
    joined = Batch(10, 9, (images[:4], images[4:]))
    assert [part.key for part in joined.split()] == [(10, 4), (14, 5)]
    assert [part.key for part in Batch(3, 2, ({"a": images[:2]},)).split()] == [(3, 2)]


def test_what_is_not_read_yet_is_not_at_hand() -> None:
    """A loader decodes when it is asked, beside the network."""
    images = list(torch.rand(6, 3, 8, 8))
    loaded = take(DataLoader(images, batch_size=2))  # type: ignore[arg-type]
    assert loaded.at_hand() == []
    given = take([torch.stack(images[:4]), torch.stack(images[4:])])
    assert [batch.size for batch in given.at_hand()] == [4, 2]
    assert given.read_at_once
    assert len(list(loaded)) == 3
    assert not loaded.read_at_once  # a workdir reads them all, and must change nothing


def test_nothing_travels_to_a_cpu() -> None:
    cpu = torch.device("cpu")
    with travelling(cpu) as travel:
        travel.send(take([torch.rand(4, 3, 8, 8)]), 1 << 30)
        assert travel.bytes == 0 == device_share(cpu, 10**9)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("leanconv-images")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_piece_travels_in_parts_and_arrives_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "STAGE", 100)  # bytes
    taken = []

    def stage(count: int) -> Tensor:
        taken.append(count)
        return torch.empty(count, dtype=dtype)

    piece = (100 * torch.rand(3, 2, 5, 7)).to(dtype)
    moved = torch.zeros_like(piece)
    staged_copy(piece, moved, stage)
    assert torch.equal(moved, piece)
    assert sum(taken) == piece.numel()
    assert max(taken) * piece.element_size() <= 100
    taken.clear()
    turned, moved = piece.transpose(1, 3), torch.zeros_like(piece.transpose(1, 3))
    staged_copy(turned, moved, stage)
    assert torch.equal(moved, turned)
    assert not taken


class ReadsValues(nn.Module):
    """Cannot be cut into parts, so it is run again for every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = plain_network()

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.network(x)
        return answer if float(x.sum()) < 1e30 else answer * 2


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("kind", ["cut", "run again"])
    @pytest.mark.parametrize("memory", [None, "300KB"])
    def test_the_network_is_the_same(self, kind: str, memory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        model = (plain_network() if kind == "cut" else ReadsValues()).cuda()
        images = list(smooth_images(60, 32).split(7))
        made, taken, take = [], [], Travel.take
        monkeypatch.setattr(Travel, "take", lambda self, key: taken.append(found := take(self, key)) or found)
        for sends in (True, False):
            if not sends:
                assert any(found is not None for found in taken)
                monkeypatch.setattr(Travel, "send", lambda *_: None)
            made.append(leanconv.accelerate(model, images, 2.0, samples=2000, memory=memory, progress=False).model)
        ours, theirs = (network.state_dict() for network in made)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    def test_pieces_arrive_whole_and_once_and_no_more_than_there_is_room_for(self) -> None:
        images = torch.rand(12, 3, 16, 16)
        layout = images[4:8].to(memory_format=torch.channels_last)
        given: Batches = take([images[:4], layout, images[8:]])
        with travelling(torch.device("cuda:0")) as travel:
            travel.send(given, 2 * images[:4].nbytes)
            assert travel.bytes == 2 * images[:4].nbytes
            first, second = travel.take((0, 4)), travel.take((4, 4))
            assert first is not None and second is not None  # noqa: PT018
            assert torch.equal(first.cpu(), images[:4])
            assert torch.equal(second.cpu(), layout)
            assert second.stride() == layout.stride()
            assert travel.take((8, 4)) is travel.take((0, 4)) is None

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("nothing can be pinned")])
    def test_what_does_not_arrive_comes_later(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise error

        monkeypatch.setattr(inputs_module, "_carried", full)
        images, device = torch.rand(8, 3, 16, 16), torch.device("cuda:0")
        memory = Memory(device, 10**6)
        with travelling(device) as travel:
            travel.send(take([images[:4], images[4:]]), 10**6)
            inputs = Inputs(memory, travel)
            assert torch.equal(inputs.get(Batch(0, 4, (images[:4],))).cpu(), images[:4])
            assert torch.equal(inputs.get(Batch(4, 4, (images[4:],))).cpu(), images[4:])
        inputs.drop_all()
        assert memory.reserve(10**6, among=("device",)) == "device"  # all of it is free again
        assert memory.reserve(1, among=("device",)) is None

    def test_what_is_given_may_be_written_to(self) -> None:
        images, device = torch.rand(8, 3, 16, 16), torch.device("cuda:0")
        both = Batch(0, 8, (images[:4], images[4:]))
        with travelling(device) as travel:
            travel.send(take([images[:4], images[4:]]), 10**6)
            inputs = Inputs(Memory(device, 10**6), travel)
            inputs.get(both).zero_()
            assert torch.equal(inputs.get(both).cpu(), images)
