"""Responses of sites at sampled positions, for one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batches, to_device
from leanconv.calibrate.patches import choose_positions, conv_patches, linear_patches
from leanconv.errors import LeanconvError
from leanconv.network.sites import Site


@dataclass(frozen=True)
class Probe:
    """What to compute at a site from the input it receives: ``weight`` (d x c x kh x kw), ``bias`` (d)."""

    site: Site
    weight: Tensor
    bias: Tensor


class _Reached(Exception):
    """The last probe has what it wants; the rest of the network need not run."""


def collect(
    model: nn.Module,
    batches: Batches,
    probes: Sequence[Probe],
    *,
    samples: int,
    seed: int,
    device: torch.device,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Responses (n x d) of every probe over all images, n about ``samples``.

    Hooks take a layer's *input* and compute the response from it, so operations in place behind the layer cannot
    spoil what was captured. The run of each batch stops after the last probe.
    """
    found: dict[str, list[Tensor]] = {probe.site.name: [] for probe in probes}
    unsound: dict[str, Tensor] = {}
    per_image = max(1, -(-samples // batches.images))
    waiting: set[str] = set()
    batch_number = 0

    def capture(probe: Probe, x: Tensor) -> None:
        site = probe.site
        bad = ~torch.isfinite(x).all()
        unsound[site.name] = unsound[site.name] | bad if site.name in unsound else bad
        found[site.name].append(_responses(probe, x, per_image, (seed, site.index, batch_number)))
        waiting.discard(site.name)
        if not waiting:
            raise _Reached

    with torch.no_grad(), _captured(model, probes, capture):
        for batch_number, batch in enumerate(batches.items):  # noqa: B007 - capture() reads it
            waiting.update(found)
            try:
                model(to_device(batch, device))
            except _Reached:
                pass
            except LeanconvError:
                raise
            except Exception as error:
                raise model_failed(error, batch) from error
            step()
    for name, flag in unsound.items():
        if bool(flag):
            raise LeanconvError(
                f"layer {name!r} receives NaN or infinite values on these images; check the images' preprocessing "
                "and the layers before it."
            )
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def _responses(probe: Probe, x: Tensor, per_image: int, seed: tuple[int, int, int]) -> Tensor:
    geometry = probe.site.geometry
    if geometry.kind == "linear":
        positions = x[0].numel() // x.shape[-1]
        chosen = choose_positions(len(x), positions, per_image, seed).to(x.device)
        patches = linear_patches(x, chosen)
    else:
        left, right, top, bottom = geometry.margins()
        height = _out_length(x.shape[2] + top + bottom, geometry.kernel[0], geometry.stride[0], geometry.dilation[0])
        width = _out_length(x.shape[3] + left + right, geometry.kernel[1], geometry.stride[1], geometry.dilation[1])
        chosen = choose_positions(len(x), height * width, per_image, seed).to(x.device)
        patches = conv_patches(x, geometry, width, chosen)
    return torch.addmm(probe.bias, patches.to(probe.weight.dtype), probe.weight.flatten(1).T)


def _out_length(length: int, kernel: int, stride: int, dilation: int) -> int:
    return (length - dilation * (kernel - 1) - 1) // stride + 1


@contextmanager
def _captured(model: nn.Module, probes: Sequence[Probe], capture: Callable[[Probe, Tensor], None]) -> Iterator[None]:
    """Hooks at the probes' layers (or what stands in their place); they come off on any error."""
    handles = []
    for probe in probes:

        def hook(module: nn.Module, args: Any, kwargs: Mapping[str, Any], probe: Probe = probe) -> None:
            capture(probe, args[0] if args else next(iter(kwargs.values())))

        layer = model.get_submodule(probe.site.name)
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def model_failed(error: Exception, batch: Any) -> LeanconvError:
    """The user's network refused a batch: say what it was given and what it said."""
    shape = tuple(batch.shape) if isinstance(batch, Tensor) else [tuple(image.shape) for image in batch[:3]]
    said = " ".join(str(error).split())[:300]
    return LeanconvError(
        f"the model raised {type(error).__name__} on a batch of shape {shape}: {said}; give images it accepts."
    )
