"""What several commands are given: options they share, and the network and pictures those name."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanconv.errors import LeanconvError, listing, unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from leanconv.images import Preprocess
    from leanconv.network.source import Source

Model = Annotated[
    str,
    typer.Argument(
        help="A torchvision builder (vgg16), timm:NAME, leanconv:NAME (spp10, vgg16_cifar, resnet20_cifar), "
        "file.py:callable, or a saved folder."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Weights by torchvision's name (DEFAULT), a .safetensors or .pth file, or 'none' (random)."),
]
Original = Annotated[
    str | None, typer.Option("--model", help="file.py:callable of the original, for a folder made from one.")
]
Classes = Annotated[
    int | None, typer.Option("--num-classes", min=1, help="Outputs of the network, if not its usual ones.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: cuda if there is one.")]
Batch = Annotated[int, typer.Option(min=1, help="Images a batch.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that decode images. Default: as many as cores, at most 8.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Size = Annotated[int | None, typer.Option(min=1, help="Side of the square the network takes (224).")]
Resize = Annotated[int | None, typer.Option(min=1, help="Shorter side before the centre crop (size * 256 / 224).")]
Channels = Annotated[int | None, typer.Option(min=1, max=3, help="3 for colour (default), 1 for grey.")]
Mean = Annotated[str | None, typer.Option(help="Mean to subtract, R,G,B in 0..1 (ImageNet's).")]
Std = Annotated[str | None, typer.Option(help="Deviation to divide by, R,G,B in 0..1 (ImageNet's).")]


@dataclass(frozen=True)
class Network:
    """A network, where it comes from, and the preset its weights were trained with, by torchvision's name."""

    model: nn.Module
    source: Source
    preset: str | None = None


def load_network(spec: str, weights: str | None, classes: int | None, *, default_weights: str) -> Network:
    """The network ``spec`` names. ``default_weights`` is what no --weights means for a named network."""
    from leanconv.network.source import Source, build

    library, colon, name = spec.partition(":")
    if not colon:
        library, name = "torchvision", spec
    elif library not in ("timm", "leanconv"):
        return _from_file(spec, weights)
    source = Source(library=library, name=name, classes=classes)  # type: ignore[arg-type]
    asked = default_weights if weights is None else weights
    if _is_file(asked):
        model = build(source)
        _fill(model, Path(asked))
        return Network(model, source)
    if asked.lower() == "none":
        return Network(build(source), source)
    if library == "timm":
        return Network(_downloaded(lambda: build(source, pretrained=True), spec), source)
    if library == "leanconv":
        build(source)  # says if there is no such network, and which are near
        missing = "" if weights is None else f", and {weights!r} is no file"
        raise LeanconvError(
            f"MODEL {spec!r} has no trained weights by name{missing}; give --weights FILE, or --weights none for "
            "random ones."
        )
    return _torchvision(source, asked)


def _torchvision(source: Source, asked: str) -> Network:
    import torchvision

    from leanconv.network.source import build

    try:
        names = torchvision.models.get_model_weights(source.name)
    except ValueError:
        build(source)  # says that there is no such network, and which are near
        raise
    wanted = asked.rpartition(".")[2]
    if wanted not in names.__members__:
        if Path(asked).suffix or os.sep in asked:
            raise LeanconvError(f"--weights {asked!r} does not exist; give a .safetensors or .pth file.")
        raise unknown_name(asked, ["none", *names.__members__], what="weights", where="--weights")
    chosen = names[wanted]
    if source.classes is not None:
        raise LeanconvError(
            "--num-classes does not go with trained weights by name, whose outputs are fixed; give --weights FILE."
        )
    model = _downloaded(lambda: build(source, pretrained=chosen), source.name)
    return Network(model, source, str(chosen))


def _downloaded(build_it: Any, name: str) -> Any:
    try:
        return build_it()
    except LeanconvError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise LeanconvError(
            f"the trained weights of {name!r} could not be fetched ({type(error).__name__}: {said}); give a file with "
            "--weights FILE, or --weights none for random ones."
        ) from None


def _is_file(value: str) -> bool:
    return Path(value).is_file()


