"""A world in small, in which what the guide prints can be run as printed: offline, in seconds.

The names the guide uses mean small things here. ``vgg16`` has VGG-16's layers by name with an eighth of their filters,
``photos/`` and ``imagenet/`` hold a few pictures, ``vgg16-4x`` is a saved folder. Trainings, samples and timings are
cut short; otherwise the real code runs with the options as they are printed.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn
from torchvision.models import _api as registry
from torchvision.models.vgg import VGG, make_layers

import leanconv
import leanconv.cli.common
import leanconv.ranks.latency.selector
import leanconv.runtimes.bench.comparison
import leanconv.runtimes.export.program
import leanconv.train.finetune
from benchmarks.common.initialise import initialise
from benchmarks.detection.networks import faster_rcnn_vgg16
from benchmarks.peers import cp
from leanconv import api as _accelerate
from leanconv import demo
from leanconv.network import source
from leanconv.ranks.latency.selector import LatencyBudget
from leanconv.runtimes.export.formats import Written
from tests.support.pictures import encoded, pack
from tests.support.scenes import write_coco, write_shard, write_voc

NETWORK = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, stride=4), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 2),
    )
"""
DETECTOR = """
from tests.support.small_world import small_detector

def build():
    return small_detector(num_classes=3)
"""


IMAGES = 80


def small_vgg16(*, weights: Any = None, num_classes: int = 1000) -> nn.Module:
    """Thirteen convolutions at VGG-16's paths, and one Linear layer."""
    network = VGG.__new__(VGG)
    nn.Module.__init__(network)
    widths: list[int | str] = []
    for width, count in ((8, 2), (16, 2), (32, 3), (32, 3), (32, 3)):
        widths += [*(count * [width]), "M"]
    torch.manual_seed(0)
    network.features = make_layers(widths)  # type: ignore[arg-type]
    network.avgpool = nn.AdaptiveAvgPool2d((7, 7))
    network.classifier = nn.Sequential(nn.Linear(32 * 49, num_classes))
    return initialise(network)


def small_detector(*, weights: Any = None, weights_backbone: Any = None, num_classes: int = 91) -> nn.Module:
    """Faster R-CNN on four convolutions."""
    layers: list[nn.Module] = []
    for inputs, outputs in [(3, 8), (8, 48), (48, 64), (64, 64)]:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    features = initialise(nn.Sequential(*layers))
    torch.manual_seed(0)
    return faster_rcnn_vgg16(num_classes, features=features, width=24, dropout=0.0, min_size=64, max_size=96)


def small_resnet50(*, weights: Any = None, num_classes: int = 1000) -> nn.Module:
    return _RESNET18(weights=None, num_classes=num_classes)


_RESNET18, _TEACH = torchvision.models.resnet18, demo.teach
SMALL: dict[str, Callable[..., nn.Module]] = {
    "vgg16": small_vgg16,
    "resnet50": small_resnet50,
    "fasterrcnn_resnet50_fpn": small_detector,
    "ssd300_vgg16": small_detector,
}


def cut(function: Callable[..., Any], **most: Any) -> Callable[..., Any]:
    """``function`` with these arguments at most so large, each number of a list too, and with a few images only."""

    @functools.wraps(function)
    def short(*given: Any, **named: Any) -> Any:
        for name, limit in most.items():
            value = named.get(name, inspect.signature(function).parameters[name].default)
            if isinstance(value, list | tuple):
                named[name] = [min(number, limit) for number in value]
            else:
                named[name] = limit if value is None else min(value, limit)
        return function(*map(fewer, given), **named)

    return short


def fewer(given: Any) -> Any:
    """A few of many images, and of their labels."""
    if isinstance(given, tuple):
        return tuple(map(fewer, given))
    return given[:IMAGES] if isinstance(given, torch.Tensor) else given


def once(write: Callable[..., Written]) -> Callable[..., Written]:
    """``write`` for the first network of a shape; its file for every other one of that shape."""

    @functools.wraps(write)
    def again(model: nn.Module, example: torch.Tensor, path: Path | str, **options: Any) -> Written:
        path = Path(path)
        given = inspect.signature(write).bind(model, example, path, **options)
        given.apply_defaults()
        shapes = [(name, tuple(value.shape)) for name, value in [*model.state_dict().items(), ("", example)]]
        key = repr([write.__name__, shapes, path.suffix, list(given.arguments.values())[3:]])
        if key not in WRITTEN:
            WRITTEN[key] = write(model, example, path, **options), path.read_bytes()
        path.write_bytes(WRITTEN[key][1])
        return replace(WRITTEN[key][0], path=path)

    return again


WRITTEN: dict[str, tuple[Written, bytes]] = {}


