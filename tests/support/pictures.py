"""Pictures that tests share: noise as tensors, files, tar files of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from leanconv.images import Preprocess


def smooth_images(count: int = 24, size: int = 16, channels: int = 3, seed: int = 0) -> Tensor:
    """Noise with some structure, so that responses have a falling spectrum."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, channels, size // 4, size // 4, generator=generator)
    fine = torch.randn(count, channels, size, size, generator=generator)
    return nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") + 0.3 * fine


SMALL = Preprocess(size=16, resize=16)


def write_picture(path: Path, shade: int = 128, size: tuple[int, int] = (20, 18)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade // 2, 255 - shade)).save(path)


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
