"""``leanconv evaluate``: one network or two, in one process or several; what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from leanconv.cli.main import run
from leanconv.evaluation.classification import logits_of
from tests.support.command import COMMON
from tests.support.pictures import write_picture
from tests.support.processes import apart


def test_original_and_accelerated_side_by_side(place: Path, leanconv_command) -> None:
    code, _, err = leanconv_command(
        f"accelerate net.py:build --images photos --speedup 2 --samples 500 --out fast --quiet {COMMON}"
    )
    assert code == 0, err
    # The folder remembers size 16 and is rebuilt by the network it is compared with.
    both = "evaluate net.py:build fast --data photos --workers 0 --device cpu"
    code, out, err = leanconv_command(both)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["net.py:build", "fast"]
    assert "95 % interval" in out
    assert "8 images; the same first answer on" in out
    code, out, err = leanconv_command(f"{both} --views 10 --json --quiet")
    assert code == 0, err
    found = json.loads(out)
    assert (found["original"], found["other"], found["images"], found["views"]) == ("net.py:build", "fast", 8, 10)
    assert found["kl"] > 0
    assert found["top1"]["low"] <= found["top1"]["increase"] <= found["top1"]["high"]
    code, out, _ = leanconv_command("evaluate fast fast --model net.py:build --data photos --workers 0 --json --quiet")
    found = json.loads(out)
    assert (code, found["agreement"], found["kl"], found["top1"]["within_noise"]) == (0, 1.0, 0.0, True)


def evaluate_apart(folder: Path, arguments: str) -> None:
    """In a process of torchrun's: what is shown, and what went wrong, in files of its own."""
    os.chdir(folder)
    sys.argv = ["leanconv", "evaluate", *arguments.split(), "--workers", "0", "--device", "cpu", "--quiet"]
    rank = os.environ["RANK"]
    with open(f"shown-{rank}", "w") as sys.stdout, open(f"said-{rank}", "w") as sys.stderr:
        run()


def test_two_processes_find_what_one_finds(place: Path, leanconv_command) -> None:
    """Of 101 pictures, 50 and 51; one cannot be read, which is too many for its share and not for all."""
    for number in range(4, 97):
        write_picture(place / "photos" / "cat" / f"{number:02d}.png", 2 * number)
    (place / "photos" / "dog" / "0.png").write_bytes(b"no picture")
    with (place / "net.py").open("a") as file:
        file.write("\ndef other():\n    model = build()\n    model[0].weight.data *= 1.5\n    return model\n")
    for views in ("1", "10"):
        asked = f"net.py:build net.py:other --data photos --size 16 --views {views} --json"
        code, out, err = leanconv_command(f"evaluate {asked} --workers 0 --device cpu --quiet")
        assert code == 0, err
        assert apart(evaluate_apart, place, asked, processes=2) == [0, 0]
        assert (place / "shown-1").read_text() == ""
        one, two = json.loads(out), json.loads((place / "shown-0").read_text())
        assert two.pop("unreadable") == one.pop("unreadable") == ["dog/0.png"]
        assert two.pop("kl") == pytest.approx(one.pop("kl"), rel=1e-2)  # 2e-5, of numbers in single precision
        assert two == one


def test_too_many_that_no_process_saw_alone(place: Path) -> None:
    for label in ("cat", "dog"):
        (place / "photos" / label / "3.png").write_bytes(b"no picture")
        for number in range(4, 60):
            write_picture(place / "photos" / label / f"{number:02d}.png", 4 * number)
    assert apart(evaluate_apart, place, "net.py:build --data photos --size 16", processes=2) == [2, 2]
    assert "2 of 120 images cannot be read (cat/3.png, dog/3.png), more than 1 %" in (place / "said-0").read_text()


def test_processes_without_a_picture_are_refused(place: Path) -> None:
    asked = "net.py:build --data photos --size 16 --limit 1"
    assert apart(evaluate_apart, place, asked, processes=2) == [2, 2]
    assert "there are 1 images for 2 processes; use fewer processes." in (place / "said-0").read_text()