def _from_file(spec: str, weights: str | None) -> Network:
    """``file.py:callable``: run the user's own file, because the user named it on this command line."""
    from torch import nn

    from leanconv.network.source import Source

    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise LeanconvError(f"MODEL {spec!r}: there is no file {path!r}; give file.py:callable.")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if module_spec is None or module_spec.loader is None:
        raise LeanconvError(f"MODEL {spec!r}: {path!r} is not a Python file; give file.py:callable.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    # For imports of files beside it, also later when the network runs; last, so that none shadows a library.
    sys.path.append(str(Path(path).resolve().parent))
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, name):
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise unknown_name(name, names, what="callable", where=path)
        model = getattr(module, name)()
    except LeanconvError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())[:300]
        raise LeanconvError(f"MODEL {spec!r} raised {type(error).__name__}: {said}; it must run by itself.") from error
    if not isinstance(model, nn.Module):
        raise LeanconvError(f"MODEL {spec!r} returned a {type(model).__name__}; it must return a torch.nn.Module.")
    if weights is not None and weights.lower() != "none":
        if not _is_file(weights):
            raise LeanconvError(f"--weights {weights!r} does not exist; give a .safetensors or .pth file.")
        _fill(model, Path(weights))
    return Network(model, Source(library="other", name=spec))


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """A state dict from safetensors or from a torch file read with ``weights_only``."""
    import safetensors.torch
    import torch

    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise LeanconvError(
            f"--weights {str(path)!r} cannot be read as plain weights ({type(error).__name__}); give a safetensors "
            "file or a state dict saved with torch.save(model.state_dict(), ...)."
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided
        for key, value in state.items()
    ):
        raise LeanconvError(f"--weights {str(path)!r} holds no state dict; save model.state_dict().")
    if state and all(key.startswith("module.") for key in state):  # as DataParallel writes them
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def _fill(model: nn.Module, path: Path) -> None:
    state, own = read_state(path), model.state_dict()
    missing = [key for key in own if key not in state]
    extra = [key for key in state if key not in own]
    shapes = [key for key in own if key in state and own[key].shape != state[key].shape]
    problems = [f"{word} {listing(keys, 3)}" for word, keys in (("lacks", missing), ("has unknown", extra)) if keys]
    problems += [f"{key} is {tuple(state[key].shape)}, the network has {tuple(own[key].shape)}" for key in shapes[:2]]
    if problems:
        hint = " (see --num-classes)" if shapes and not missing and not extra else ""
        raise LeanconvError(f"--weights {str(path)!r} does not fit the network: it {'; '.join(problems)}{hint}.")
    model.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})


def is_saved(spec: str) -> bool:
    """Whether MODEL is a folder ``result.save`` may have written."""
    return Path(spec).is_dir()


def preprocess(
    preset: str | None,
    *,
    size: int | None,
    resize: int | None,
    channels: int | None,
    mean: str | None,
    std: str | None,
    base: Preprocess | None = None,
) -> Preprocess:
    """The weights' own preset unless the user says otherwise; ``base`` is what counts for what they do not say."""
    from leanconv.images import Preprocess

    if channels == 2:
        raise LeanconvError("--channels 2 is not an image; use 3 for colour or 1 for grey.")
    if preset is not None and channels == 1:
        raise LeanconvError("--channels 1 does not go with trained weights by name, which take colour.")
    if preset is not None and size is None and resize is None and mean is None and std is None:
        import torchvision

        return Preprocess(channels=channels or 3, transform=torchvision.models.get_weight(preset).transforms())
    base = base or _preset_numbers(preset)
    side, depth = size or base.size, channels or base.channels
    deviation = _numbers("--std", std, depth) if std else base.std
    if any(value <= 0 for value in deviation):
        raise LeanconvError(f"--std {std!r} must be above 0.")
    return Preprocess(
        size=side,
        resize=resize or (base.resize if side == base.size else round(side * 256 / 224)),
        channels=depth,
        mean=_numbers("--mean", mean, depth) if mean else base.mean,
        std=deviation,
    )


def _preset_numbers(preset: str | None) -> Preprocess:
    """The sizes, mean and deviation of a preset, to change one of them and keep the others."""
    from leanconv.images import Preprocess

    if preset is None:
        return Preprocess()
    import torchvision

    found = Preprocess(transform=torchvision.models.get_weight(preset).transforms()).numbers()
    if found is None:
        raise LeanconvError(
            f"the preprocessing of {preset!r} cannot be changed; leave --size, --resize, --mean and --std."
        )
    return found


def _numbers(option: str, text: str, channels: int) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != channels or not all(math.isfinite(value) for value in values):
        raise LeanconvError(f"{option} {text!r} must be {channels} numbers with commas, for example 0.485,0.456,0.406.")
    return values


def pick_device(asked: str | None) -> torch.device:
    import torch

    from leanconv.network.user_model import parse_device

    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return parse_device(asked)
    except LeanconvError as error:
        raise LeanconvError(f"--{error}") from None


def processes() -> int:
    """How many torchrun has started, this one among them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def team(asked: str | None) -> Iterator[tuple[torch.device, bool]]:
    """This process's device, and whether it leads. Under torchrun, with the process group every process joins."""
    if processes() == 1:
        yield pick_device(asked), True
        return
    import torch
    import torch.distributed as dist

    place = pick_device(asked)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield place, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
        time.sleep(0.3)  # gloo's threads let go of what was exchanged last; while the interpreter ends, that aborts it


def pick_workers(asked: int | None) -> int:
    from leanconv.runtimes.bench.machine import cores

    return min(8, cores()) if asked is None else asked
