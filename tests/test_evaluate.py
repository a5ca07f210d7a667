"""Evaluating: where labels come from, ten views, and two networks side by side."""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv import LeanconvError
from leanconv.evaluate.classification import answers, averaged, logits_and_labels
from leanconv.evaluate.compare import compare, kl_divergence, paired_interval
from leanconv.evaluate.labels import ClassIndices, class_indices, labelled
from leanconv.images import Preprocess, TenViews, find_pictures, held_out, read_all, stream
from tests.test_cli import COMMON, leanconv_command, place  # noqa: F401
from tests.test_images import SMALL, write_picture


def encoded(size: tuple[int, int] = (30, 24), seed: int = 0, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def pack(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for shard in range(3):
        members = {}
        for number in range(2):
            key = f"{shard}{number}"
            members[f"{key}.jpg"] = encoded(seed=shard, form="JPEG")
            members[f"{key}.cls"] = f"{shard:03}\n".encode()
        pack(tmp_path / "shards" / f"val-{shard:03}.tar", members)
    return tmp_path / "shards"


# Shards.


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [
        ("", "001122"),
        ("val-*.tar", "001122"),
        ("val-{000..001}.tar", "0011"),
        ("val-00{0,2}.tar", "0022"),
        ("val-00{1,2}*.tar", "1122"),
        ("val-002.tar", "22"),
    ],
)
def test_shards_give_the_class_beside_the_picture(pattern: str, labels: str, shards: Path) -> None:
    found = find_pictures(str(shards / pattern) if pattern else shards)
    assert [picture.label for picture in found] == list(labels)
    assert len({picture.name for picture in found}) == len(found)
    assert class_indices(found, None) == {label: int(label) for label in labels}


def test_shards_are_read_in_place_by_workers(shards: Path) -> None:
    found = find_pictures(shards)
    assert found[-1].read() == encoded(seed=2, form="JPEG")
    here, there = read_all(found, SMALL), read_all(found, SMALL, workers=2, batch=2)
    assert torch.equal(torch.cat(here.batches), torch.cat(there.batches))


@pytest.mark.parametrize("key", ["label", "cls", "class"])
def test_json_labels_and_pictures_that_are_none(key: str, tmp_path: Path) -> None:
    members = {
        "a.png": encoded(),
        "a.mask.png": encoded(),
        "a.json": json.dumps({key: 7, "width": 3}).encode(),
        "b.png": encoded(),
        "b.json": json.dumps({key: 1}).encode(),
        "b.cls": b"8",
        "c.d.png": encoded(),
        "c.d.cls": b"9",
    }
    found = find_pictures(pack(tmp_path / "one.tar", members))
    assert {picture.name: picture.label for picture in found} == {"a.png": "7", "b.png": "8", "c.d.png": "9"}


def test_json_that_says_nothing_leaves_class_folders(tmp_path: Path) -> None:
    path = pack(tmp_path / "one.tar", {"cat/a.png": encoded(), "cat/a.json": b'{"width": 3}', "dog/b.png": encoded()})
    assert [picture.label for picture in find_pictures(path)] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("val-{000..003}.tar", r"val-003\.tar, not there or no \.tar file"),
        ("train-*.tar", "matches nothing"),
        ("val-{3..1}.tar", "matches nothing"),
        ("*", "notes.txt, not there or no"),
    ],
)
def test_patterns_that_name_no_shards(pattern: str, message: str, shards: Path) -> None:
    (shards / "notes.txt").write_text("x")
    with pytest.raises(LeanconvError, match=message):
        find_pictures(str(shards / pattern))


@pytest.mark.parametrize("members", [{"a.cls": b" "}, {"a.cls": b"\xff"}, {"a.json": b"{"}])
def test_a_class_that_cannot_be_read_is_named(members: dict[str, bytes], tmp_path: Path) -> None:
    path = pack(tmp_path / "one.tar", {"a.png": encoded(), **members})
    with pytest.raises(LeanconvError, match=f"'{next(iter(members))}' in .* gives no class"):
        find_pictures(path)


