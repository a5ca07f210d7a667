"""How the output of a network feels each response: its gradients, from one backward pass of a few images.

Let o be an image's output, of length |o|, and v a vector of independent standard normal numbers. The gradient g of
v.o / |o| at a response turns an error e of all responses of a layer into g.e, and the mean of (g.e)^2 over v is the
square of the relative change of the output, |J e|^2 / |o|^2. One draw for each image is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, out_of_memory
from leanconv.calibrate.probes import Probe, Responses
from leanconv.errors import LeanconvError
from leanconv.network.function_trace import tensors
from leanconv.network.layers.kinds import KINDS
from leanconv.network.recognise import is_norm_with_activation
from leanconv.network.user_model import copied
from leanconv.solve import Metric, components, thinned
from leanconv.system.precision import chosen_kernels, multiplies_bfloat16
from leanconv.system.random_state import untouched_rng

# Images that go through the network together; all their activations are kept until the gradients have come back.
AT_ONCE = 32
# Images that show how the columns of an output vary.
SHOWN = 8
# Positions of an image that the metric is a mean of; responses that principal components are taken from.
POSITIONS, ROWS = 64, 8192
# Shares of a layer's response energy that are left out. The smallest hardly changes the output of one layer alone; once
# all layers lose some, the output changes as much as the larger ones show.
LOSSES = (0.3, 0.1, 0.03)
# The share of an output's variance over the images that is common to all its columns. Up to SCORES they are taken for
# scores of classes, where a number added to all changes nothing; from NUMBERS on for numbers that each mean something.
# A classifier has about a third in common (VGG-16), two independent columns have a half.
SCORES, NUMBERS = 0.4, 0.6


@dataclass(frozen=True)
class Gradients:
    """Of one layer. ``metric``: for each group of filters, d x d, the sum of g g^T over some positions. ``changes``:
    pairs of a share of the responses' energy and the relative change of the output when their last principal
    components, which have this share, are left out; none where no gradient came back."""

    metric: tuple[Tensor, ...]
    changes: tuple[tuple[float, float], ...]

    @cached_property
    def metrics(self) -> list[Metric | None]:
        """For each group of filters."""
        return [Metric.of(gram) for gram in self.metric]


@dataclass
class _Layer:
    """What is summed at a layer. ``module``: whose output is watched. Its responses are ``gain`` x (output - ``mean``),
    without their mean. ``bases``: principal components, groups x d / groups x the largest rank."""

    probe: Probe
    ranks: dict[int, float]  # and the share of the energy they lose
    module: str
    gain: Tensor
    mean: Tensor
    bases: Tensor
    metric: Tensor
    batch: Tensor | None = None  # (g.e) of the rows of a batch, for each rank
    squares: list[Tensor] = field(default_factory=list)
    places: dict[int, Tensor] = field(default_factory=dict)  # positions the metric is taken at, by how many there are

    @classmethod
    def of(cls, network: nn.Module, probe: Probe, responses: Responses) -> _Layer:
        groups, y = probe.site.geometry.groups, responses.y
        y = y[thinned(len(y), min(len(y), ROWS)).to(y.device)]
        parts = zip(y.chunk(groups, 1), probe.spaces, strict=True)
        found = [components(part, space=space, quick=True) for part, space in parts]
        ranks = _ranks(torch.stack([values for values, _ in found]).sum(0))
        bases = torch.stack([vectors[:, : max(ranks, default=0)] for _, vectors in found]).to(y.dtype)
        mean, gain, module = y.mean(0), torch.ones_like(probe.bias), probe.site.tail
        if is_norm_with_activation(network.get_submodule(module)):  # it does not show the response, the layer does
            module = probe.site.name
            layer: Any = network.get_submodule(module)
            own = layer.weight.detach().to(y.dtype)
            size = own.flatten(1).square().sum(1)
            gain = torch.where(size > 0, (probe.weight * own).flatten(1).sum(1) / size.clamp_min(1e-30), gain)
            mean = (mean - probe.bias) / torch.where(gain == 0, 1, gain)
            mean = mean if layer.bias is None else mean + layer.bias.detach()
        width = len(gain) // groups
        metric = torch.zeros(groups, width, width, dtype=torch.float64, device=y.device)
        return cls(probe, ranks, module, gain, mean, bases, metric)

    def watch(self, zero: Tensor) -> Callable[[Any, Any, Tensor], Tensor]:
        """A hook of the module. It adds a ``zero``, for which gradients are asked for: so none of weights are
        computed."""

        def forward(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            shown = output + zero
            if shown.requires_grad:  # not in a part that runs without gradients
                shown.register_hook(lambda gradient: self._back(output.detach(), gradient))
            return shown

        return forward

    def _back(self, output: Tensor, gradient: Tensor) -> None:
        kind, groups = KINDS[self.probe.site.geometry.kind], len(self.bases)
        y = (kind.rows(output).to(self.mean.dtype) - self.mean) * self.gain  # rows x positions x d
        g = kind.rows(gradient).to(self.mean.dtype) / torch.where(self.gain == 0, torch.inf, self.gain)
        if (positions := g.shape[1]) not in self.places:  # sent to the device once
            self.places[positions] = thinned(positions, min(positions, POSITIONS)).to(g.device)
        some = g[:, self.places[positions]].flatten(0, 1).unflatten(1, (groups, -1))
        self.metric += torch.einsum("ngi,ngj->gij", some, some)
        whole = (g * y).sum((1, 2))
        low = torch.bfloat16 if multiplies_bfloat16(y) else y.dtype
        bases = self.bases.to(low)
        y, g = (part.unflatten(2, (groups, -1)).transpose(1, 2).to(low) @ bases for part in (y, g))
        kept = (y * g).sum((1, 2), dtype=torch.float32).cumsum(1)  # rows x the largest rank
        lost = whole[:, None] - kept[:, [rank - 1 for rank in self.ranks]]  # rows x ranks
        if self.batch is not None and len(self.batch) != len(lost):  # maps of other batches: a detector's boxes
            lost = lost.sum(0, keepdim=True).expand_as(self.batch) / len(self.batch)
        self.batch = lost if self.batch is None else self.batch + lost

    def end_batch(self) -> None:
        if self.batch is not None:
            self.squares.append(self.batch.to(torch.float64).square())
            self.batch = None

    def found(self) -> Gradients:
        changes = torch.cat(self.squares).mean(0).sqrt().tolist() if self.squares else []
        return Gradients(tuple(self.metric), tuple(zip(self.ranks.values(), changes, strict=bool(changes))))


def _ranks(values: Tensor) -> dict[int, float]:
    """The smallest ranks that lose no more than LOSSES of the sum of ``values``, and what they lose."""
    total = float(values.sum())
    if not total > 0:
        return {}
    lost = (1 - values.cumsum(0) / total).clamp_min(0.0).tolist()  # lost[r - 1]: at rank r
    found = (next((rank for rank, share in enumerate(lost, 1) if share <= loss), len(lost)) for loss in LOSSES)
    return {rank: lost[rank - 1] for rank in sorted(set(found)) if rank < len(lost) and lost[rank - 1] > 0}


class Answer(NamedTuple):
    """A tensor the network returned. ``rows``: one for every image, or one in all where the first dimension is not that
    of the images. ``matrix``: whether these are the rows of a matrix, which may be scores of classes."""

    rows: Tensor
    matrix: bool

    @classmethod
    def of(cls, output: Tensor, size: int) -> Answer:
        by_image = output.dim() > 0 and len(output) == size
        return cls(output.reshape(size if by_image else 1, -1), by_image and output.dim() == 2)


def output_gradients(
    original: nn.Module,
    images: list[Batch],
    probes: dict[str, Probe],
    responses: Callable[[str], Responses],
    *,
    device: torch.device,
    seed: int,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Gradients]:
    """Of every layer of ``probes``. ``responses``: some of the layer's.

    Raises LeanconvError where the output cannot be differentiated, or is all zero or not finite. Cost: two to three
    passes of the images.
    """
    network = copied(original, share=True)
    layers = {name: _Layer.of(network, probe, responses(name)) for name, probe in probes.items()}
    zero = torch.zeros((), device=device, requires_grad=True)
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack, chosen_kernels(benchmark=False, deterministic=True):
        stack.enter_context(untouched_rng(seed))
        # Gradients of grouped convolutions take a CPU many times longer in bfloat16.
        low = all(getattr(module, "groups", 1) == 1 for module in network.modules())
        try:
            free = _shares(network, images, device, low=low)
        except Exception as error:
            if out_of_memory(error):
                raise
            low = False  # a network that takes its own precision only
            free = _shares(network, images, device, low=low)
        for layer in layers.values():
            hook = network.get_submodule(layer.module).register_forward_hook(layer.watch(zero))
            stack.callback(hook.remove)
        for batch in images:
            try:
                with torch.enable_grad():
                    answers = _answers(network, batch, device, low=low)
                torch.autograd.grad(_drawn(answers, free, generator), zero)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                said = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
                raise LeanconvError(f"the network's output cannot be differentiated ({said})") from error
            for layer in layers.values():
                layer.end_batch()
            step()
    return {name: layer.found() for name, layer in layers.items()}


def _answers(network: nn.Module, batch: Batch, device: torch.device, *, low: bool) -> list[Answer]:
    """``low``: in bfloat16 on CPUs that have it. Three digits are enough for a mean over some hundred draws."""
    inputs = batch.on(device)
    half = low and any(multiplies_bfloat16(one) for one in tensors(inputs))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        output = network(inputs)
    wide = [one.float() if one.dtype == torch.bfloat16 else one for one in tensors(output) if one.is_floating_point()]
    return [Answer.of(one, batch.size) for one in wide]


def _drawn(answers: list[Answer], free: list[float], generator: torch.Generator) -> Tensor:
    """The sum over images of v.o / |o|. Every image has its own draws, however images are cut into batches."""
    draws: list[list[Tensor]] = [[] for _ in answers]
    for row in range(max((len(rows) for rows, _ in answers), default=0)):
        for (rows, _), drawn in zip(answers, draws, strict=True):
            if row < len(rows):
                drawn.append(torch.randn(rows.shape[1], generator=generator))
    values = []
    for (rows, _), share, drawn in zip(answers, free, draws, strict=False):
        o = rows - share * rows.mean(1, keepdim=True) if share else rows
        size = torch.linalg.vector_norm(o.detach(), dim=1, keepdim=True)
        if not o.requires_grad or not bool(size.isfinite().all()) or not bool(size.any()):
            continue
        values.append((torch.stack(drawn).to(o) * o / torch.where(size > 0, size, torch.inf)).sum())
    if not values:
        raise LeanconvError("the network's outputs are all 0, not finite or do not depend on its layers")
    total: Tensor = torch.stack(values).sum() / len(values) ** 0.5
    return total


@torch.no_grad()
def _shares(network: nn.Module, images: list[Batch], device: torch.device, *, low: bool) -> list[float]:
    """``_free`` of each answer, by the first images: one alone does not show how answers vary."""
    found: list[list[Answer]] = []
    seen = 0
    for batch in images:
        if seen < SHOWN:
            found.append(_answers(network, batch, device, low=low))
            seen += batch.size
    return [_free([rows for rows, matrix in some if matrix]) for some in zip(*found, strict=False)]


def _free(parts: list[Tensor]) -> float:
    """How much of a change common to all columns of ``parts`` (images x columns) is ignored: all of it for scores of
    classes, as softmax does not see it, nothing for a regressor, and a share for outputs between the two."""
    if len({part.shape[1] for part in parts}) != 1 or parts[0].shape[1] == 1:
        return 0.0
    rows = torch.cat(parts)[:SHOWN]
    varying = rows - rows.mean(0)
    common, whole = float(rows.shape[1] * varying.mean(1).square().sum()), float(varying.square().sum())
    share = common / whole if whole > 0 else 0.0
    return min(1.0, max(0.0, (NUMBERS - share) / (NUMBERS - SCORES)))
