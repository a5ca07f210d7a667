"""What ``accelerate`` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from leanconv.config import Options
from leanconv.forms.replace import Change
from leanconv.network import reasons
from leanconv.network.reasons import by_reason
from leanconv.network.source import Source
from leanconv.network.torchvision_detectors import kind_of
from leanconv.ranks import KeptSpectra
from leanconv.runtimes.target import Measured
from leanconv.system.text_table import table

# A result further from the original than this is called poor. At a KL of 0.2 networks have lost 5 to 7 points of
# accuracy (benchmarks/results/ablation.md, VGG-16 and ResNet-20). Agreement says less: the less sure a network is, the
# more of its answers change without harm (VGG-16 on ImageNet at 79 %: 3 points, ResNet-20 at 88 %: 7), so it has to be
# lower to count. Other outputs are judged by how far they are off: at 0.3 a tenth of their energy is error.
POOR_KL, POOR_AGREEMENT, POOR_ERROR = 0.2, 0.7, 0.3
NAMED = 3  # layers, at most, that are named to be left alone

# Fields of a result that are plain data.
PLAIN = (
    *("macs_before", "macs_after", "parameters_before", "parameters_after", "images", "skipped"),
    *("preprocess", "seconds", "training", "command"),
)


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One accelerated layer.

    Attributes:
        name: its path in the network.
        scheme: what stands in its place; "merged" is a layer that only took in the 1 x 1 factor of the one before it,
            with that one's d'.
        ranks: (d',) for channel, (d'',) for spatial, (d'', d') for 3d.
        macs_before: multiply-accumulates of one image in the original.
        macs_after: and in the accelerated network.
        energy: share of response variance kept (of filter energy for the spatial scheme).
        error: ||r(y) - r(y~)|| / ||r(y)|| at the sampled positions, with the inputs the layer was fitted to.
        samples: responses the layer was fitted to; 0 where none were, as for the spatial scheme, or it is not known.
        enough: whether twice as many would hardly help (lower the error on unseen images by less than 1 %); None where
            that was not looked at: with a linear fit, ``refine="none"`` or fewer than eight images.
        needed: about how many would be enough, extrapolated from ``samples``; None with ``samples="auto"``, which looks
            at several numbers and takes the one.
    """

    name: str
    scheme: str
    ranks: tuple[int, ...]
    macs_before: int
    macs_after: int
    energy: float
    error: float
    samples: int = 0
    enough: bool | None = None
    needed: int | None = None


Interval = tuple[float, float]


@dataclass(frozen=True)
class HeldOut:
    """Original and accelerated network compared on a few images, without labels. Printed, a line. Intervals, low to
    high, hold with a probability of 95 %.

    Attributes:
        images: how many.
        relative_error: ||out - out'|| / ||out||, the mean over the tensors a network returns.
        seen: whether these are images the network was made with, because none were held out.
        agreement: share of images (of pixels, where ``pixels``) with the same class; None where outputs are no scores.
        kl: mean KL divergence of the softmax outputs from the original's, in nats; None as above.
        agreement_interval: of ``agreement``.
        kl_interval: of ``kl``.
    """

    images: int
    relative_error: float
    seen: bool
    agreement: float | None = None
    agreement_interval: Interval | None = None
    kl: float | None = None
    kl_interval: Interval | None = None
    pixels: bool = False

    @property
    def poor(self) -> bool:
        """Whether most users would want another network."""
        if self.agreement is None or self.kl is None:
            return self.relative_error > POOR_ERROR
        return self.kl > POOR_KL or self.agreement < POOR_AGREEMENT

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeldOut:
        plain: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in data.items()}
        return cls(**plain)

    def __str__(self) -> str:
        which = "it was made with (none were held out)" if self.seen else "it was not fitted to"
        parts = [f"outputs {100 * self.relative_error:.1f} % off"]
        if self.kl is not None:
            parts.insert(0, f"KL {self.kl:.3f}{_span(self.kl_interval, 3)}")
        if self.agreement is not None:
            percent = None if self.agreement_interval is None else [100 * end for end in self.agreement_interval]
            share, end = ("on ", " of the pixels") if self.pixels else ("", "")
            parts.insert(0, f"same class {share}{100 * self.agreement:.1f} %{end}{_span(percent, 1)}")
        return f"on {self.images} image{'s' if self.images > 1 else ''} {which}: {', '.join(parts)}"


def _span(interval: Sequence[float] | None, digits: int) -> str:
    return "" if interval is None else f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


