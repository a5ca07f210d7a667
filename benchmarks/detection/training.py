"""Faster R-CNN with VGG-16 on pictures kept in memory: reading, building, training, detecting, keeping."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import leanconv
from benchmarks.common.vgg16_probe import Vgg16Probe, vgg16_probe
from benchmarks.detection.losses import BatchLosses
from benchmarks.detection.networks import MEAN, faster_rcnn_vgg16, freeze
from leanconv import LeanconvError
from leanconv.forms.replace import Change
from leanconv.forms.replace import replace as put_change
from leanconv.images import Preprocess, find_pictures
from leanconv.images.detection_data import Scenes, SceneSet
from leanconv.images.loading import spread, stream
from leanconv.pipeline.inspection import inspect_network
from leanconv.train.optimizers import optimizers, set_rate

WEIGHT_DECAY = 0.01
# Gradients longer than this are scaled down: VGG-16 has no batch norm to hold it.
LONGEST = 10.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """``batch`` pictures a step, of all processes together; ``scales``: sides a batch may be scaled to, at random."""

    epochs: int = 10
    batch: int = 16
    lr: float = 1e-4
    frozen: int = 2
    seed: int = 0
    scales: tuple[int, ...] = ()


@dataclass(frozen=True)
class Canvases:
    """n pictures in the upper left corners of canvases of one size, as bytes, mean colour around them.

    ``sizes`` n x 2 heights and widths; ``boxes`` n x m x 4 and ``labels`` n x m: what is trained on, 0 where a picture
    has less; ``targets``: what is judged by, difficult objects included.
    """

    pictures: Tensor
    sizes: Tensor
    boxes: Tensor
    labels: Tensor
    targets: list[dict[str, Tensor]]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pictures)

    def image(self, index: int) -> Tensor:
        """The picture alone, 3 x height x width in [0, 1]."""
        height, width = self.targets[index]["size"].tolist()
        return self.pictures[index, :, :height, :width].float() / 255

    def batch(self, chosen: Tensor, mirrored: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pictures, sizes, boxes and labels; those ``mirrored`` (booleans) with their boxes."""
        pictures, sizes, boxes = self.pictures[chosen], self.sizes[chosen], self.boxes[chosen]
        width, columns = sizes[:, 1:], torch.arange(pictures.shape[-1], device=pictures.device)
        back = torch.where(mirrored[:, None] & (columns < width), width - 1 - columns, columns)
        pictures = pictures.gather(3, back[:, None, None].expand_as(pictures))
        turned = torch.stack([width - boxes[..., 2], boxes[..., 1], width - boxes[..., 0], boxes[..., 3]], -1)
        return pictures, sizes, torch.where(mirrored[:, None, None], turned, boxes), self.labels[chosen]


def read(scenes: Scenes, size: int, device: str) -> Canvases:
    """All pictures decoded once; those with a side above ``size`` are scaled down, with their boxes."""
    colour = torch.tensor(MEAN).mul(255).round().byte().view(3, 1, 1)
    pictures = colour.repeat(len(scenes), 1, size, size)
    data = SceneSet(scenes)

    def one(index: int) -> dict[str, Tensor]:
        image, target = data[index]
        height, width = image.shape[1:]
        scale = min(1.0, size / max(height, width))
        after = (max(1, round(scale * height)), max(1, round(scale * width)))
        if scale < 1:
            image = F.interpolate(image[None], after, mode="bilinear", antialias=True)[0]
        pictures[index, :, : after[0], : after[1]] = (255 * image).round().clamp(0, 255).byte()
        ratio = torch.tensor([after[1] / width, after[0] / height]).repeat(2)
        return {**target, "boxes": target["boxes"] * ratio, "size": torch.tensor(after)}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        targets = list(pool.map(one, range(len(scenes))))
    plain = [~target["difficult"] for target in targets]
    boxes = [target["boxes"][kept] for target, kept in zip(targets, plain, strict=True)]
    labels = [target["labels"][kept] for target, kept in zip(targets, plain, strict=True)]
    # One row more than the largest picture needs: with none at all there is still something to look at.
    empty = torch.zeros(max(map(len, labels)) + 1, 4)
    return Canvases(
        pictures.to(device),
        torch.stack([target["size"] for target in targets]).to(device),
        pad_sequence([*boxes, empty], batch_first=True)[:-1].to(device),
        pad_sequence([*labels, empty[:, 0].long()], batch_first=True)[:-1].to(device),
        targets,
        scenes.classes,
    )