@contextmanager
def small_world() -> Iterator[None]:
    """Names mean small things, and what takes long is cut short."""
    with pytest.MonkeyPatch.context() as patch:
        for name, builder in SMALL.items():
            # The signature tells torchvision which weights a builder takes.
            patch.setitem(registry.BUILTIN_MODELS, name, functools.wraps(registry.BUILTIN_MODELS[name])(builder))
        patch.setattr(torchvision.models, "vgg16", registry.BUILTIN_MODELS["vgg16"])
        source._built.cache_clear()
        for place in (leanconv, _accelerate):
            patch.setattr(place, "accelerate", cut(_accelerate.accelerate, samples=1000))
        for place in (leanconv, leanconv.train.finetune):
            patch.setattr(place, "finetune", cut(leanconv.train.finetune.finetune, epochs=2))
        patch.setattr(leanconv, "bench", cut(leanconv.runtimes.bench.comparison.bench, seconds=0.02, batches=2))
        patch.setattr(leanconv, "export", once(leanconv.runtimes.export.program.export))
        patch.setattr(cp, "cp", cut(cp.cp, iterations=2))
        # Networks as small as these can hardly be had in less time.
        patch.setattr(
            leanconv.ranks.latency.selector, "LatencyBudget", lambda **_: LatencyBudget(speedup=1.05, latency=None)
        )
        patch.setattr(leanconv.cli.common, "pick_workers", lambda asked: 0)
        patch.setattr(demo, "teach", _taught)
        patch.setattr(demo, "train", _trained)
        patch.setattr(demo, "SPEEDUPS", (4.0,))
        patch.setattr(demo, "TRAINING", 1600)
        patch.setattr(demo, "CALIBRATION", 100)
        patch.setattr(demo, "WAYS", {name: demo.WAYS[name] for name in ("Jaderberg", demo.DEFAULT)})
        # The reader's own files: another test may have had one of the same name.
        own, paths = ("net", "probe", "detector", "prepare"), list(sys.path)
        for name in own:
            patch.delitem(sys.modules, name, raising=False)
        try:
            yield
        finally:
            sys.path[:] = paths
            for name in own:
                sys.modules.pop(name, None)
            source._built.cache_clear()


@functools.lru_cache(maxsize=1)
def _digits_network() -> demo.DigitsNet:
    pictures, labels = demo.digits()
    torch.manual_seed(0)
    network = demo.DigitsNet()
    _taught(network, pictures, labels)
    return network


def _taught(model: nn.Module, pictures: Any, labels: Any, *, epochs: int = 1, step: Any = None) -> None:
    """``demo.teach`` with a few pictures, once."""
    _TEACH(model, pictures[:200], labels[:200], epochs=1)


def _trained(pictures: Any, labels: Any, *, epochs: int, step: Any = None) -> demo.DigitsNet:
    """``demo.train`` once a process; nobody modifies a network that was given to leanconv."""
    return _digits_network()


def command(words: list[str]) -> None:
    """``leanconv WORDS`` in this process; any exit but 0 is an error."""
    from leanconv.cli.main import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["leanconv", *words])
        with pytest.raises(SystemExit) as ended:
            run()
    assert not ended.value.code, f"leanconv {' '.join(words)} ended with {ended.value.code}"


def write_files(folder: Path) -> None:
    """Pictures, labels and networks under the names the guide gives them."""
    pictures = {f"{number}.jpg": encoded((64, 48), seed=number, form="JPEG") for number in range(8)}
    halves = {name: number % 2 for number, name in enumerate(pictures)}
    files = {f"{root}/{name}": data for root in ("photos", "ILSVRC2012_img_val") for name, data in pictures.items()}
    files |= {
        f"imagenet/{split}/{halves[name]}/{name}": data for split in ("train", "val") for name, data in pictures.items()
    }
    files["street.jpg"] = pictures["0.jpg"]
    files["val.txt"] = "".join(f"{half}\n" for half in halves.values()).encode()
    files["classes.json"] = json.dumps({"cat": 0, "dog": 1}).encode()
    files |= {"net.py": NETWORK.encode(), "probe.py": NETWORK.encode(), "detector.py": DETECTOR.encode()}
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    by_class = {f"{['cat', 'dog'][halves[name]]}/{name}": data for name, data in pictures.items()}
    for name in ("val.tar", "calib.tar"):
        pack(folder / name, by_class)
    for number in range(4):
        pack(folder / f"val-{number:03}.tar", {"a.jpg": pictures["0.jpg"], "a.cls": b"1"})
    (folder / "shards").mkdir()
    write_shard(folder / "shards")
    write_voc(folder / "VOCdevkit")
    for name in ("val2017", "annotations"):
        (folder / name).mkdir()
    shutil.move(write_coco(folder / "val2017"), folder / "annotations" / "instances_val2017.json")
    namespace: dict[str, Any] = {}
    exec(NETWORK, namespace)
    for name in ("net", "probe"):
        safetensors.torch.save_file(namespace["build"]().state_dict(), folder / f"{name}.safetensors")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything the guide talks of, saved folders too, made once a process."""
    folder = tmp_path_factory.mktemp("world")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch, small_world():
        patch.chdir(folder)
        common = ["--images", "photos", "--quiet"]
        for network, speedup in (("vgg16", 3), ("vgg16", 4), ("vgg16", 5), ("net.py:build", 3), ("probe.py:build", 3)):
            out = f"{network.removesuffix('.py:build')}-{speedup}x"
            command(["accelerate", network, "--speedup", str(speedup), "--solver", "linear", "--out", out, *common])
        command(["accelerate", "detector.py:build", "--part", "backbone", "--out", "detector-4x", *common])
    return folder


@pytest.fixture
def world(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, which is the current folder."""
    place = tmp_path / "here"
    shutil.copytree(template, place)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with small_world():
        yield place


NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
TOO_FEW = "layers would gain from more samples"
VERDICTS = ("training made the network no better", "the weights of step")
FORM = re.compile(r"\b(channel|spatial|3d|tucker2)\b(?= +[\d#(])|\b\d+ x \d+\b(?=  )")


def shape_of(text: str) -> list[str]:
    """The distinct lines of ``text`` with numbers, rules and widths left out: those depend on the machine. So does
    which form a layer takes. And without what depends on the small world: whether samples are too few, and what
    training a network gained that loses nothing."""
    kept = (line for line in text.splitlines() if not any(words in line for words in (TOO_FEW, *VERDICTS)))
    lines = (" ".join(NUMBER.sub("#", FORM.sub("form", line)).split()) for line in kept)
    return list(dict.fromkeys(line for line in lines if line and not set(line) <= set("- ")))
