"""A saved result: ``model.safetensors``, ``spectra.json`` and ``leanconv.json``. Nothing is pickled and nothing named
in a file is run.

A folder appears whole or not at all: it is written beside its place and renamed into it. The JSON carries the
checksum of the other files and of itself, so a damaged or edited folder is refused by name instead of loading wrong.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from leanconv import __version__
from leanconv.config import Options
from leanconv.errors import LeanconvError, listing
from leanconv.forms.replace import Change, replace
from leanconv.network.source import Source, build
from leanconv.network.user_model import copied
from leanconv.ranks import KeptSpectra
from leanconv.result import PLAIN, Accelerated, HeldOut, LayerReport
from leanconv.runtimes.target import Measured
from leanconv.system.atomic_files import (
    cannot_write,
    check_absent,
    check_name,
    check_parent,
    exists_already,
    flush,
    part_beside,
)

FORMAT = "leanconv"
VERSION = 1
DESCRIPTION = "leanconv.json"
WEIGHTS = "model.safetensors"
SPECTRA = "spectra.json"  # what ranks were chosen by
# Plain fields of a result that older folders lack.
LATER = ("training", "command")


def save(result: Accelerated, folder: Path) -> Path:
    """Write ``result`` to ``folder``, which must not exist yet."""
    check_new(folder)
    try:
        with part_beside(folder) as part:
            weights = part / WEIGHTS
            safetensors.torch.save_file(_tensors(result.model), weights)
            data = {
                "format": FORMAT,
                "version": VERSION,
                "made_with": _versions(),
                **result.to_json(),
                "changes": [change.to_json() for change in result.changes],
                "weights": _described(weights),
            }
            if result.spectra is not None:
                (part / SPECTRA).write_text(json.dumps(result.spectra.to_json()) + "\n")
                data["spectra"] = _described(part / SPECTRA)
            data["sha256"] = _digest(data)
            (part / DESCRIPTION).write_text(json.dumps(data, indent=1) + "\n")
            flush(part)
            os.rename(part, folder)
    # safetensors reports a full disk in an error of its own.
    except (OSError, safetensors.SafetensorError) as error:
        if getattr(error, "errno", None) in (errno.EEXIST, errno.ENOTEMPTY):
            raise exists_already(folder) from None
        raise cannot_write(folder, error) from error
    return folder


def _versions() -> dict[str, str]:
    """Of what computed, as far as it is known here; the GPU's name where this process used one."""
    found = {"leanconv": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("torchvision", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.cuda.is_initialized():
        found |= {"cuda": str(torch.version.cuda), "device": torch.cuda.get_device_name()}
    return found


def check_new(folder: Path) -> None:
    """Refuse a place that cannot take a new folder, before any work is done for it."""
    check_name(folder, "folder")
    check_absent(folder)
    check_parent(folder)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, every tensor with memory of its own: tied weights are written once a name."""
    odd = [key for key, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise LeanconvError(
            f"the network keeps something other than tensors in its state ({listing(odd, 3)}), which safetensors "
            "cannot hold; use result.model in this process."
        )
    return {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}


def load(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The accelerated network saved in ``folder``, in eval mode on the CPU, with the weights that were saved.

    ``model``: the original network, with any weights, where leanconv cannot build it by name. It is not modified.

    Examples:
        >>> import leanconv, torch
        >>> network, images = leanconv.models.character_cnn(), torch.rand(16, 1, 24, 24)
        >>> result = leanconv.accelerate(network, images, 2, solver="linear", samples=500, progress=False)
        >>> folder = result.save("characters-2x")
        >>> torch.equal(leanconv.load("characters-2x")(images), result.model(images))
        True
    """
    return load_result(folder, model).model


def load_result(folder: str | Path, model: nn.Module | None = None) -> Accelerated:
    """Like ``load``, with everything that was known when it was saved."""
    folder = Path(folder)
    if model is not None and not isinstance(model, nn.Module):
        raise LeanconvError(f"model is a {type(model).__name__}; give the original network, a torch.nn.Module.")
    data = read_description(folder)
    try:
        weights = _weights(folder, data)
        source = Source.from_json(data["source"])
        changes = [Change.from_json(change) for change in data["changes"]]
        options = Options.from_json(data["options"])
        layers = [LayerReport(**{**layer, "ranks": tuple(layer["ranks"])}) for layer in data["layers"]]
        facts: dict[str, Any] = {key: data.get(key) if key in LATER else data[key] for key in PLAIN}
        timing = None if data.get("timing") is None else Measured.from_json(data["timing"])
        check = None if data.get("check") is None else HeldOut.from_json(data["check"])
        spectra = read_spectra(folder, data)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if isinstance(error, LeanconvError):
            raise
        raise LeanconvError(
            f"{str(folder / DESCRIPTION)!r} lacks or garbles {error}; save the network again."
        ) from None
    # Building draws random numbers for weights that are about to be overwritten; the user's stay untouched.
    with torch.random.fork_rng(devices=[]):
        network = build(source) if model is None else copied(model).cpu()
        _apply(changes, network, folder, source)
    _fill(network, weights, folder, source)
    return Accelerated(
        model=network.eval(),
        layers=layers,
        **facts,
        changes=changes,
        options=options,
        source=source,
        spectra=spectra,
        timing=timing,
        check=check,
    )


def _apply(changes: list[Change], network: nn.Module, folder: Path, source: Source) -> None:
    for change in changes:
        try:
            replace(network, change)
        except (AttributeError, AssertionError, RuntimeError, ValueError, TypeError, IndexError):
            raise LeanconvError(
                f"the network has no layer {change.name!r} that fits; {str(folder)!r} was made from {source.name!r}, "
                "give a network of the same architecture."
            ) from None


def read_description(folder: Path) -> dict[str, Any]:
    """The checked content of ``leanconv.json``."""
    path = folder / DESCRIPTION
    if not folder.is_dir():
        raise LeanconvError(f"{str(folder)!r} is not a folder; give one that result.save() wrote.")
    if not path.is_file():
        raise LeanconvError(f"{str(folder)!r} has no {DESCRIPTION}; give a folder that result.save() wrote.")
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise LeanconvError(f"{str(path)!r} is damaged ({error}); save the network again.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LeanconvError(f"{str(path)!r} is not a leanconv description.")
    if data.get("version") != VERSION:
        raise LeanconvError(
            f"{str(path)!r} has version {data.get('version')!r}, this leanconv reads {VERSION}; use the release that "
            "wrote it or save the network again."
        )
    stated = data.pop("sha256", None)
    if stated != _digest(data):
        raise LeanconvError(f"{str(path)!r} was changed after it was saved; save the network again.")
    return data


def read_spectra(folder: Path, data: dict[str, Any]) -> KeptSpectra | None:
    """The checked content of ``spectra.json``; None where it was not saved or was removed since: the network does not
    need it. ``data``: that of ``read_description``."""
    path = folder / SPECTRA
    if data.get("spectra") is None or not path.is_file():
        return None
    _check(path, data["spectra"])
    try:
        return KeptSpectra.from_json(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise LeanconvError(f"{str(path)!r} lacks or garbles {error}; save the network again.") from None


def _weights(folder: Path, data: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise LeanconvError(f"{str(folder)!r} has no {WEIGHTS}; copy the whole folder or save the network again.")
    _check(path, data["weights"])
    return safetensors.torch.load_file(path)


def _described(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}


def _check(path: Path, described: dict[str, Any]) -> None:
    """Refuse a file that is not the one ``_described``."""
    size = path.stat().st_size
    if size != described["bytes"]:
        raise LeanconvError(
            f"{str(path)!r} has {size} bytes, {described['bytes']} were saved; it is truncated or another file, "
            "copy it again."
        )
    if _sha256(path) != described["sha256"]:
        raise LeanconvError(f"{str(path)!r} was changed after it was saved (checksum differs); copy it again.")


def _fill(network: nn.Module, weights: dict[str, Tensor], folder: Path, source: Source) -> None:
    """Put the saved tensors in, in the dtype they were saved in."""
    state = network.state_dict()
    wrong = sorted(
        set(state) ^ set(weights) | {k for k in set(state) & set(weights) if state[k].shape != weights[k].shape}
    )
    if wrong:
        raise LeanconvError(
            f"the network built does not fit {str(folder)!r} (made from {source.name!r}): {listing(wrong, 3)} differ; "
            "give a network of the same architecture."
        )
    for path, module in network.named_modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                saved = weights.get(f"{path}.{key}" if path else key)
                if tensor is not None and saved is not None:
                    tensor.data = tensor.data.to(saved.dtype)
    # The network's own state dict carries versions of modules that a plain dict does not.
    for key in state:
        state[key] = weights[key]
    network.load_state_dict(state)


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