def original(weights: Path | None) -> nn.Module:
    """VGG-16's convolutions under the linear head they are accelerated with."""
    return Vgg16Probe() if weights is None else vgg16_probe(weights)


def accelerated(
    weights: Path, pictures: Sequence[Path], speedup: float, device: str, limit: int | None = None, **how: Any
) -> leanconv.Accelerated:
    """The classifier, accelerated on ``pictures``, whose labels nobody looks at; ``how``: arguments of accelerate,
    and ``steps`` of a distillation."""
    images = []
    for place in pictures:
        found = find_pictures(place)
        chosen = spread(found, limit) if limit else found
        workers = min(8, os.cpu_count() or 1) if len(chosen) > 100 else 0
        images += [batch.to(device) for batch, _ in stream(chosen, Preprocess(), batch=50, workers=workers)]
    network = original(weights).to(device)
    if "steps" in how:
        how["refine"] = leanconv.Distill(how.pop("steps"))
    return leanconv.accelerate(network, images, speedup, **how, progress=False)


def build(classes: Sequence[str], features: nn.Module | None, *, size: int, width: int, frozen: int) -> nn.Module:
    """Few proposals: VOC's pictures have few objects. No dropout: fc6 and fc7 are new and training is short."""
    return faster_rcnn_vgg16(
        len(classes) + 1,
        features=features,
        frozen=frozen,
        width=width,
        dropout=0.0,
        min_size=size,
        max_size=size,
        rpn_pre_nms_top_n_train=1000,
        rpn_post_nms_top_n_train=300,
        rpn_pre_nms_top_n_test=1000,
        rpn_post_nms_top_n_test=300,
        box_batch_size_per_image=128,
    )


def backbone_macs(detector: Any, size: int, device: str) -> int:
    """Of a size x size picture."""
    return inspect_network(detector.backbone, None, shape=(1, 3, size, size), device=device).survey.macs


def train(detector: Any, data: Canvases, settings: Training, device: str, *, say: bool = True) -> list[float]:
    """In place; the mean loss of every epoch. Under torch.distributed every process takes its share of each batch."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if settings.batch < world or len(data) < settings.batch:
        raise LeanconvError(
            f"batches of {settings.batch} pictures need at least as many pictures ({len(data)} there are) and a "
            f"picture for each of {world} processes; give another --batch."
        )
    freeze(detector.backbone, settings.frozen)
    detector.to(device, memory_format=torch.channels_last).train()
    half = torch.bfloat16 if device.startswith("cuda") else None
    network: nn.Module = BatchLosses(detector, half)
    if world > 1:
        network = nn.parallel.DistributedDataParallel(network)
    trained = [parameter for parameter in detector.parameters() if parameter.requires_grad]
    # Not SGD as in the papers: its steps of one factor depend on the others' norms (1 to 3 each in VGG-16), so
    # that a rate a whole layer learns well at may be too large for its factors. Adam's steps do not. (Muon's do not
    # either, but it was tried at two rates and did not get through the first epochs.)
    moving = optimizers(detector, "adam", settings.lr, torch.device(device), weight_decay=WEIGHT_DECAY)
    per_epoch = len(data) // settings.batch
    steps = settings.epochs * per_epoch
    order = torch.Generator().manual_seed(settings.seed)
    sides = random.Random(settings.seed)
    torch.manual_seed(1000 * settings.seed + rank)  # what the samplers draw
    losses, started = [], time.perf_counter()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):  # canvases are all of one shape
        for epoch in range(settings.epochs):
            shuffled = torch.randperm(len(data), generator=order)
            coins = torch.rand(len(data), generator=order) < 0.5
            shuffled, coins = shuffled.to(device), coins.to(device)
            total = torch.zeros((), device=device)
            for step in range(per_epoch):
                mine = slice(step * settings.batch + rank, (step + 1) * settings.batch, world)
                batch = data.batch(shuffled[mine], coins[mine])
                found = network(*scaled(*batch, sides.choice(settings.scales) if settings.scales else None))
                loss = torch.stack(list(found.values())).sum()
                for parameter in trained:
                    parameter.grad = None
                loss.backward()
                nn.utils.clip_grad_norm_(trained, LONGEST)
                rate = settings.lr * share_of_rate(epoch * per_epoch + step, steps)
                for optimizer in moving:
                    set_rate(optimizer, rate, torch.device(device))
                    optimizer.step()
                total += loss.detach()
            losses.append(float(total) / per_epoch)
            if say and rank == 0:
                seconds = time.perf_counter() - started
                print(f"epoch {epoch + 1}/{settings.epochs} loss {losses[-1]:.4f} {seconds:.1f} s", flush=True)
            if not math.isfinite(losses[-1]):
                raise LeanconvError(f"the loss is no number any more in epoch {epoch + 1}; give a smaller --lr.")
    detector.to(memory_format=torch.contiguous_format).eval()
    return losses


def share_of_rate(step: int, steps: int) -> float:
    """A short rise, then half a cosine down to 0."""
    rising = min(200, steps // 5)
    return (
        (step + 1) / (rising + 1) if step < rising else (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2
    )


def scaled(
    pictures: Tensor, sizes: Tensor, boxes: Tensor, labels: Tensor, side: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Canvases of another ``side``."""
    if side is None or side == pictures.shape[-1]:
        return pictures, sizes, boxes, labels
    ratio = side / pictures.shape[-1]
    resized = F.interpolate(pictures.float(), (side, side), mode="bilinear", antialias=True).round().byte()
    return resized, (sizes * ratio).round().long(), boxes * ratio, labels


