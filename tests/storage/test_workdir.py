"""The workdir: a run that was killed goes on and ends in the same bits; what was measured is used again."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leanconv.calibrate.memory import write_numbers
from leanconv.errors import LeanconvError
from leanconv.storage.workdir import Workdir
from tests.support.equality import assert_equal
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images
from tests.support.workdirs import killed_after, original_is_not_measured, run


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_workdir_changes_no_bit(tmp_path: Path) -> None:
    assert_equal(run(None), run(tmp_path / "work"))


@pytest.mark.parametrize("other", [{}, {"asymmetric": False}, {"refine": "none"}])
@pytest.mark.parametrize("sites", [1, 2, 3])
def test_a_run_goes_on_where_it_stopped(
    sites: int, other: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(None, **other)
    killed_after(sites, monkeypatch, tmp_path, **other)
    original_is_not_measured(monkeypatch)
    assert_equal(whole, run(tmp_path, **other))
    assert_equal(whole, run(tmp_path, **other))  # finished: nothing is left to do
    assert not [name for name in files(tmp_path) if name.endswith(".part")]


def test_a_half_written_file_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(1, monkeypatch, tmp_path)
    (tmp_path / "solved" / "00002.part").write_bytes(b"half")
    (tmp_path / "statistics.part").mkdir()
    (tmp_path / "statistics.part" / "3.y").write_bytes(b"half")
    assert_equal(run(None), run(tmp_path))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"speedup": 3.0}, "an unfinished run with speedup=2.0, but speedup=3.0 was given"),
        ({"scheme": "channel"}, "an unfinished run with scheme='3d', but scheme='channel'"),
        ({"skip": ["7"]}, "skip=None, but skip="),
        ({"samples": 1000}, "samples=2000, but samples=1000 was given"),
        ({"seed": 1}, "seed=0, but seed=1 was given"),
        ({"model": plain_network((8, 8, 8))}, "with other weights or layers; give the same again, or another workdir"),
        (
            {"images": smooth_images(24, seed=1)},
            "with other images or batches; give the same again",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_arguments_are_refused_by_name(
    changed: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after(1, monkeypatch, tmp_path)
    before = files(tmp_path)
    with pytest.raises(LeanconvError) as error:
        run(tmp_path, **changed)
    assert words in str(error.value)
    assert files(tmp_path) == before
    run(tmp_path)


@pytest.mark.parametrize(
    "changed", [{"speedup": 3.0}, {"scheme": "channel"}, {"solver": "linear"}, {"asymmetric": False}]
)
def test_a_second_run_uses_the_statistics(
    changed: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(None, **changed)
    run(tmp_path)
    original_is_not_measured(monkeypatch)
    second = run(tmp_path, **changed)
    assert_equal(expected, second)
    assert "original network" not in second.seconds


def test_more_layers_than_were_measured_are_measured(tmp_path: Path) -> None:
    run(tmp_path, skip=["0", "3"])
    result = run(tmp_path, skip=["0"])
    assert_equal(run(None, skip=["0"]), result)
    assert "original network" in result.seconds


def test_two_processes_do_not_share_a_workdir(tmp_path: Path) -> None:
    first = Workdir(tmp_path)
    with pytest.raises(LeanconvError, match="in use by another process; wait for it or give another folder"):
        run(tmp_path)
    first.close()
    run(tmp_path)


def test_a_folder_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "films").mkdir()
    for name in ("photo.jpg", "films/film.part"):
        (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(LeanconvError, match="holds other files and no earlier run; give a new or empty folder"):
        run(tmp_path)
    assert files(tmp_path) == {"photo.jpg", "films/film.part"}


def test_the_same_weights_in_other_layers_are_another_model(tmp_path: Path) -> None:
    run(tmp_path)
    other = plain_network()
    for number, module in enumerate(other):
        if isinstance(module, nn.ReLU):
            other[number] = nn.GELU()
    with pytest.raises(LeanconvError, match="other weights or layers"):
        run(tmp_path, other)


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(1, monkeypatch, tmp_path)
    before = files(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(LeanconvError, match=r"cannot write to workdir=.*No space left on device; make room"):
            run(tmp_path)
    assert before <= files(tmp_path)
    assert_equal(run(None), run(tmp_path))


def test_samples_that_find_no_room_do_not_stay_in_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def full(tensor: Tensor, file: Any) -> None:
        written.append(file.write(b"something"))
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("leanconv.calibrate.samples.write_numbers", full)
        with pytest.raises(LeanconvError, match=r"cannot write to workdir=.*No space left on device; make room"):
            run(tmp_path)
    assert len(written) == 3
    assert files(tmp_path) == {"leanconv-work.json"}
    assert_equal(run(None), run(tmp_path))


@pytest.mark.parametrize(
    "name", ["leanconv-work.json", "statistics/facts.json", "spectra.json", "solved/00001.safetensors"]
)
def test_a_damaged_file_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(1, monkeypatch, tmp_path)
    (tmp_path / name).write_bytes(b"\x00damaged")
    with pytest.raises(LeanconvError, match=Path(name).name):
        run(tmp_path)


SCRIPT = """
import sys, torch
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
from tests.support.workdirs import run
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images
result = run({folder!r}, plain_network((32, 32, 48, 48, 64, 64)), smooth_images(64, 32), samples=20_000)
torch.save([result.model.state_dict(), [vars(layer) for layer in result.layers]], {out!r})
"""


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_kill_9_and_again(tmp_path: Path) -> None:
    """Killed for real, twice, at moments that depend on the machine; ``benchmarks/engine/kill.py`` does ten."""
    root = str(Path(__file__).parents[2])

    def start(folder: str | None, out: str) -> subprocess.Popen[bytes]:
        text = SCRIPT.format(root=root, folder=folder, out=str(tmp_path / out))
        return subprocess.Popen([sys.executable, "-c", text], cwd=root)

    assert start(None, "whole").wait(120) == 0
    work = tmp_path / "work"
    for wanted in (1, 3):
        process = start(str(work), "never")
        until = time.monotonic() + 120
        while len(list(work.glob("solved/*.safetensors"))) < wanted and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "never").exists()
    assert start(str(work), "again").wait(120) == 0
    whole, again = (torch.load(tmp_path / name, weights_only=False) for name in ("whole", "again"))
    assert whole[1] == again[1]
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(whole[0].values(), again[0].values(), strict=True)
    )
    assert not list(work.rglob("*.part"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
@pytest.mark.parametrize("count", [1, 10, 100_000])
def test_numbers_that_find_no_room_say_so(count: int) -> None:
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space left on device") as caught,
    ):
        write_numbers(torch.rand(count), file)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("shape", [(0, 3), (1,), (5, 7)])
def test_numbers_are_written_whole_however_little_a_write_takes(shape: tuple[int, ...]) -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[:5])

    file, numbers = Slow(), torch.rand(*shape)
    write_numbers(numbers.T if numbers.dim() > 1 else numbers, file)
    wanted = numbers.T.contiguous() if numbers.dim() > 1 else numbers
    assert file.getvalue() == wanted.numpy().tobytes()