@dataclass(frozen=True, kw_only=True)
class Accelerated:
    """The accelerated network and what was done to get it. Printed, it is a table.

    Attributes:
        model: the network, in eval mode, on the device and in the dtype of the one given; same inputs, same outputs.
        layers: one report for each layer that was replaced.
        skipped: every other layer that counts, and the reason.
        macs_before: multiply-accumulates of one image, of every layer that counts.
        macs_after: the same, of the accelerated network.
        parameters_before: numbers in the original.
        parameters_after: and in the accelerated network.
        images: how many were given.
        changes: what was put in each layer's place, to do it again when loading.
        options: the arguments.
        source: where the original comes from, to build it again.
        preprocess: how the command line read the images.
        seconds: what each stage of the run took.
        training: what ``finetune``, or ``refine="distill"``, did since.
        command: what was typed, where the command line was used.
        spectra: what ranks were chosen by; None for folders without.
        timing: times of both networks, measured at the end of a run with ``ranks="latency"``.
        check: what the network does on images it was not fitted to; None for folders without, after ``finetune``, and
            where the outputs of both networks cannot be compared.
    """

    model: nn.Module
    layers: list[LayerReport]
    skipped: dict[str, str]
    macs_before: int
    macs_after: int
    parameters_before: int
    parameters_after: int
    images: int
    changes: list[Change]
    options: Options
    source: Source
    preprocess: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    training: dict[str, Any] | None = None
    command: list[str] | None = None
    spectra: KeptSpectra | None = None
    timing: Measured | None = None
    check: HeldOut | None = None

    @property
    def speedup(self) -> float:
        """MACs before / after, of every layer that counts, skipped ones included."""
        return self.macs_before / self.macs_after

    def save(self, folder: str | Path) -> Path:
        """Write ``model.safetensors``, ``spectra.json`` and ``leanconv.json`` into a new ``folder``; all or nothing."""
        from leanconv.storage.folder import save

        return save(self, Path(folder))

    def to_json(self) -> dict[str, Any]:
        """Everything but weights and spectra, as plain data."""
        return {
            "speedup": self.speedup,
            **{name: getattr(self, name) for name in PLAIN},
            "layers": [{**vars(layer), "ranks": list(layer.ranks)} for layer in self.layers],
            "options": self.options.to_json(),
            "source": self.source.to_json(),
            "timing": None if self.timing is None else self.timing.to_json(),
            "check": None if self.check is None else asdict(self.check),
        }

    def __str__(self) -> str:
        rows = [
            [
                layer.name,
                layer.scheme,
                " x ".join(str(rank) for rank in layer.ranks),
                f"{layer.macs_before / 1e6:.2f}",
                f"{layer.macs_after / 1e6:.2f}",
                f"{layer.macs_before / layer.macs_after:.2f}x",
                f"{100 * layer.energy:.1f}%",
                f"{layer.error:.3f}",
            ]
            for layer in self.layers
        ]
        heads = ["layer", "scheme", "ranks", "MMACs", "after", "ratio", "energy", "error"]
        lines = [table(heads, rows, left=2)]
        lines += [f"left alone: {line}" for line in by_reason(self.skipped)]
        ratio = f"{self.speedup:.3f}x fewer" if self.speedup >= 1 else f"{1 / self.speedup:.3f}x more"
        lines.append(
            f"{ratio} MACs: {self.macs_before / 1e6:.1f} M -> {self.macs_after / 1e6:.1f} M; "
            f"parameters {self.parameters_before / 1e6:.2f} M -> {self.parameters_after / 1e6:.2f} M"
        )
        if self.timing is not None:
            lines.append(str(self.timing))
        if self.check is not None:
            lines.append(str(self.check))
            if self.check.poor:
                lines.append(self._instead())
        if any(layer.enough is False for layer in self.layers):
            lines.append(self._too_few())
        return "\n".join(lines)

    def _instead(self) -> str:
        """What to do about a network that is far from the original."""
        ways = ["larger ranks" if isinstance(self.options.ranks, dict) else "a smaller speed-up"]
        if self.options.ranks in ("energy", "uniform"):
            ways.append('ranks="sensitivity"')
        if len(self.layers) > NAMED:
            left = [name for name, why in self.skipped.items() if why in (reasons.FIRST, reasons.ASKED)]
            worst = sorted(self.layers, key=lambda layer: layer.error, reverse=True)[:NAMED]
            names = [*left, *(layer.name for layer in worst)]
            ways.append(f"skip={names}, which leaves the layers of the largest errors as they are")
        if self.options.refine != "distill" and kind_of(self.model) is None:
            ways.append('refine="distill"')
        return f"That is far from the original: try {', or '.join(ways)}."

    def _too_few(self) -> str:
        """Who would gain from more samples, how many and how to have them."""
        short = [layer for layer in self.layers if layer.enough is False]
        said = f"{len(short)} of {len(self.layers)} layers would gain from more samples"
        needed, most = max(layer.needed or 0 for layer in short), self.options.most_samples
        if not needed:
            return f"{said}; give more images."
        needed = _rounded(needed)
        # A layer with fewer samples than were asked for has all positions of all images.
        used_up = [layer for layer in short if 0 < layer.samples < most and layer.needed]
        if not used_up:
            return f"{said}, at least about {needed:,}; give samples={needed:_}, and more images if these hold fewer."
        images = _rounded(math.ceil(self.images * max((layer.needed or 0) / layer.samples for layer in used_up)))
        also = f" and samples={needed:_}" if needed > most else ""
        return f"{said}, at least about {needed:,}; give about {images:,} images{also}."


def _rounded(count: int) -> int:
    """Up, to two digits: it was extrapolated."""
    unit: int = 10 ** max(len(str(count)) - 2, 0)
    return -(-count // unit) * unit