# ImageNet's own layout.


def test_upper_case_and_the_folder_of_train_and_val(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for wnid in ("n01440764", "n01443537"):
            (tmp_path / part / wnid).mkdir(parents=True)
            (tmp_path / part / wnid / f"{part}_1.JPEG").write_bytes(encoded(form="JPEG"))
    assert held_out(str(tmp_path)) == str(tmp_path / "val")
    assert held_out(str(tmp_path / "val")) == str(tmp_path / "val")
    found = find_pictures(held_out(str(tmp_path)))
    assert [picture.name for picture in found] == ["n01440764/val_1.JPEG", "n01443537/val_1.JPEG"]
    assert class_indices(found, None) == {"n01440764": 0, "n01443537": 1}
    with pytest.raises(LeanconvError, match="images of train and val together; give the place of val alone"):
        class_indices(find_pictures(tmp_path), None)
    with tarfile.open(tmp_path / "both.tar", "w") as archive:
        archive.add(tmp_path / "train", "imagenet/train")
        archive.add(tmp_path / "val", "imagenet/val")
    with pytest.raises(LeanconvError, match="train and val together"):
        class_indices(find_pictures(tmp_path / "both.tar"), None)


def test_classes_may_be_called_train_and_test(tmp_path: Path) -> None:
    for name in ("train", "test tube"):
        write_picture(tmp_path / "vehicles" / name / "1.png")
    assert class_indices(find_pictures(tmp_path), None) == {"test tube": 0, "train": 1}


def test_shards_of_train_and_val_are_not_mixed(shards: Path) -> None:
    pack(shards / "train" / "train-000.tar", {"x.png": encoded(), "x.cls": b"0"})
    with pytest.raises(LeanconvError, match="train and val together"):
        class_indices(find_pictures(shards), None)
    pack(shards / "train" / "val-000.tar", {"x.png": encoded(), "x.cls": b"0"})
    assert class_indices(find_pictures(str(shards / "train" / "val-*.tar")), None) == {"0": 0}


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    for number in (3, 1, 2):
        write_picture(tmp_path / "val" / f"ILSVRC2012_val_0000000{number}.JPEG")
    return tmp_path / "val"


@pytest.mark.parametrize(
    "text",
    [
        "4\n65\n970\n",
        "4\n\n65\n970",
        "ILSVRC2012_val_00000002.JPEG 65\nILSVRC2012_val_00000001.JPEG 4\nILSVRC2012_val_00000003.JPEG 970\n",
        "ImageId,PredictionString\nILSVRC2012_val_00000001,4 1 2 3 4\nILSVRC2012_val_00000002,65 1 2 3 4 65 5 6 7 8\n"
        "ILSVRC2012_val_00000003,970 1 2 3 4\n",
    ],
)
def test_a_flat_folder_with_a_list_of_labels(text: str, flat: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text(text)
    found = labelled(find_pictures(flat), tmp_path / "val.txt")
    assert [picture.label for picture in found] == ["4", "65", "970"]
    assert class_indices(found, None)["970"] == 970


def test_wnids_in_a_list_count_in_order_of_name(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("n03\nn01\nn02\n")
    found = class_indices(labelled(find_pictures(flat), tmp_path / "val.txt"), None)
    assert found == {"n01": 0, "n02": 1, "n03": 2}
    found.check(3)
    with pytest.raises(LeanconvError, match="3 class names but the network 1000 outputs"):
        found.check(1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4\n65\n", "2 lines for 3 images"),
        ("ILSVRC2012_val_00000001 4\n", "no class for ILSVRC2012_val_00000002.JPEG"),
        (None, "cannot be read"),
    ],
)
def test_lists_that_do_not_fit(text: str | None, message: str, flat: Path, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "val.txt").write_text(text)
    with pytest.raises(LeanconvError, match=message):
        labelled(find_pictures(flat), tmp_path / "val.txt")


def test_one_line_for_two_images_is_refused(tmp_path: Path) -> None:
    write_picture(tmp_path / "p" / "a" / "0.png")
    write_picture(tmp_path / "p" / "b" / "0.png")
    (tmp_path / "val.txt").write_text("0.png 3\n")
    with pytest.raises(LeanconvError, match="one line for several images"):
        labelled(find_pictures(tmp_path / "p"), tmp_path / "val.txt")
    (tmp_path / "val.txt").write_text("a/0.png 3\nb/0.png 4\n")
    assert [picture.label for picture in labelled(find_pictures(tmp_path / "p"), tmp_path / "val.txt")] == ["3", "4"]


# Hugging Face datasets.


def saved_dataset(folder: Path, images: str = "image", labels: str = "label", *, named: bool = True) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    kinds = {
        images: datasets.Image(),
        labels: datasets.ClassLabel(names=["cat", "dog"]),
        "note": datasets.Value("string"),
    }
    if not named:
        kinds |= {images: datasets.Value("binary"), labels: datasets.Value("int64")}
    pictures = [encoded(seed=seed) for seed in range(4)]
    columns = {
        images: [{"bytes": data, "path": None} for data in pictures] if named else pictures,
        labels: [1, 0, 1, -1],
        "note": list("abcd"),
    }
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize(
    ("images", "labels", "named"), [("image", "label", True), ("photo", "kind", True), ("img", "fine_label", False)]
)
def test_saved_datasets(images: str, labels: str, named: bool, tmp_path: Path) -> None:
    found = find_pictures(saved_dataset(tmp_path / "set", images, labels, named=named))
    assert [picture.label for picture in found] == ["1", "0", "1", None]
    assert [picture.read() for picture in found] == [encoded(seed=seed) for seed in range(4)]
    with pytest.raises(LeanconvError, match="1 images lie in no class folder"):
        class_indices(found, None)


def test_workers_read_datasets(tmp_path: Path) -> None:
    found = find_pictures(saved_dataset(tmp_path / "set"))
    here, there = read_all(found, SMALL), read_all(found, SMALL, workers=2, batch=1)
    assert torch.equal(torch.cat(here.batches), torch.cat(there.batches))


def test_splits_must_be_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.load_from_disk(str(saved_dataset(tmp_path / "one")))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(LeanconvError, match=r"has the splits train, test; name one, for example .*both/test"):
        find_pictures(tmp_path / "both")
    assert len(find_pictures(held_out(str(tmp_path / "both")))) == 4
    datasets.DatasetDict({"test": one}).save_to_disk(str(tmp_path / "single"))
    assert len(find_pictures(tmp_path / "single")) == 4


def test_load_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            write_picture(tmp_path / "animals" / part / label / "1.png", 10)
    with pytest.raises(LeanconvError, match=r"splits .*; name one, for example hf:"):
        find_pictures(f"hf:{tmp_path}/animals")
    found = find_pictures(f"hf:{tmp_path}/animals:test")
    assert [picture.label for picture in found] == ["0", "1"]
    assert found[0].read() == (tmp_path / "animals" / "test" / "cat" / "1.png").read_bytes()
    with pytest.raises(LeanconvError, match="could not be loaded"):
        find_pictures(f"hf:{tmp_path}/animals:nonsense")


def test_columns_that_are_not_clear(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"], "label": [1]}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(LeanconvError, match="columns text, label, of which it is not clear which holds the images"):
        find_pictures(tmp_path / "set")


def test_without_the_package_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LeanconvError, match="needs: pip install datasets"):
        find_pictures("hf:uoft-cs/cifar10:test")


# Ten views.


PRESETS = {
    "own": SMALL,
    "grey": Preprocess(size=16, resize=20, channels=1),
    "preset": Preprocess(transform=torchvision.models.get_weight("EfficientNet_B0_Weights.DEFAULT").transforms()),
}


@pytest.mark.parametrize("prepare", PRESETS.values(), ids=list(PRESETS))
def test_the_fifth_view_is_the_single_one_and_the_last_five_are_mirrored(prepare: Preprocess) -> None:
    data = encoded((60, 40))
    views, single = TenViews(prepare)(data), prepare(data)
    assert views.shape == (10, *single.shape)
    assert torch.allclose(views[4], single, atol=1e-6)
    assert torch.equal(views[5:], views[:5].flip(-1))


def test_the_first_four_views_are_the_corners() -> None:
    prepare = Preprocess(size=16, resize=24, mean=(0.0,) * 3, std=(1.0,) * 3)
    data = encoded((36, 24))
    with Image.open(io.BytesIO(data)) as picture:
        whole = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255
    views = TenViews(prepare)(data)
    corners = [
        whole[:, rows, columns] for rows in (slice(0, 16), slice(8, 24)) for columns in (slice(0, 16), slice(20, 36))
    ]
    assert torch.allclose(views[:4], torch.stack(corners))


def test_ten_views_that_cannot_be() -> None:
    with pytest.raises(LeanconvError, match="give a --resize of 16 or more"):
        TenViews(Preprocess(size=16, resize=12))
    with pytest.raises(LeanconvError, match="ten views need sizes"):
        TenViews(Preprocess(transform=lambda picture: torch.zeros(3, 4, 4)))


class Shape(nn.Module):
    """A classifier that remembers how many images it is given at a time."""

    def __init__(self, classes: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3 * 16 * 16, classes)
        self.scale = scale
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.scale * self.layer(x.flatten(1))


def test_probabilities_are_averaged_over_views(shards: Path) -> None:
    found, model = find_pictures(shards), Shape()
    classes = ClassIndices({"0": 0, "1": 1, "2": 2})
    ten = TenViews(SMALL)
    (logits,), labels = answers([("net", model)], stream(found, ten, batch=3), classes, "cpu", at_once=8)
    assert max(model.seen) == 8  # 30 views of three pictures, never all at once
    expected = torch.stack([model(ten(picture.read())).softmax(1).mean(0) for picture in found])
    assert torch.allclose(logits.softmax(1), expected, atol=1e-6)
    assert torch.allclose(logits.exp(), expected, atol=1e-6)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    same = torch.randn(4, 7).repeat_interleave(10, dim=0)
    assert torch.allclose(averaged(same, 10), same[::10].log_softmax(1), atol=1e-6)


# Two networks.


def test_networks_see_the_same_batches_decoded_once(shards: Path) -> None:
    decoded = []

    def prepare(data: bytes) -> Tensor:
        decoded.append(len(data))
        return SMALL(data)

    pictures, classes = find_pictures(shards), ClassIndices({"0": 0, "1": 1, "2": 2})
    models = [("a", Shape()), ("b", Shape(scale=2.0))]
    (a, b), labels = answers(models, stream(pictures, prepare, batch=4), classes, "cpu")
    assert len(decoded) == len(pictures)
    assert torch.allclose(2 * a, b, atol=1e-5)
    alone, same_labels = logits_and_labels(Shape(), stream(pictures, SMALL, batch=6), classes, "cpu")
    assert torch.allclose(alone, a, atol=1e-5)
    assert torch.equal(labels, same_labels)
    with pytest.raises(LeanconvError, match="a has 3 outputs and b has 4 outputs"):
        answers([("a", Shape()), ("b", Shape(4))], stream(pictures, SMALL), classes, "cpu")
    with pytest.raises(LeanconvError, match="b answers NaN or infinity on"):
        answers([("a", Shape()), ("b", Shape(scale=math.nan))], stream(pictures, SMALL), classes, "cpu")
    with pytest.raises(LeanconvError, match="b: the model raised RuntimeError"):
        answers([("a", Shape()), ("b", nn.Conv2d(1, 1, 1))], stream(pictures, SMALL), classes, "cpu")


def draw(generator: np.random.Generator, images: int, lost: float, gained: float) -> tuple[Tensor, Tensor]:
    """Correctness of two networks: the second loses some of the first's right answers and gains others."""
    kind = generator.choice(4, images, p=[lost, gained, 0.5, 0.5 - lost - gained])
    return torch.from_numpy((kind == 0) | (kind == 2)), torch.from_numpy((kind == 1) | (kind == 2))


@pytest.mark.parametrize(("lost", "gained"), [(0.1, 0.1), (0.15, 0.05)])
def test_the_interval_covers_the_truth_as_often_as_it_says(lost: float, gained: float) -> None:
    generator = np.random.default_rng(0)
    for level in (0.8, 0.95):
        intervals = [
            paired_interval(*draw(generator, 500, lost, gained), level=level, resamples=1000, seed=seed)
            for seed in range(600)
        ]
        covered = np.mean([low <= lost - gained <= high for _, low, high in intervals])
        assert abs(covered - level) < 3.5 * math.sqrt(level * (1 - level) / 600)


def test_the_interval_is_that_of_resampled_images() -> None:
    generator = np.random.default_rng(1)
    a, b = draw(generator, 300, 0.15, 0.05)
    difference = a.long() - b.long()
    means = difference[torch.from_numpy(generator.integers(0, 300, (20_000, 300)))].double().mean(dim=1)
    mean, low, high = paired_interval(a, b, resamples=20_000)
    assert mean == difference.double().mean().item()
    assert (low, high) == pytest.approx(means.quantile(torch.tensor([0.025, 0.975]).double()).tolist(), abs=1 / 300)


def test_the_interval_turns_round_with_the_networks() -> None:
    a, b = draw(np.random.default_rng(2), 400, 0.15, 0.05)
    there, back = paired_interval(a, b), paired_interval(b, a)
    assert there[0] == -back[0] > 0
    assert there[1:] == pytest.approx([-back[2], -back[1]], abs=1 / 400)
    assert paired_interval(a, b) == there
    assert paired_interval(a, a) == (0.0, 0.0, 0.0)


def test_kl_divergence_is_torchs() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(5000, 7), 3 * torch.randn(5000, 7)
    expected = F.kl_div(q.log_softmax(1), p.log_softmax(1), reduction="batchmean", log_target=True)
    assert kl_divergence(q, p) == pytest.approx(expected.item(), rel=1e-5)
    assert kl_divergence(p, p) == 0.0
    assert kl_divergence(p + 5, p) == pytest.approx(0.0, abs=1e-12)
    assert kl_divergence(q, p) != pytest.approx(kl_divergence(p, q), rel=0.01)


def test_comparison_by_hand() -> None:
    reference = torch.eye(8)[[0, 1, 2, 3]]
    other = torch.eye(8)[[0, 1, 7, 7]] + 0.5 * torch.eye(8)[[1, 2, 2, 3]]
    found = compare(reference, other, torch.arange(4), original="big", other="small")
    assert (found.top1.original, found.top1.other, found.top1.increase) == (1.0, 0.5, 0.5)
    assert found.top1.low <= 0.5 <= found.top1.high
    assert (found.top5.increase, found.top5.low, found.top5.high, found.top5.within_noise) == (0.0, 0.0, 0.0, True)
    assert found.agreement == 0.5
    assert found.kl > 0
    text = str(found)
    assert "KL(big || small)" in text
    assert "+50.00" in text
    assert "+0.00 to +0.00" in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["top1"]["increase"] == 0.5
    assert data["top5"]["within_noise"] is True
    assert data["original"] == "big"


def test_a_plain_loss_is_more_than_noise() -> None:
    labels = torch.zeros(200).long()
    right, wrong = torch.tensor([1.0, 0]).expand(200, 2), torch.tensor([0.0, 1]).expand(200, 2)
    half = torch.cat([right[:100], wrong[:100]])
    found = compare(right, half, labels, original="a", other="b")
    assert not found.top1.within_noise
    assert 0.4 < found.top1.low < 0.5 < found.top1.high < 0.6
    assert found.top5.increase == 0.0  # two classes are always among the first five
