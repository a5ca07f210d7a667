"""One or two networks, timed in every runtime and at every batch size that was asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError, listing, unknown_name, whole
from leanconv.network.survey import survey
from leanconv.network.torchvision_detectors import kind_of
from leanconv.network.user_model import check_model, copied, model_failed, parse_device
from leanconv.progress import reporter
from leanconv.runtimes.bench.layers import LayerTime, layer_times, replaced
from leanconv.runtimes.bench.machine import machine, threads_set
from leanconv.runtimes.bench.measure import MEMORY, interleaved, paired_ratio, peak_bytes, timing, wait_for
from leanconv.runtimes.bench.report import Bench, Measurement
from leanconv.runtimes.runners import DTYPES, RUNTIMES, Conditions, Runner
from leanconv.runtimes.runners.torch import Torch, placed_input, placed_model
from leanconv.system.random_state import untouched_rng


def bench(
    networks: Mapping[str, nn.Module],
    *,
    shape: tuple[int, int, int] = (3, 224, 224),
    runtimes: Sequence[str] = ("torch",),
    batches: Sequence[int] = (1,),
    device: torch.device | str = "cpu",
    threads: int | None = None,
    dtype: str = "float32",
    channels_last: bool = False,
    seconds: float = 5.0,
    layers: bool = False,
    notes: Sequence[str] = (),
    progress: bool = True,
) -> Bench:
    """Time ``networks``, one or two by name and the original first, on images of ``shape`` (c x h x w; random).

    Every runtime is measured at every batch size for about ``seconds``, after a warm-up of at most as long.
    ``threads=None``: as many as torch has now; they are put back. ``layers``: in torch, layer by layer too.
    No network is modified.
    """
    _check(networks, runtimes, dtype, seconds, layers)
    sizes = [whole("batch", batch, 1) for batch in dict.fromkeys(batches)]
    device = parse_device(device)
    if threads is not None:
        whole("threads", threads, 1)
    names = list(dict.fromkeys(runtimes))
    detector = kind_of(next(iter(networks.values()))) is not None
    with untouched_rng(0), threads_set(threads) as count:
        conditions = Conditions(device=device, threads=count, dtype=dtype, channels_last=channels_last)
        for name, network in itertools.product(names, networks.values()):
            RUNTIMES[name].refuse(network, conditions)
        facts = machine(device, count)
        macs = _macs(networks, _example(shape, 1, detector))
        measurements = []
        with reporter(progress).stage("timing", len(names) * len(sizes)) as stage:
            for name, batch in itertools.product(names, sizes):
                stage.label(f"{name}, batch {batch}")
                example = _example(shape, batch, detector)
                measurements.append(_measured(RUNTIMES[name], networks, example, conditions, seconds))
                stage.advance()
        by_layer: dict[int, list[LayerTime]] = {}
        for batch in sizes if layers else []:
            example = _example(shape, batch, detector)
            by_layer[batch] = _layers(networks, example, conditions, seconds, progress)
    return Bench(
        networks=tuple(networks),
        machine=facts,
        conditions={
            "device": str(device),
            "runtimes": names,
            "dtype": dtype,
            "channels_last": channels_last,
            "seconds": seconds,
            "input": ("lists of " if detector else "") + "images of " + " x ".join(map(str, shape)),
        },
        measurements=measurements,
        macs=macs,
        memory_kind=MEMORY["cuda" if device.type == "cuda" else "cpu"],
        layers=by_layer,
        notes=tuple(notes),
    )


def _check(
    networks: Mapping[str, nn.Module], runtimes: Sequence[str], dtype: str, seconds: float, layers: bool
) -> None:
    if len(networks) not in (1, 2):
        raise LeanconvError(f"{len(networks)} networks were given; give one, or two with different names.")
    for network in networks.values():
        check_model(network)
    kinds = {kind_of(network) for network in networks.values()}
    if len(kinds) > 1:
        raise LeanconvError(f"{' and '.join(networks)} are not of one kind; give two classifiers or two detectors.")
    for name in runtimes:
        if name not in RUNTIMES:
            raise unknown_name(name, RUNTIMES, what="runtime", where="--runtime")
    if dtype not in DTYPES:
        raise LeanconvError(f"dtype={dtype!r} is not known; use {listing(DTYPES)}.")
    if not 0 < seconds < math.inf:
        raise LeanconvError(f"seconds={seconds!r} must be above 0.")
    if layers and (len(networks) < 2 or kinds != {None} or Torch.name not in runtimes):
        raise LeanconvError(
            "layers are timed for two networks that are no detectors, in the runtime torch; leave --layers out."
        )


def _example(shape: tuple[int, int, int], batch: int, detector: bool) -> Any:
    """A batch of noise from 0 to 1, float32 on the CPU; for a detector a list of images."""
    noise = torch.rand((batch, *shape), generator=torch.Generator().manual_seed(0))
    return list(noise) if detector else noise


def _macs(networks: Mapping[str, nn.Module], image: Any) -> dict[str, int] | None:
    """Of one image, also to see that the networks take it at all; None for detectors, where it depends on the boxes."""
    macs = {}
    for name, network in networks.items():
        plain = copied(network, share=True).eval()
        weight = next(plain.parameters(), torch.zeros(()))
        sample = placed_input(image, Conditions(device=weight.device))
        try:
            with torch.no_grad():
                if not isinstance(sample, Tensor):
                    plain(sample)
                    continue
                macs[name] = survey(plain, sample.to(weight.dtype), layers="all").macs
        except LeanconvError:
            raise
        except Exception as error:
            raise model_failed(error, sample) from error
    return macs or None


def _measured(
    runner: Runner, networks: Mapping[str, nn.Module], example: Any, conditions: Conditions, seconds: float
) -> Measurement:
    calls = {name: runner.prepare(network, example, conditions) for name, network in networks.items()}
    rounds = interleaved(calls, seconds=seconds, finish=wait_for(conditions.device))
    # None where torch does not see the memory: in other libraries, in recorded graphs, in compiled code on a CPU.
    memory: dict[str, int | None] = dict.fromkeys(networks)
    if runner.shows_memory(conditions.device):
        # Where a GPU's allocator counts, only the sizes of the weights matter: no second copy on the GPU.
        host = replace(conditions, device=torch.device("cpu"))
        for name, network in networks.items():
            plain, images = placed_model(network, host), placed_input(example, host)
            memory[name] = peak_bytes(plain, images, calls[name], conditions.device)
    runner.clear()
    first, *rest = rounds.times.values()
    return Measurement(
        runtime=runner.name,
        batch=len(example),
        times={name: timing(times) for name, times in rounds.times.items()},
        memory=memory,
        ratio=paired_ratio(first, rest[0]) if rest else None,
        warm_up=rounds.warm_up,
        settled=rounds.settled,
    )


def _layers(
    networks: Mapping[str, nn.Module], example: Tensor, conditions: Conditions, seconds: float, progress: bool
) -> list[LayerTime]:
    original, accelerated = (placed_model(network, conditions) for network in networks.values())
    images, finish = placed_input(example, conditions), wait_for(conditions.device)
    with reporter(progress).stage("timing layers", len(replaced(original, accelerated))) as stage:
        return layer_times(original, accelerated, images, seconds=seconds, finish=finish, step=stage.advance)
