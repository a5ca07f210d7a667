"""Measuring one network, or two side by side, on labelled images or on annotated ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from leanconv.calibrate.processes import Processes
from leanconv.errors import LeanconvError, unknown_name, warn
from leanconv.evaluation import detection
from leanconv.evaluation.class_names import ClassIndices, class_indices, detector_labels, labelled
from leanconv.evaluation.classification import NAMELESS, Accuracy, accuracy, answers
from leanconv.evaluation.paired import Comparison, compare
from leanconv.evaluation.voc_ap import no_objects
from leanconv.images import Picture, Preprocess, TenViews, find_pictures, held_out, spread, stream
from leanconv.images.detection_data import SceneSet, find_scenes, splits
from leanconv.images.find import HELD_OUT
from leanconv.images.loading import refuse_too_many
from leanconv.network.user_model import check_model, device_of, parse_device
from leanconv.progress import reporter
from leanconv.result import Accelerated

T = TypeVar("T")


def evaluate(
    model: nn.Module | Accelerated,
    data: Any,
    other: nn.Module | Accelerated | None = None,
    *,
    names: Sequence[str] | None = None,
    preprocess: Callable[[bytes], Tensor] | None = None,
    labels: str | Path | None = None,
    classes: str | Path | None = None,
    categories: Sequence[str] | None = None,
    views: int = 1,
    split: str | None = None,
    metric: str | None = None,
    limit: int | None = None,
    batch: int | None = None,
    workers: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Accuracy | Comparison | detection.DetectionScore:
    """Top-1 and top-5 accuracy of a classifier, mean average precision of a detector; of two networks side by side.

    Every process of torch.distributed takes a part of the images and returns the result of all.

    Args:
        model: a network, or the result of ``accelerate``. It is measured in eval mode; its modes are put back.
        data: a path of labelled or annotated images, as ``leanconv evaluate --data`` takes it; or a dataset, a
            DataLoader or any iterable of batches: of images and class indices for a classifier, of images and targets
            as torchvision's detectors take them for a detector.
        other: a second network, measured on the same images.
        names: what the networks are called in the result.
        preprocess: from the bytes of a file to a tensor, such as ``leanconv.images.Preprocess``; default: that of the
            result of ``accelerate``, else that of ImageNet. Detectors take whole images.
        labels: a text file with the class of every image.
        classes: a JSON file of {class name: output}.
        categories: detectors: the names of their labels from 0, as ``weights.meta["categories"]`` has them.
        views: 1, the centre of each image; 10, centre, corners and their mirror images, averaged.
        split: detectors: which list of a VOC folder, or which shards.
        metric: detectors: voc (mAP at IoU 0.5, the default), voc11 (its mean at 11 recalls), coco (0.5 to 0.95).
        limit: use at most this many images, spread over all.
        batch: images a batch, 32; for detectors 8.
        workers: processes that read images.
        device: where to run; default: where the model is.
        progress: show progress.
    """
    if views not in (1, 10):
        raise LeanconvError(f"views {views} is not known; use 1 or 10.")
    models = [model] if other is None else [model, other]
    networks = [each.model if isinstance(each, Accelerated) else each for each in models]
    for network in networks:
        check_model(network)
    named = list(zip(names or (["original", "other"] if other is not None else [NAMELESS]), networks, strict=True))
    detectors = detection.are_detectors(named)
    for_others: dict[str, Any] = {"split": split, "metric": metric, "categories": categories}
    if detectors:
        for_others = {"labels": labels, "views": None if views == 1 else views, "preprocess": preprocess}
    _refuse(for_others, f"is for {'classifiers' if detectors else 'detectors'}, which the model is none of")
    if not isinstance(data, (str, Path)):
        of_paths = {"labels": labels, "classes": classes, "split": split, "limit": limit}
        _refuse(of_paths, f"goes with a path of images, and data is a {type(data).__name__}")
    file = None if classes is None else Path(classes)
    devices = [device_of(network) for network in networks]
    device = devices[0] if device is None else parse_device(device)
    run = _Run(named, data, device, Processes(device), batch or (8 if detectors else 32), workers, progress)
    try:
        if detectors:
            return run.detect(file, categories, split, metric or "voc", limit)
        return run.classify(preprocess or _preprocess(models), labels, file, views, limit)
    finally:
        for network, own_device in zip(networks, devices, strict=True):
            network.to(own_device)


@dataclass(frozen=True)
class _Run:
    """Named networks to be measured on data, in one process or several."""

    named: list[tuple[str, nn.Module]]
    data: Any
    device: torch.device
    team: Processes
    batch: int
    workers: int
    progress: bool

    def classify(
        self,
        preprocess: Callable[[bytes], Tensor],
        labels: str | Path | None,
        file: Path | None,
        views: int,
        limit: int | None,
    ) -> Accuracy | Comparison:
        bad: list[str] = []
        source, total, mapping = type(self.data).__name__, None, ClassIndices()
        batches: Iterable[tuple[Tensor, list[Picture]]]
        if isinstance(self.data, (str, Path)):
            source = held_out(str(self.data))
            pictures = find_pictures(source)
            pictures = pictures if labels is None else labelled(pictures, Path(labels))
            mapping = class_indices(pictures, file)
            pictures = spread(pictures, limit or len(pictures))
            total, mine, together = len(pictures), self._share(len(pictures)), max(1, self.batch // views)
            batches = stream(
                pictures[mine.start : mine.stop],
                TenViews(_with_sizes(preprocess)) if views > 1 else preprocess,
                batch=together,
                **self._reading(total, bad),
            )
            steps = -(-len(mine) // together)
        else:
            items, steps = self._batches(None)
            batches = _as_pictures(items, mapping)
        # Ten views of a picture may be more than a batch.
        at_once = self.batch if views > 1 else None
        named = self.named if len(self.named) > 1 else [(NAMELESS, self.named[0][1])]
        parts = self._of_all(
            "evaluating", steps, lambda step: answers(named, batches, mapping, self.device, at_once=at_once, step=step)
        )
        outputs, classes = zip(*parts, strict=True)
        about = {"data": source, "views": views, "unreadable": self._unreadable(bad, total)}
        logits, truth = [torch.cat(shares) for shares in zip(*outputs, strict=True)], torch.cat(classes)
        if len(logits) == 1:
            return accuracy(logits[0], truth, model=self.named[0][0], about=about)
        (original, _), (other, _) = self.named
        return compare(logits[0], logits[1], truth, original=original, other=other, about=about)

    def detect(
        self, file: Path | None, categories: Sequence[str] | None, split: str | None, metric: str, limit: int | None
    ) -> detection.DetectionScore:
        if metric not in detection.METRICS:
            raise unknown_name(metric, detection.METRICS, what="metric", where="metric")
        bad: list[str] = []
        outputs = [detection.class_outputs(model) for _, model in self.named]
        about: dict[str, Any] = {"data": type(self.data).__name__, "split": None, "clipped": 0, "dropped": 0}
        batches: Iterable[detection.Batch]
        if isinstance(self.data, (str, Path)):
            split = split or next((name for name in HELD_OUT if name in splits(self.data)), None)
            scenes = find_scenes(self.data, split=split)
            about = {"data": str(self.data), "split": split, "clipped": scenes.clipped, "dropped": scenes.dropped}
            if scenes.remark and self.team.is_main:
                warn(scenes.remark)
            scenes = scenes.spread(limit or len(scenes))
            if not any(bool((~scene.target["difficult"]).any()) for scene in scenes.scenes):
                raise no_objects()
            total, mine, classes = len(scenes), self._share(len(scenes)), scenes.classes
            steps = -(-len(mine) // self.batch)
            batches = detection.read_scenes(SceneSet(scenes), mine, batch=self.batch, **self._reading(total, bad))
            labels = [
                detector_labels(name, count, categories, classes, file)
                for (name, _), count in zip(self.named, outputs, strict=True)
            ]
        else:
            total, labels = None, [None] * len(self.named)
            classes = tuple(categories[1:]) if categories else tuple(map(str, range(1, outputs[0] or 0)))
            if not classes:
                raise LeanconvError("it is not known which classes there are; give categories, their names from 0 on.")
            items, steps = self._batches(_apart)
            batches = ((list(images), list(targets)) for images, targets in items)
        named = zip(self.named, labels, strict=True)
        detectors = [detection.Detector(name, model, its_labels) for (name, model), its_labels in named]
        count = len(classes)
        parts = self._of_all(
            "detecting", steps, lambda step: detection.detect_all(detectors, batches, count, self.device, step=step)
        )
        answers, shares = zip(*parts, strict=True)
        detections = [list(itertools.chain(*each)) for each in zip(*answers, strict=True)]
        targets = list(itertools.chain(*shares))
        about |= {"unreadable": self._unreadable(bad, total), "images": len(targets)}
        return detection.score([name for name, _ in self.named], detections, targets, classes, metric, **about)

    @property
    def _pin(self) -> bool:
        """Whether images go to a GPU, which copies them from pinned memory by itself."""
        return self.device.type == "cuda"

    def _reading(self, total: int, bad: list[str]) -> dict[str, Any]:
        return {"workers": self.workers, "pin": self._pin, "out_of": total, "bad": bad}

    def _share(self, count: int) -> range:
        """Indices of this process's images, side by side: so the results of all are in the order of one process."""
        rank, world = self.team.rank, self.team.world
        if count < world:
            raise LeanconvError(f"there are {count} images for {world} processes; use fewer processes.")
        return range(count * rank // world, count * (rank + 1) // world)

    def _batches(self, collate: Callable[[list[Any]], Any] | None) -> tuple[Iterator[Any], int]:
        """This process's batches of data that is no path, and their number; 0 where it is not known."""
        data, team = self.data, self.team
        if isinstance(data, tuple) and all(isinstance(each, Tensor) for each in data):
            data = TensorDataset(*data)
        if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, tuple)):
            part = Subset(data, self._share(len(data)))
            loader = DataLoader(part, self.batch, num_workers=self.workers, collate_fn=collate, pin_memory=self._pin)
            return iter(loader), len(loader)
        steps = -(-len(data) // team.world) if hasattr(data, "__len__") else 0
        return itertools.islice(data, team.rank, None, team.world), steps

    def _of_all(self, title: str, steps: int, compute: Callable[[Callable[[], None]], T]) -> list[T]:
        """The results of ``compute`` in every process."""
        with self.team.ending_together(), reporter(self.progress and self.team.is_main).stage(title, steps) as stage:
            mine = compute(stage.advance)
        return self.team.all_gather(mine)

    def _unreadable(self, bad: list[str], total: int | None) -> list[str]:
        """Names from all processes, which may be too many of ``total`` together."""
        names = list(itertools.chain(*self.team.all_gather(bad)))
        if total is not None:
            refuse_too_many(names, total)
        return names


def _as_pictures(batches: Iterable[Any], classes: ClassIndices) -> Iterator[tuple[Tensor, list[Picture]]]:
    """Images with nameless pictures that have their classes, which are added to ``classes``."""
    count = 0
    for batch in batches:
        images, labels = batch if isinstance(batch, (list, tuple)) and len(batch) == 2 else (batch, None)
        if not (isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.shape == images.shape[:1]):
            raise LeanconvError(
                f"data gave a {type(batch).__name__} where a pair of images and class indices, one an image, is needed."
            )
        indices = labels.tolist()
        classes.update({str(index): index for index in indices})
        yield images, [Picture("", f"image {i}", str(index)) for i, index in enumerate(indices, start=count)]
        count += len(images)
    if not count:
        raise LeanconvError("data has no images, or fewer batches than there are processes; give more.")


def _apart(pairs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Images and targets. Images of different sizes are not stacked."""
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _preprocess(models: Sequence[nn.Module | Accelerated]) -> Preprocess:
    """That of the results of ``accelerate`` among these; ImageNet's if none has one."""
    known = [model.preprocess for model in models if isinstance(model, Accelerated) and model.preprocess is not None]
    if any(other != known[0] for other in known):
        raise LeanconvError("the networks were made for different preprocessing; give the one to use as preprocess.")
    return Preprocess.from_json(known[0]) if known else Preprocess()


def _with_sizes(preprocess: Callable[[bytes], Tensor]) -> Preprocess:
    if not isinstance(preprocess, Preprocess):
        raise LeanconvError(f"ten views need a leanconv.images.Preprocess, not a {type(preprocess).__name__}.")
    return preprocess


def _refuse(options: Mapping[str, Any], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise LeanconvError(f"{name} {why}; leave it out.")