def test_two_processes_find_what_one_finds_with_detectors(scenes: Path, leanconv_command) -> None:
    asked = "seer.py:build seer.py:blind --data data --limit 11 --json"
    code, out, err = leanconv_command(f"evaluate {asked} --workers 0 --device cpu --quiet")
    assert code == 0, err
    assert apart(evaluate_apart, scenes, asked, processes=2) == [0, 0]
    assert (scenes / "shown-1").read_text() == ""
    assert json.loads((scenes / "shown-0").read_text()) == json.loads(out)


def test_evaluate_takes_val_of_train_and_val(place: Path, leanconv_command) -> None:
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            write_picture(place / "all" / part / label / "1.JPEG")
    code, out, err = leanconv_command(f"evaluate net.py:build --data all {COMMON} --json --quiet")
    assert code == 0, err
    found = json.loads(out)
    assert (found["images"], Path(found["data"]).name) == (2, "val")


def test_evaluate_with_a_list_of_labels(place: Path, leanconv_command) -> None:
    write_picture(place / "flat" / "a.png")
    (place / "val.txt").write_text("1\n")
    code, out, err = leanconv_command(f"evaluate net.py:build --data flat --labels val.txt {COMMON}")
    assert code == 0, err
    assert "of 1 images" in out
    (place / "val.txt").write_text("2\n")
    code, _, err = leanconv_command(f"evaluate net.py:build --data flat --labels val.txt {COMMON}")
    assert code == 2
    assert "class indices must be 0 to 1; found 2: 2" in err


def test_one_bad_picture_is_named_and_left_out(place: Path, leanconv_command) -> None:
    for number in range(110):
        write_picture(place / "many" / ("cat" if number % 2 else "dog") / f"{number}.png")
    (place / "many" / "cat" / "7.png").write_bytes(b"not a png")
    code, out, err = leanconv_command(f"evaluate net.py:build --data many {COMMON} --json --quiet")
    assert code == 0, err
    assert "warning: cannot read cat/7.png" in err
    found = json.loads(out)
    assert (found["images"], found["unreadable"]) == (109, ["cat/7.png"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("net.py:build --data photos --views 5", "--views 5 is not known; use 1 or 10"),
        ("net.py:build --data photos --views 10 --size 16 --resize 8", "give a --resize of 16 or more"),
        ("net.py:build net.py:three --data photos --size 16", "net.py:build has 2 outputs and net.py:three has 3"),
        ("net.py:build net.py:grey --data photos --size 16", "net.py:grey: the model raised RuntimeError"),
        ("net.py:build net.py:build --model net.py:build --data photos", "--model goes with a saved folder"),
        ("net.py:build photos --data photos", "has no leanconv.json"),
        ("net.py:build --data shards/val-{0..3}.tar", "a pattern must name .tar files"),
        ("net.py:build --data photos --labels nowhere.txt", "cannot be read"),
    ],
)
def test_refusals(arguments: str, message: str, place: Path, leanconv_command) -> None:
    with (place / "net.py").open("a") as file:
        file.write("\ndef three():\n    net = build()\n    net[-1] = nn.Linear(24, 3)\n    return net\n")
    code, out, err = leanconv_command(f"evaluate {arguments} --workers 0 --device cpu")
    assert code == 2
    assert message in err
    assert out == ""
    assert sum(line.startswith("leanconv: error:") for line in err.splitlines()) == 1


def test_networks_made_for_different_pictures(place: Path, leanconv_command) -> None:
    for size in (16, 20):
        code, _, err = leanconv_command(
            f"accelerate net.py:build --images photos --speedup 1.5 --samples 200 --out at{size} --quiet --size {size} "
            "--workers 0 --device cpu"
        )
        assert code == 0, err
    both = "evaluate at16 at20 --model net.py:build --data photos --workers 0 --device cpu"
    code, _, err = leanconv_command(both)
    assert code == 2
    assert "at16 and at20 were made for different preprocessing" in err
    code, out, err = leanconv_command(f"{both} --size 18")
    assert code == 0, err
    assert "8 images" in out


def test_half_precision_networks_are_given_their_own() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).bfloat16()
    found = logits_of(network, [torch.randn(2, 3, 2, 2)], "cpu")
    assert found.shape == (2, 4)
    assert found.dtype == torch.float32
