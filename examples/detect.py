"""What a detector finds in a picture before and after acceleration, side by side.

    python examples/detect.py street.jpg --images photos/ --speedup 3 --out street.png
    python examples/detect.py street.jpg --model detector.safetensors --images VOC/train-0.tar --out street.png

--model is one of torchvision's detectors, with its trained weights or those of --weights, or a file written by
`python -m benchmarks.detection.run train`. --images are pictures to accelerate with: a folder, a .tar file, a pattern.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.utils import draw_bounding_boxes, save_image

import leanconv
from leanconv import LeanconvError
from leanconv.errors import unknown_name
from leanconv.images import Picture, find_pictures
from leanconv.images.loading import spread
from leanconv.images.preprocess import whole_picture

COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000")


def detector_of(name: str, weights: str | None) -> tuple[nn.Module, Sequence[str]]:
    """The detector and the names of its labels, from 0."""
    if Path(name).suffix == ".safetensors":
        sys.path.append(str(Path(__file__).parents[1]))
        from benchmarks.detection.training import load

        detector, about = load(Path(name))
        return detector, ["background", *about["classes"]]
    known = torchvision.models.list_models(torchvision.models.detection)
    if name not in known:
        raise unknown_name(name, known, what="detector", where="--model")
    preset = torchvision.models.get_model_weights(name).DEFAULT
    names = preset.meta["categories"]
    if weights is not None:
        detector = torchvision.models.get_model(name, weights=None, weights_backbone=None)
        try:
            detector.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise LeanconvError(f"--weights {weights} do not fit {name} ({said}); give its state dict.") from error
        return detector, names
    try:
        return torchvision.models.get_model(name, weights=preset), names
    except OSError as error:
        raise LeanconvError(
            f"the weights of {name} cannot be fetched ({error}); give --weights FILE, a state dict."
        ) from error


def read(picture: Picture) -> Tensor:
    """3 x height x width in [0, 1]."""
    try:
        image = whole_picture(picture.read())
    except Exception as error:
        raise LeanconvError(f"{picture.name!r} cannot be read ({error}); give another picture.") from error
    return image


def drawn(image: Tensor, found: dict[str, Tensor], names: Sequence[str], threshold: float) -> Tensor:
    """The picture with the boxes whose score is at least ``threshold``."""
    kept = found["scores"] >= threshold
    labels, scores = found["labels"][kept].tolist(), found["scores"][kept].tolist()
    if not labels:
        return image
    boxes = draw_bounding_boxes(
        (255 * image).round().byte(),
        found["boxes"][kept].cpu(),
        labels=[f"{names[label]} {score:.2f}" for label, score in zip(labels, scores, strict=True)],
        colors=[COLOURS[label % len(COLOURS)] for label in labels],
        width=2,
    )
    return boxes.float() / 255


def stacked(rows: list[Tensor], gap: int = 4) -> Tensor:
    """Pictures of different sizes below each other, white around them."""
    widest = max(row.shape[-1] for row in rows)
    return torch.cat([F.pad(row, (0, widest - row.shape[-1], 0, gap), value=1.0) for row in rows], dim=1)[:, :-gap]


@torch.no_grad()
def found_by(model: Any, image: Tensor, device: str) -> dict[str, Tensor]:
    return {key: value.cpu() for key, value in model.to(device).eval()([image.to(device)])[0].items()}


def run(options: argparse.Namespace) -> None:
    if options.out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise LeanconvError(f"--out {options.out} must end in .png or .jpg.")
    pictures = [picture for given in options.pictures for picture in find_pictures(given)]
    calibration = spread(find_pictures(options.images), options.limit)
    detector, names = detector_of(options.model, options.weights)
    batches = [[read(picture).to(options.device)] for picture in calibration]
    result = leanconv.accelerate(
        detector.to(options.device).eval(), batches, options.speedup, part="backbone", device=options.device
    )
    print(f"backbone: {result.speedup:.2f}x fewer multiply-accumulates, {len(calibration)} pictures", flush=True)
    rows = []
    for picture in pictures:
        image = read(picture)
        answers = [found_by(model, image, options.device) for model in (detector, result.model)]
        counts = [int((answer["scores"] >= options.threshold).sum()) for answer in answers]
        print(f"{picture.name}: {counts[0]} boxes, accelerated {counts[1]}")
        gap = torch.ones(3, image.shape[1], 4)
        left, right = (drawn(image, answer, names, options.threshold) for answer in answers)
        rows.append(torch.cat([left, gap, right], dim=2))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_image(stacked(rows), options.out)
    print(f"{options.out}: the original on the left, accelerated on the right")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="+")
    parser.add_argument("--model", default="fasterrcnn_resnet50_fpn")
    parser.add_argument("--weights", help="a state dict for one of torchvision's detectors")
    parser.add_argument("--images", required=True, help="pictures to accelerate with")
    parser.add_argument("--limit", type=int, default=200, help="how many of them are used")
    parser.add_argument("--speedup", type=float, default=3.0, help="of the backbone's convolutions")
    parser.add_argument("--threshold", type=float, default=0.5, help="smallest score of a box that is drawn")
    parser.add_argument("--out", type=Path, default=Path("detections.png"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    try:
        run(parser.parse_args(arguments))
    except LeanconvError as error:
        raise SystemExit(f"detect.py: {error}") from error


if __name__ == "__main__":
    main()
