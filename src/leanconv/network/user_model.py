"""The user's model: checks, copies, its device, and the error message when it fails."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from leanconv.errors import LeanconvError
from leanconv.network.function_trace import tensors


def check_model(model: Any) -> None:
    """Refuse what cannot be copied, run or trusted, before any time is spent on it."""
    if not isinstance(model, nn.Module):
        raise LeanconvError(f"model is a {type(model).__name__}; give a torch.nn.Module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise LeanconvError("model is a TorchScript module; give the nn.Module it was made from.")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise LeanconvError(f"model is wrapped in {type(model).__name__}; give model.module.")
    if type(model).__name__ == "OptimizedModule":
        raise LeanconvError("model was made by torch.compile; give the module it was made from (model._orig_mod).")
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        layer, _, kind = name.rpartition(".")
        if is_lazy(tensor):
            raise LeanconvError(
                f"layer {layer!r} is lazy and has no {kind} yet; run the network once on an image first."
            )
        if tensor.is_meta:
            raise LeanconvError(f"layer {layer!r} is on the meta device and has no values; load the weights first.")
    real = {name: tensor for name, tensor in named if tensor.is_floating_point() and tensor.layout == torch.strided}
    # All at once first: reading a value from a GPU takes time.
    if bool(torch.isfinite(get_total_norm(list(real.values()), math.inf))):
        return
    for name, tensor in real.items():
        layer, _, kind = name.rpartition(".")
        # A mask kept in a buffer may rightly be infinite; a weight may not.
        infinite_is_fine = not isinstance(tensor, nn.Parameter) and not kind.startswith("running_")
        sound = ~torch.isnan(tensor) if infinite_is_fine else torch.isfinite(tensor)
        if not bool(sound.all()):
            raise LeanconvError(
                f"layer {layer!r} has NaN or infinite values in its {kind}; repair or retrain the network first."
            )


def model_failed(error: Exception, batch: Any) -> LeanconvError:
    """An error of the user's network on a batch, with the shape of the batch and the message."""
    shapes = [tuple(tensor.shape) for tensor in tensors(batch)][:3]
    shape = shapes[0] if isinstance(batch, Tensor) else shapes
    message = " ".join(str(error).split())[:300]
    return LeanconvError(
        f"the model raised {type(error).__name__} on a batch of shape {shape}: {message}; give images it accepts."
    )


def device_of(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def parse_device(device: torch.device | str) -> torch.device:
    try:
        parsed = torch.device(device)
        if parsed.type == "meta":
            raise RuntimeError("it holds no values")
        return torch.empty(0, device=parsed).device  # with its index: images may be on "cuda:0" already
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LeanconvError(f"device={str(device)!r} cannot be used here ({reason}); try 'cpu'.") from None


def copied(model: nn.Module, *, share: bool = False) -> nn.Module:
    """A copy; with ``share``, of the modules only: parameters and buffers are the same tensors."""
    # torch does not copy a tensor with a gradient history, such as the weight an older weight_norm keeps: detach it.
    computed = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    plain: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed if not tensor.is_leaf}
    if share:
        plain |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # A module has a dozen places for hooks, most of them empty: deepcopy would spend more time on them than on weights.
    plain |= {
        id(value): type(value)()
        for module in model.modules()
        for value in vars(module).values()
        if type(value) in (OrderedDict, dict, set) and not value
    }
    try:
        return copy.deepcopy(model, plain)
    except Exception as error:
        raise LeanconvError(
            f"the model cannot be copied ({type(error).__name__}: {error}); copy.deepcopy(model) must work."
        ) from error
