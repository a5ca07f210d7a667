"""timm's ResNet-50, with the preprocessing timm gives it: shortcuts, batch norm and many 1 x 1 layers.

    python examples/resnet50_timm.py photos/ --speedup 1.5 --out resnet50-fast
    python examples/resnet50_timm.py --synthetic 8 --weights none --size 64 --samples 500      # offline, for a try

Needs `pip install 'leanconv[timm]'`. The trained weights are fetched by timm the first time. --model takes any of
timm's convolutional networks. Bottlenecks have little to spare: begin with 1.5x.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import leanconv

KINDS = {".jpg", ".jpeg", ".png", ".webp"}


class Photos(Dataset[Tensor]):
    """The pictures of a folder, as the network was trained to see them."""

    def __init__(self, folder: str, model: nn.Module, count: int):
        config = timm.data.resolve_model_data_config(model)
        self.transform = timm.data.create_transform(**config, is_training=False)
        self.paths = [path for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in KINDS][:count]
        if not self.paths:
            raise SystemExit(f"resnet50_timm.py: there is no picture in {folder!r}; give a folder with some.")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


class Noise(Dataset[Tensor]):
    """Coarse noise in place of pictures."""

    def __init__(self, count: int, size: int):
        coarse = torch.randn(count, 3, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
        self.images = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = timm.create_model(options.model, pretrained=options.weights == "pretrained").eval()
    data: Dataset[Tensor]
    if options.synthetic is None:
        data = Photos(options.images, model, options.count)
    else:
        data = Noise(options.synthetic, options.size)
    loader = DataLoader(data, batch_size=32)

    most = leanconv.reachable(model, loader)
    print(f"{options.model}: at most {most:.1f}x, with every rank at 1; {options.speedup:g}x asked for")
    result = leanconv.accelerate(model, loader, options.speedup, samples=options.samples)
    print(result)
    image = data[0][None]
    change = (result.model(image) - model(image)).norm() / model(image).norm()
    print(f"relative change of the answer to the first picture: {change:.3f}")
    if options.out is not None:
        print(
            f"saved to {result.save(options.out)}; load it: leanconv.load(folder, timm.create_model({options.model!r}))"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="?", help="a folder of pictures")
    parser.add_argument("--model", default="resnet50", help="timm's name")
    parser.add_argument("--count", type=int, default=500, help="use at most so many pictures")
    parser.add_argument("--speedup", type=float, default=1.5)
    parser.add_argument("--samples", type=int, default=50_000, help="responses sampled a layer")
    parser.add_argument("--weights", choices=["pretrained", "none"], default="pretrained")
    parser.add_argument("--synthetic", type=int, metavar="N", help="N pictures of noise in place of a folder")
    parser.add_argument("--size", type=int, default=224, help="side of the synthetic ones")
    parser.add_argument("--out", type=Path, help="folder to save the network to")
    options = parser.parse_args(arguments)
    if (options.images is None) == (options.synthetic is None):
        parser.error("give a folder of pictures, or --synthetic N")
    try:
        run(options)
    except leanconv.LeanconvError as error:
        raise SystemExit(f"resnet50_timm.py: {error}") from error


if __name__ == "__main__":
    main()
