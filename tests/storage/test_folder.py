"""Saved folders: bit-equal when they load, a sentence when they cannot, never half-written."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.network.source import Source, identify
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images


@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_load_is_bit_equal(scheme: str, tmp_path: Path, pictures: Tensor) -> None:
    result = leanconv.accelerate(plain_network(), pictures, 2.0, scheme=scheme, samples=500, progress=False)
    result.save(tmp_path / "saved")
    original = plain_network()
    before = copy.deepcopy(original.state_dict())
    again = leanconv.load(tmp_path / "saved", model=original)
    assert not again.training
    assert torch.equal(again(pictures), result.model(pictures))
    assert all(torch.equal(value, before[key]) for key, value in original.state_dict().items())


def test_everything_known_comes_back(result: leanconv.Accelerated, folder: Path) -> None:
    again = leanconv.load_result(folder, plain_network())
    assert again.to_json() == result.to_json()
    assert str(again) == str(result)
    assert again.layers == result.layers
    assert again.changes == result.changes


def test_only_three_plain_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["leanconv.json", "model.safetensors", "spectra.json"]
    assert json.loads((folder / "leanconv.json").read_text())["version"] == 1
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_half_precision_comes_back_as_saved(tmp_path: Path, pictures: Tensor) -> None:
    result = leanconv.accelerate(plain_network().bfloat16(), pictures.bfloat16(), 2.0, samples=500, progress=False)
    result.save(tmp_path / "saved")
    again = leanconv.load(tmp_path / "saved", model=plain_network())
    assert torch.equal(again(pictures.bfloat16()), result.model(pictures.bfloat16()))


def test_torchvision_networks_are_rebuilt_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1(num_classes=7).eval()
    images = smooth_images(4, size=64)
    result = leanconv.accelerate(model, images, 1.3, scheme="channel", samples=500, progress=False)
    assert result.source == Source(library="torchvision", name="squeezenet1_1", classes=7)
    result.save(tmp_path / "saved")
    rng = torch.get_rng_state()
    assert torch.equal(leanconv.load(tmp_path / "saved")(images), result.model(images))
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_changed_torchvision_network_is_not_taken_for_the_usual_one() -> None:
    with torch.device("meta"):
        model = torchvision.models.vgg11()
        assert identify(model).name == "vgg11"
        assert identify(torchvision.models.vgg11_bn(num_classes=3)) == Source(
            library="torchvision", name="vgg11_bn", classes=3
        )
        model.features[1] = nn.LeakyReLU()
        assert identify(model).library == "other"
        other = torchvision.models.resnet18()
        other.layer1[0].stride = 7  # an attribute that has no shape
        assert identify(other).library == "other"


def test_a_network_leanconv_cannot_build_says_what_to_do(folder: Path) -> None:
    with pytest.raises(LeanconvError, match=r"cannot build by name.*leanconv.load\(folder, model="):
        leanconv.load(folder)


def test_a_different_network_is_refused(folder: Path) -> None:
    with pytest.raises(LeanconvError, match="same architecture"):
        leanconv.load(folder, model=plain_network((16, 24, 32, 40)))
    with pytest.raises(LeanconvError, match="has no layer"):
        leanconv.load(folder, model=nn.Sequential(nn.Linear(3, 3)))


def test_an_existing_folder_is_refused_and_kept(result: leanconv.Accelerated, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(LeanconvError, match="exists already"):
        result.save(tmp_path / "there")
    assert (tmp_path / "there" / "file").read_text() == "mine"


def damage_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_missing_json(folder: Path) -> None:
    (folder / "leanconv.json").unlink()


def damage_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_flipped_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def damage_truncated_json(folder: Path) -> None:
    path = folder / "leanconv.json"
    path.write_text(path.read_text()[:200])


def damage_edited_json(folder: Path) -> None:
    path = folder / "leanconv.json"
    data = json.loads(path.read_text())
    data["layers"][0]["macs_after"] = 1
    path.write_text(json.dumps(data))


def damage_other_version(folder: Path) -> None:
    path = folder / "leanconv.json"
    data = json.loads(path.read_text())
    data["version"] = 99
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing_weights, "has no model.safetensors"),
        (damage_missing_json, "has no leanconv.json"),
        (damage_truncated_weights, "truncated"),
        (damage_flipped_weight, "checksum differs"),
        (damage_truncated_json, "is damaged"),
        (damage_edited_json, "was changed after it was saved"),
        (damage_other_version, "has version 99, this leanconv reads 1"),
    ],
)
def test_damage_is_named(damage, message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(LeanconvError, match=message) as caught:
        leanconv.load(folder, model=plain_network())
    assert str(folder) in str(caught.value)


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match="is not a folder"):
        leanconv.load(tmp_path / "nothing")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leanconv.storage.folder.flush", full)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_nothing_behind(result: leanconv.Accelerated, tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match="No space left on device"):
        result.save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_modules_with_versions_load_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.mnasnet0_5(num_classes=4).eval()
    images = smooth_images(4, size=64)
    result = leanconv.accelerate(model, images, 1.2, scheme="channel", samples=200, progress=False)
    result.save(tmp_path / "saved")
    assert torch.equal(leanconv.load(tmp_path / "saved")(images), result.model(images))


def test_what_trained_weights_set_is_remembered() -> None:
    with torch.device("meta"):
        inception = torchvision.models.inception_v3(init_weights=False, transform_input=True)
        googlenet = torchvision.models.googlenet(init_weights=False, transform_input=True, aux_logits=False)
    assert identify(inception).flags == (("transform_input", True),)
    assert identify(googlenet).flags == (("aux_logits", False), ("transform_input", True))
    again = Source.from_json(json.loads(json.dumps(identify(googlenet).to_json())))
    assert again == identify(googlenet)


def test_only_leftovers_of_ours_are_removed(result: leanconv.Accelerated, tmp_path: Path) -> None:
    (tmp_path / ".saved.999999.part").mkdir()
    same_number = tmp_path / f".saved.{os.getpid()}-{'0' * 32}.leanconv-part"
    same_number.mkdir()
    result.save(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".saved.999999.part", "saved"]


def test_a_killed_save_is_cleaned_up_by_the_next(result: leanconv.Accelerated, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import time, leanconv, leanconv.storage.folder as storage
        from tests.support.networks import plain_network
        from tests.support.pictures import smooth_images
        result = leanconv.accelerate(plain_network(), smooth_images(), 2.0, samples=100, progress=False)
        storage.flush = lambda path: time.sleep(60)
        print("saving", flush=True)
        result.save({str(tmp_path / "saved")!r})
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert child.stdout is not None
    child.stdout.readline()
    for _ in range(200):
        if any(tmp_path.iterdir()):
            break
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "saved").exists()
    assert len(list(tmp_path.iterdir())) == 1
    result.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.usefixtures("full_disk")
def test_a_failed_save_removes_the_parents_it_made(result: leanconv.Accelerated, tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match="nothing was left behind"):
        result.save(tmp_path / "new" / "deep" / "saved")
    assert list(tmp_path.iterdir()) == []


def test_options_come_back_equal(folder: Path, result: leanconv.Accelerated) -> None:
    assert leanconv.load_result(folder, plain_network()).options == result.options


def test_networks_with_hooks_of_their_own_are_not_rebuilt_by_name() -> None:
    model = torchvision.models.squeezenet1_1(num_classes=3)
    model.register_forward_hook(lambda module, args, output: output * 10)
    assert identify(model).library == "other"


def test_load_wants_a_network(folder: Path) -> None:
    with pytest.raises(LeanconvError, match="model is a str"):
        leanconv.load(folder, model="vgg16")  # type: ignore[arg-type]
