"""Folders and tar files of pictures."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from leanconv import LeanconvError
from leanconv.evaluation.class_names import class_indices
from leanconv.evaluation.classification import accuracy, agreement
from leanconv.images import Pictures, Preprocess, find_pictures
from leanconv.images.loading import spread
from tests.support.pictures import SMALL, write_picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        for number in range(3):
            write_picture(tmp_path / "photos" / label / f"{number}.jpg", 40 * number)
    (tmp_path / "photos" / "cat" / "notes.txt").write_text("not a picture")
    (tmp_path / "photos" / "cat" / "._0.jpg").write_bytes(b"rubbish of another system")
    return tmp_path / "photos"


def test_folder_and_tar_give_the_same(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(folder, "photos")
    a, b = find_pictures(folder), find_pictures(tmp_path / "photos.tar")
    assert [(p.label, Path(p.name).name) for p in a] == [(p.label, Path(p.name).name) for p in b]
    assert [p.label for p in a] == ["cat"] * 3 + ["dog"] * 3
    left, right = list(Pictures(a, SMALL)), list(Pictures(b, SMALL, workers=2, batch=4))
    assert torch.equal(torch.cat(left), torch.cat(right))
    assert left[0].shape == (6, 3, 16, 16)


def test_preprocessing_is_the_usual_one(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 30), (255, 0, 127)).save(buffer, "PNG")
    tensor = Preprocess()(buffer.getvalue())
    assert tensor.shape == (3, 224, 224)
    assert tensor[:, 0, 0].tolist() == pytest.approx(
        [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (127 / 255 - 0.406) / 0.225], abs=1e-5
    )
    grey = Preprocess(channels=1, size=8, resize=8)(buffer.getvalue())
    assert grey.shape == (1, 8, 8)
    assert Preprocess.from_json(SMALL.to_json()) == SMALL


def test_flat_folders_have_no_labels(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    (picture,) = find_pictures(tmp_path)
    assert picture.label is None
    with pytest.raises(LeanconvError, match="in no class folder"):
        class_indices([picture], None)


def test_one_bad_picture_in_many_is_named_and_left_out(tmp_path: Path, capsys) -> None:
    for number in range(120):
        write_picture(tmp_path / f"{number:03}.png")
    whole = (tmp_path / "007.png").read_bytes()
    (tmp_path / "007.png").write_bytes(whole[: len(whole) // 2])
    read = Pictures(find_pictures(tmp_path), SMALL)
    batches = list(read)
    assert read.unreadable == ["007.png"]
    assert sum(map(len, batches)) == 119
    assert "warning: cannot read 007.png" in capsys.readouterr().err


def test_what_is_no_picture_is_said_without_a_place_in_memory(tmp_path: Path, capsys) -> None:
    for number in range(120):
        write_picture(tmp_path / f"{number:03}.png")
    (tmp_path / "007.png").write_bytes(b"some text")
    list(Pictures(find_pictures(tmp_path), SMALL))
    said = capsys.readouterr().err
    assert "cannot read 007.png (UnidentifiedImageError: it is no picture in a known format); it is left out." in said


def test_many_bad_pictures_are_refused(folder: Path) -> None:
    (folder / "dog" / "0.jpg").write_bytes(b"")
    with pytest.raises(LeanconvError, match=r"1 of 6 images cannot be read \(dog/0.jpg\), more than 1 %"):
        list(Pictures(find_pictures(folder), SMALL))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nothing", "does not exist"),
        (lambda p: p, "no images in"),
        (lambda p: (p / "x.txt", (p / "x.txt").write_text("x"))[0], "neither a folder"),
    ],
)
def test_no_pictures(make, message: str, tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match=message):
        find_pictures(make(tmp_path))


def test_compressed_and_truncated_tars_say_so(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar.gz", "w:gz") as archive:
        archive.add(folder, "photos")
    with pytest.raises(LeanconvError, match="uncompressed tar"):
        find_pictures(tmp_path / "photos.tar.gz")


def test_a_damaged_tar_is_not_cut_short_in_silence(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "photos.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(folder, "photos")
    with tarfile.open(path) as archive:
        place = archive.getmembers()[5].offset
    data = bytearray(path.read_bytes())
    data[place + 3] ^= 1  # in a header, whose checksum then fails
    path.write_bytes(bytes(data))
    with pytest.raises(LeanconvError, match=f"damaged or cut short at byte {place}"):
        find_pictures(path)


def test_linked_folders_are_followed_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "cats").symlink_to(folder / "cat")
    (tmp_path / "links" / "round").symlink_to(tmp_path / "links")
    assert [picture.label for picture in find_pictures(tmp_path / "links")] == ["cats"] * 3


def test_sixteen_bits_are_scaled_and_floats_refused(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    tensor = Preprocess(size=8, resize=8, mean=(0.0,) * 3, std=(1.0,) * 3)((tmp_path / "deep.png").read_bytes())
    assert torch.allclose(tensor[0], torch.from_numpy(ramp / 65535).float(), atol=0.003)
    Image.fromarray(np.zeros((8, 8), dtype=np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(ValueError, match="floating-point"):
        Preprocess()((tmp_path / "float.tiff").read_bytes())


def test_spread_takes_from_everywhere(folder: Path) -> None:
    chosen = spread(find_pictures(folder), 2)
    assert [picture.label for picture in chosen] == ["cat", "dog"]
    assert len(spread(find_pictures(folder), 100)) == 6


def test_class_indices(folder: Path, tmp_path: Path) -> None:
    pictures = find_pictures(folder)
    found = class_indices(pictures, None)
    assert found == {"cat": 0, "dog": 1}
    found.check(2)
    with pytest.raises(LeanconvError, match="2 class names but the network 1000 outputs"):
        found.check(1000)
    (tmp_path / "classes.json").write_text('{"cat": [281, "tabby"], "dog": 207}')
    mapped = class_indices(pictures, tmp_path / "classes.json")
    assert mapped == {"cat": 281, "dog": 207}
    mapped.check(1000)
    with pytest.raises(LeanconvError, match="class indices must be 0 to 9"):
        mapped.check(10)
    (tmp_path / "classes.json").write_text('{"cat": 1}')
    with pytest.raises(LeanconvError, match="no class index for dog"):
        class_indices(pictures, tmp_path / "classes.json")


def test_accuracy_by_hand() -> None:
    logits = torch.eye(8)[[0, 1, 2, 3]] + 0.5 * torch.eye(8)[[5, 5, 5, 5]]
    found = accuracy(logits, torch.tensor([0, 5, 2, 5]))
    assert (found.top1, found.top5, found.images) == (0.5, 1.0, 4)
    assert accuracy(logits[:, :3], torch.tensor([0, 1, 2, 1])).top5 == 1.0  # fewer than five classes
    assert agreement(logits, logits.roll(1, dims=0)) == 0.0
