"""The networks leanconv ships: their shapes and costs, and building them by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import leanconv
from leanconv import LeanconvError, models
from leanconv.cli.main import run
from leanconv.network.source import Source, build, identify
from leanconv.network.survey import survey
from leanconv.pipeline.inspection import inspect_network
from tests.support.pictures import smooth_images, write_picture


@pytest.fixture(scope="module")
def spp10() -> nn.Module:
    with torch.random.fork_rng():
        return models.spp10().eval()


def test_spp10_costs_what_the_paper_says(spp10: nn.Module) -> None:
    survey = inspect_network(spp10, None, shape=(1, 3, 224, 224)).survey
    assert [layer.out_size for layer in survey.layers] == [(109, 109), (35, 35), *[(18, 18)] * 5]
    shares = [100 * layer.macs / survey.macs for layer in survey.layers]
    assert shares == pytest.approx([3.8, 17.3, 8.8, 17.5, 17.5, 17.5, 17.5], abs=0.05)
    assert not survey.skipped


@pytest.mark.parametrize("size", [180, 256])
def test_spp10_takes_other_sizes(spp10: nn.Module, size: int) -> None:
    with torch.no_grad():
        answers = spp10(torch.rand(2, 3, size, size - 20))
    assert answers.shape == (2, 1000)
    assert answers.isfinite().all()


def test_spatial_pyramid_is_the_maximum_of_every_cell() -> None:
    maps = torch.randn(2, 3, 18, 12)
    pooled = models.SpatialPyramidPool((3, 1))(maps)
    assert pooled.shape == (2, 3 * (9 + 1))
    cells = maps.reshape(2, 3, 3, 6, 3, 4).amax(dim=(3, 5))
    assert torch.equal(pooled[:, :27], cells.flatten(1))
    assert torch.equal(pooled[:, 27:], maps.amax(dim=(2, 3)))


SHAPES = [
    ("alexnet", 1000, (3, 64, 64), 5),
    ("vgg16_cifar", 10, (3, 32, 32), 13),
    ("resnet20_cifar", 10, (3, 32, 32), 19 + 2),  # and two on shortcuts
    ("resnet56_cifar", 10, (3, 32, 32), 55 + 2),
    ("character_cnn", 36, (1, 24, 24), 4),
]


@pytest.mark.parametrize(("name", "classes", "shape", "convolutions"), SHAPES)
def test_networks_answer_with_their_classes(name: str, classes: int, shape: tuple[int, ...], convolutions: int) -> None:
    builder = getattr(models, name)
    for given, expected in [({}, classes), ({"num_classes": 7}, 7)]:
        network = builder(**given).eval()
        with torch.no_grad():
            assert network(torch.rand(2, *shape)).shape == (2, expected)
        assert sum(isinstance(module, nn.Conv2d) for module in network.modules()) == convolutions
    with pytest.raises(LeanconvError, match="num_classes=0 must be a whole number"):
        builder(num_classes=0)


def test_vgg16_cifar_has_the_widths_of_vgg16() -> None:
    network = models.vgg16_cifar()
    widths = [module.out_channels for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert widths == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert sum(isinstance(module, nn.BatchNorm2d) for module in network.modules()) == 13
    assert sum(isinstance(module, nn.MaxPool2d) for module in network.modules()) == 5
    assert [module.in_features for module in network.modules() if isinstance(module, nn.Linear)] == [512]


def test_resnet20_cifar_is_that_of_its_paper() -> None:
    """0.27 million parameters, 41 million multiply-accumulates; the 1 x 1 shortcuts add about 1 % to both."""
    network = models.resnet20_cifar().eval()
    assert 0.27e6 < sum(parameter.numel() for parameter in network.parameters()) < 0.277e6
    assert 40.5e6 < survey(network, torch.rand(1, 3, 32, 32)).macs < 41.2e6


# -- by name -----------------------------------------------------------------------------------------------------------


def test_networks_are_recognised(spp10: nn.Module) -> None:
    assert identify(spp10) == Source(library="leanconv", name="spp10")
    assert identify(models.character_cnn(10)) == Source(library="leanconv", name="character_cnn", classes=10)
    assert identify(models.vgg16_cifar()) == Source(library="leanconv", name="vgg16_cifar")
    assert identify(models.resnet20_cifar(7)) == Source(library="leanconv", name="resnet20_cifar", classes=7)
    assert identify(models.alexnet(5)) == Source(library="torchvision", name="alexnet", classes=5)
    changed = models.character_cnn()
    changed[1] = nn.GELU()
    assert identify(changed).library == "other"
    with pytest.raises(LeanconvError, match=r"MODEL names the leanconv model 'spp1', .* did you mean spp10"):
        build(Source(library="leanconv", name="spp1"))


@pytest.mark.parametrize("name", ["character_cnn", "vgg16_cifar"])
def test_saved_networks_load_by_name(name: str, tmp_path: Path) -> None:
    size, channels, layer = {"character_cnn": (24, 1, "2"), "vgg16_cifar": (32, 3, "features.24")}[name]
    images = smooth_images(2, size, channels)
    with torch.random.fork_rng():
        model = getattr(models, name)(num_classes=5).eval()
    result = leanconv.accelerate(model, images, scheme="spatial", ranks={layer: 16}, samples=200, progress=False)
    result.save(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(leanconv.load(tmp_path / "saved")(images), result.model(images))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path):
    monkeypatch.chdir(tmp_path)

    def call(arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leanconv", *arguments.split()])
        with pytest.raises(SystemExit) as caught:
            run()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


def test_the_command_line_builds_them(command, tmp_path: Path) -> None:
    code, out, err = command("inspect leanconv:character_cnn --size 24 --channels 1 --device cpu --json")
    assert code == 0, err
    assert [layer["out_size"] for layer in json.loads(out)["layers"]] == [[16, 16], [8, 8], [1, 1], [1, 1]]

    torch.save(models.character_cnn(2).state_dict(), tmp_path / "read.pth")
    for number in range(4):
        write_picture(tmp_path / "photos" / "ab"[number % 2] / f"{number}.png", 30 + 60 * number)
    given = "leanconv:character_cnn --num-classes 2 --size 24 --channels 1 --workers 0 --device cpu"
    code, _, err = command(
        f"accelerate {given} --weights read.pth --images photos --speedup 2 --scheme spatial --samples 200 --out fast"
    )
    assert code == 0, err
    code, out, err = command("evaluate fast --data photos --workers 0 --device cpu")
    assert code == 0, err
    assert "of 4 images" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("leanconv:character_cnn", "has no trained weights by name; give --weights FILE, or --weights none for random"),
        ("leanconv:character_cnn --weights read.pth", "'read.pth' is no file; give --weights FILE"),
        ("leanconv:caracter_cnn", "did you mean character_cnn"),
    ],
)
def test_bad_names_end_in_one_sentence(command, tmp_path: Path, arguments: str, sentence: str) -> None:
    write_picture(tmp_path / "photos" / "a.png", 30)
    code, _, err = command(f"accelerate {arguments} --images photos --out fast --workers 0 --device cpu")
    assert code == 2
    assert sentence in " ".join(err.split())
    assert not (tmp_path / "fast").exists()
