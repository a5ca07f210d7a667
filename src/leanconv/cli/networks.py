"""From MODEL to a network with its weights and its preprocessing."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from leanconv.cli.common import ImageOptions, NetworkOptions, is_saved
from leanconv.errors import LeanconvError, listing, unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from leanconv.images import Preprocess
    from leanconv.network.source import Source
    from leanconv.result import Accelerated


RANDOM = NetworkOptions()


@dataclass(frozen=True)
class Opened:
    """A network; torchvision's name of its trained weights, the preprocessing of a saved folder, and how to build the
    network again, each where there is one."""

    model: nn.Module
    preset: str | None = None
    remembered: Preprocess | None = None
    source: Source | None = None

    @property
    def has_preprocessing(self) -> bool:
        return self.preset is not None or self.remembered is not None

    def preprocess(self, options: ImageOptions) -> Preprocess:
        """That of the weights or of the folder, changed by the options."""
        from leanconv.images import Preprocess

        if options.channels == 2:
            raise LeanconvError("--channels 2 is not an image; use 3 for colour or 1 for grey.")
        base = self.remembered or Preprocess()
        if self.preset is not None:
            import torchvision

            if options.channels == 1:
                raise LeanconvError("--channels 1 does not go with trained weights by name, which take colour.")
            known = Preprocess(transform=torchvision.models.get_weight(self.preset).transforms())
            if replace(options, channels=None) == ImageOptions():
                return known
            numbers = known.numbers()
            if numbers is None:
                raise LeanconvError(
                    f"the preprocessing of {self.preset!r} cannot be changed; leave --size, --resize, --mean and --std."
                )
            base = numbers
        size, channels = options.size or base.size, options.channels or base.channels
        std = _numbers("--std", options.std, channels) if options.std else base.std
        if any(value <= 0 for value in std):
            raise LeanconvError(f"--std {options.std!r} must be above 0.")
        return Preprocess(
            size=size,
            resize=options.resize or (base.resize if size == base.size else round(size * 256 / 224)),
            channels=channels,
            mean=_numbers("--mean", options.mean, channels) if options.mean else base.mean,
            std=std,
        )


def _numbers(option: str, text: str, channels: int) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != channels or not all(math.isfinite(value) for value in values):
        raise LeanconvError(f"{option} {text!r} must be {channels} numbers with commas, for example 0.485,0.456,0.406.")
    return values


def load_network(spec: str, options: NetworkOptions = RANDOM, default_weights: str = "none") -> Opened:
    """The network with the name ``spec``. ``default_weights`` are those of a named network without --weights."""
    from leanconv.network.source import Source, build

    library, colon, name = spec.partition(":")
    if not colon:
        library, name = "torchvision", spec
    elif library not in ("timm", "leanconv"):
        return _from_file(spec, options.weights)
    source = Source(library=library, name=name, classes=options.num_classes)  # type: ignore[arg-type]
    asked = default_weights if options.weights is None else options.weights
    if Path(asked).is_file():
        return Opened(_filled(build(source), Path(asked)), source=source)
    if asked.lower() == "none":
        return Opened(build(source), source=source)
    if library == "timm":
        return Opened(_downloaded(lambda: build(source, pretrained=True), spec), source=source)
    if library == "leanconv":
        build(source)  # says if there is no such network, and which are near
        missing = "" if options.weights is None else f", and {options.weights!r} is no file"
        raise LeanconvError(
            f"MODEL {spec!r} has no trained weights by name{missing}; give --weights FILE, or --weights none for "
            "random ones."
        )
    return _torchvision(source, asked)


def _torchvision(source: Source, asked: str) -> Opened:
    import torchvision

    from leanconv.network.source import build

    try:
        names = torchvision.models.get_model_weights(source.name)
    except ValueError:
        build(source)  # says that there is no such network, and which are near
        raise
    name = asked.rpartition(".")[2]
    if name not in names.__members__:
        if Path(asked).suffix or os.sep in asked:
            raise LeanconvError(f"--weights {asked!r} does not exist; give a .safetensors or .pth file.")
        raise unknown_name(asked, ["none", *names.__members__], what="weights", where="--weights")
    chosen = names[name]
    if source.classes is not None:
        raise LeanconvError(
            "--num-classes does not go with trained weights by name, whose outputs are fixed; give --weights FILE."
        )
    model = _downloaded(lambda: build(source, pretrained=chosen), source.name)
    return Opened(model, str(chosen), source=source)


def _downloaded(build_it: Callable[[], nn.Module], name: str) -> nn.Module:
    try:
        return build_it()
    except LeanconvError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise LeanconvError(
            f"the trained weights of {name!r} could not be fetched ({type(error).__name__}: {message}); give a file "
            "with --weights FILE, or --weights none for random ones."
        ) from None


def _from_file(spec: str, weights: str | None) -> Opened:
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
        message = " ".join(str(error).split())[:300]
        raise LeanconvError(
            f"MODEL {spec!r} raised {type(error).__name__}: {message}; it must run by itself."
        ) from error
    if not isinstance(model, nn.Module):
        raise LeanconvError(f"MODEL {spec!r} returned a {type(model).__name__}; it must return a torch.nn.Module.")
    if weights is not None and weights.lower() != "none":
        if not Path(weights).is_file():
            raise LeanconvError(f"--weights {weights!r} does not exist; give a .safetensors or .pth file.")
        _filled(model, Path(weights))
    return Opened(model, source=Source(library="other", name=spec))


def _state_of(path: Path) -> dict[str, torch.Tensor]:
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


def _filled(model: nn.Module, path: Path) -> nn.Module:
    state, own = _state_of(path), model.state_dict()
    missing, extra = [key for key in own if key not in state], [key for key in state if key not in own]
    shapes = [key for key in own if key in state and own[key].shape != state[key].shape]
    problems = [f"{word} {listing(keys, 3)}" for word, keys in (("lacks", missing), ("has unknown", extra)) if keys]
    problems += [f"{key} is {tuple(state[key].shape)}, the network has {tuple(own[key].shape)}" for key in shapes[:2]]
    if problems:
        hint = " (see --num-classes)" if shapes and not missing and not extra else ""
        raise LeanconvError(f"--weights {str(path)!r} does not fit the network: it {'; '.join(problems)}{hint}.")
    model.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})
    return model


def open_together(specs: Sequence[str], options: NetworkOptions, default_weights: str = "none") -> list[Opened]:
    """All of these; the weights belong to the first. A folder made from the user's own code is rebuilt by the original,
    or else by the network it is compared with."""
    from leanconv.storage.folder import read_description

    plain = next((spec for spec in specs if not is_saved(spec)), None)
    networks = []
    for index, spec in enumerate(specs):
        base = options.original
        if not is_saved(spec):
            base = None if any(map(is_saved, specs)) else base
        elif base is None and read_description(Path(spec))["source"]["library"] == "other":
            base = plain
        of_this = replace(options, original=base, weights=None if index else options.weights)
        networks.append(open_network(spec, of_this, default_weights))
    return networks


def preprocess_together(networks: Sequence[Opened], specs: Sequence[str], options: ImageOptions) -> Preprocess:
    """That of the first network that has its own. If networks differ, the user must choose."""
    own = [network for network in networks if network.has_preprocessing]
    known = [network.preprocess(options).to_json(network.preset) for network in own]
    if any(each != known[0] for each in known) and options == ImageOptions():
        raise LeanconvError(
            f"{' and '.join(specs)} were made for different preprocessing; give --size, --resize, --mean or --std for "
            "both."
        )
    return first_with_preprocessing(networks).preprocess(options)


def first_with_preprocessing(networks: Sequence[Opened]) -> Opened:
    return next((network for network in networks if network.has_preprocessing), networks[0])


def open_network(spec: str, options: NetworkOptions, default_weights: str = "none") -> Opened:
    """A saved folder, or ``load_network``."""
    if not is_saved(spec):
        if options.original is not None:
            raise LeanconvError(f"--model goes with a saved folder, and {spec!r} is none.")
        return load_network(spec, options, default_weights)
    from leanconv.storage.folder import load_result

    if options.weights is not None:
        raise LeanconvError("--weights does not go with a saved folder, which has its own.")
    base = None
    if options.original is not None:
        base = load_network(options.original, NetworkOptions(num_classes=options.num_classes)).model
    return opened(load_result(Path(spec), base))


def opened(result: Accelerated) -> Opened:
    """The network of a saved result, with its preprocessing."""
    from leanconv.images import Preprocess

    if result.preprocess is None:
        return Opened(result.model)
    return Opened(result.model, result.preprocess["preset"], Preprocess.from_json(result.preprocess))
