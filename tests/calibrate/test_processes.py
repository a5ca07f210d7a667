"""Several processes: they share the images out and end with the network one process makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import leanconv
from leanconv.calibrate.processes import Processes
from leanconv.images import Pictures, find_pictures
from tests.support.equality import relative
from tests.support.networks import plain_network, residual_network
from tests.support.pictures import smooth_images
from tests.support.processes import together


@pytest.mark.parametrize(
    ("kind", "scheme", "refine", "tolerance"),
    [
        ("plain", "3d", "none", 1e-4),
        ("residual", "3d", "none", 1e-4),
        # Gradients and patches are those of the main process's images.
        ("residual", "3d", "closed-form", 0.1),
        ("plain", "spatial", "none", 1e-4),
    ],
)
def test_two_processes_end_with_the_network_of_one(
    kind: str, scheme: str, refine: str, tolerance: float, tmp_path: Path
) -> None:
    text = f"""
model = plain_network() if {kind!r} == "plain" else residual_network()
batches = list(smooth_images(40, 32).split(8))
result = leanconv.accelerate(
    model, batches, 2.0, {scheme!r}, samples=4000, refine={refine!r}, progress=False, ranks="energy",
    workdir={str(tmp_path / "work")!r}
)
torch.save([result.model(batches[0]), [layer.ranks for layer in result.layers]], {str(tmp_path)!r} + f"/{{rank}}")
"""
    outcome = together(text)
    assert [code for code, _ in outcome] == [0, 0], outcome
    model = plain_network() if kind == "plain" else residual_network()
    images = list(smooth_images(40, 32).split(8))
    alone = leanconv.accelerate(model, images, 2.0, scheme, samples=4000, refine=refine, progress=False, ranks="energy")
    (one, ranks), (other, _) = (torch.load(tmp_path / str(rank), weights_only=False) for rank in range(2))
    assert torch.equal(one, other)
    assert ranks == [layer.ranks for layer in alone.layers]
    assert relative(one, alone.model(images[0])) < tolerance


def test_two_processes_with_sweeps_end_with_one_network(tmp_path: Path) -> None:
    """The splits are fitted to what the first process has."""
    text = f"""
batches = list(smooth_images(40, 32).split(8))
result = leanconv.accelerate(plain_network(), batches, 3.0, leanconv.ThreeD(sweeps=2), samples=4000, progress=False)
torch.save(result.model(batches[0]), {str(tmp_path)!r} + f"/{{rank}}")
"""
    outcome = together(text)
    assert [code for code, _ in outcome] == [0, 0], outcome
    one, other = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert torch.equal(one, other)
    batches = list(smooth_images(40, 32).split(8))
    alone = leanconv.accelerate(plain_network(), batches, 3.0, leanconv.ThreeD(sweeps=2), samples=4000, progress=False)
    assert relative(one, alone.model(batches[0])) < 0.02


def test_an_error_in_one_process_ends_all() -> None:
    text = """
def batches():
    for number, batch in enumerate(smooth_images(40, 32).split(8)):
        if (rank, number) == (1, 3):
            raise RuntimeError("a broken cable")
        yield batch
leanconv.accelerate(plain_network(), batches(), 2.0, samples=4000, progress=False)
"""
    outcome = together(text)
    assert [code for code, _ in outcome] == [1, 1], outcome
    assert "process 1 of the job failed" in outcome[0][1]
    assert "a broken cable" in outcome[0][1]


def test_a_process_that_dies_ends_all_and_the_workdir_goes_on(tmp_path: Path) -> None:
    work = str(tmp_path / "work")
    arguments: dict[str, Any] = {"samples": 4000, "progress": False, "refine": "none"}
    text = f"""
import os, leanconv.calibrate.streams
put = leanconv.calibrate.streams.join_pieces
count = 0
def dies(*given):
    global count
    count += 1
    if count == 2:
        os.kill(os.getpid(), 9)
    return put(*given)
leanconv.calibrate.streams.join_pieces = dies
batches = list(smooth_images(40, 32).split(8))
leanconv.accelerate(plain_network(), batches, 2.0, **{arguments!r}, workdir={work!r})
"""
    outcome = together(text)
    assert outcome[0][0] == -9
    assert outcome[1][0] == 1
    assert "another process of the job ended" in outcome[1][1]
    images = list(smooth_images(40, 32).split(8))
    resumed = leanconv.accelerate(plain_network(), images, 2.0, **arguments, workdir=work)
    assert "original network" not in resumed.seconds
    alone = leanconv.accelerate(plain_network(), images, 2.0, **arguments)
    assert [vars(layer) for layer in resumed.layers] == [vars(layer) for layer in alone.layers]


def test_processes_with_other_images_are_told(tmp_path: Path) -> None:
    text = """
leanconv.accelerate(plain_network(), list(smooth_images(40 + 8 * rank, 32).split(8)), 2.0, progress=False)
"""
    outcome = together(text)
    assert [code for code, _ in outcome] == [1, 1], outcome
    assert all("process 1 was given other images than process 0 (48 against 40)" in said for _, said in outcome)


def test_processes_with_other_arguments_are_told(tmp_path: Path) -> None:
    text = f"""
workdir = {str(tmp_path / "work")!r} if rank == 0 else None
leanconv.accelerate(plain_network(), smooth_images(40, 32), 2.0, progress=False, workdir=workdir)
"""
    outcome = together(text)
    assert [code for code, _ in outcome] == [1, 1], outcome
    assert all("process 1 was given other arguments than process 0" in said for _, said in outcome)


def test_alone_there_is_nothing_to_exchange() -> None:
    team = Processes(torch.device("cpu"))
    assert team.is_main
    assert team.world == 1
    assert team.broadcast("plan") == "plan"
    team.check_equal("images", 3)


def test_pictures_are_shared_out_by_batches(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(10):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")
    found = find_pictures(tmp_path)

    def red(data: bytes) -> torch.Tensor:
        import io

        return torch.tensor([[[float(Image.open(io.BytesIO(data)).getpixel((0, 0))[0])]]])

    shares = [
        [(first, images.flatten().tolist()) for first, images in Pictures(found, red, batch=3).placed_batches(r, 2)]
        for r in (0, 1)
    ]
    assert shares == [[(0, [0.0, 1.0, 2.0]), (6, [6.0, 7.0, 8.0])], [(3, [3.0, 4.0, 5.0]), (9, [9.0])]]
