"""torchvision's VGG-16, accelerated on a folder of pictures: its answers beside the original's.

    python examples/classify.py photos/ --speedup 4 --out vgg16-4x
    python examples/classify.py --synthetic 8 --weights none --size 64 --samples 500      # offline, for a try

The trained weights are fetched by torchvision the first time. Half of the pictures are accelerated with, the others
are classified by both networks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import leanconv

KINDS = {".jpg", ".jpeg", ".png", ".webp"}


def photos(folder: str, count: int) -> tuple[list[str], Tensor]:
    """Pictures as the trained network takes them: n x 3 x 224 x 224, and their names."""
    transform = torchvision.models.VGG16_Weights.DEFAULT.transforms()
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in KINDS][:count]
    if len(paths) < 2:
        raise SystemExit(f"classify.py: {folder!r} holds {len(paths)} pictures; give a folder with at least two.")
    return [path.name for path in paths], torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])


def noise(count: int, size: int) -> tuple[list[str], Tensor]:
    """Coarse noise in place of pictures."""
    coarse = torch.randn(count, 3, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
    return [f"noise {number}" for number in range(count)], F.interpolate(coarse, size=(size, size), mode="bilinear")


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    weights = None if options.weights == "none" else torchvision.models.VGG16_Weights[options.weights]
    model = torchvision.models.vgg16(weights=weights).eval()
    classes = [f"class {number}" for number in range(1000)] if weights is None else weights.meta["categories"]
    if options.synthetic is None:
        names, images = photos(options.images, options.count)
    else:
        names, images = noise(options.synthetic, options.size)
    half = len(images) // 2

    result = leanconv.accelerate(model, images[:half].split(16), options.speedup, samples=options.samples)
    print(result)
    before, after = (
        torch.cat([network(batch) for batch in images[half:].split(16)]).softmax(1) for network in (model, result.model)
    )
    for name, old, new in zip(names[half:], before, after, strict=True):
        print(
            f"{name}: {classes[int(old.argmax())]} ({old.max():.2f}) / {classes[int(new.argmax())]} ({new.max():.2f})"
        )
    same = (before.argmax(1) == after.argmax(1)).float().mean()
    print(f"the same first answer on {100 * same:.1f} % of {len(before)} pictures that were not accelerated with")
    if options.out is not None:
        print(f"saved to {result.save(options.out)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="?", help="a folder of pictures")
    parser.add_argument("--count", type=int, default=600, help="use at most so many pictures")
    parser.add_argument("--speedup", type=float, default=4.0)
    parser.add_argument("--samples", type=int, default=50_000, help="responses sampled a layer")
    parser.add_argument("--weights", default="DEFAULT", help="torchvision's name for them, or none: random")
    parser.add_argument("--synthetic", type=int, metavar="N", help="N pictures of noise in place of a folder")
    parser.add_argument("--size", type=int, default=224, help="side of the synthetic ones")
    parser.add_argument("--out", type=Path, help="folder to save the network to")
    options = parser.parse_args(arguments)
    if (options.images is None) == (options.synthetic is None):
        parser.error("give a folder of pictures, or --synthetic N")
    try:
        run(options)
    except leanconv.LeanconvError as error:
        raise SystemExit(f"classify.py: {error}") from error


if __name__ == "__main__":
    main()