@torch.no_grad()
def detect(detector: nn.Module, data: Canvases, device: str, batch: int = 16) -> list[dict[str, Tensor]]:
    """What the detector finds in each picture, through its own forward, in single precision."""
    detector.to(device).eval()
    found = []
    for first in range(0, len(data), batch):
        images = [data.image(index) for index in range(first, min(first + batch, len(data)))]
        found += [{key: value.cpu() for key, value in one.items()} for one in detector(images)]
    return found


@contextlib.contextmanager
def clocked(seconds: dict[str, float], stage: str, device: str) -> Iterator[None]:
    """Adds the time of the block to ``seconds``, and says it."""
    started = time.perf_counter()
    yield
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started
    print(f"{stage}: {time.perf_counter() - started:.1f} s", flush=True)


def within(changes: Sequence[Change], prefix: str) -> list[Change]:
    """Changes of a network as those of its part ``prefix``."""
    return [replace(change, name=change.name.removeprefix(f"{prefix}.")) for change in changes]


def save(detector: nn.Module, file: Path, about: dict[str, Any], changes: Sequence[Change] = ()) -> None:
    """Weights to ``file``, and what is needed to build the detector again, with ``about``, to a .json beside it.

    ``changes`` are those of the backbone. The .json comes last: where it is, the weights are whole.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    state = {key: value.detach().cpu().contiguous().clone() for key, value in detector.state_dict().items()}
    safetensors.torch.save_file(state, part)
    part.rename(file)
    file.with_suffix(".json").write_text(
        json.dumps({**about, "changes": [change.to_json() for change in changes]}, indent=1) + "\n"
    )


def load(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A detector that ``save`` wrote, on the CPU, and what is known about it."""
    beside = file.with_suffix(".json")
    if not file.is_file() or not beside.is_file():
        raise LeanconvError(
            f"{str(file)!r} needs {beside.name} beside it, both as `benchmarks.detection.run train` wrote them."
        )
    about = json.loads(beside.read_text())
    features = original(None).features
    for change in about["changes"]:
        put_change(features, Change.from_json(change))  # type: ignore[arg-type]
    detector = build(about["classes"], features, size=about["size"], width=about["width"], frozen=about["frozen"])  # type: ignore[arg-type]
    detector.load_state_dict(safetensors.torch.load_file(file))
    return detector.eval(), about


def facts(settings: Training, *, size: int, width: int, classes: Sequence[str]) -> dict[str, Any]:
    """What `load` needs, and what a detector was trained with."""
    given = asdict(settings)
    return {"classes": list(classes), "size": size, "width": width, "frozen": given.pop("frozen"), "training": given}
