"""``optimize_``: a network's factorised layers, and what follows them, as fused kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, TypeVar

from torch import nn
from torch.nn.modules.utils import _pair

from leanconv.errors import LeanconvError, listing
from leanconv.kernels import pack, prepared
from leanconv.kernels.availability import available, missing
from leanconv.kernels.fused_stage import ACTIVATIONS, FEW_CHANNELS
from leanconv.kernels.modules import BLOCKS, Absorbed, FusedConv2d, FusedFactored, convolutions, why_not
from leanconv.network.activations import activation_of_module
from leanconv.network.layers.modules import Factored
from leanconv.network.recognise import has_hooks

Kernels = Literal["auto", "none"]
KERNELS: tuple[Kernels, ...] = ("auto", "none")
M = TypeVar("M", bound=nn.Module)


def optimize_(model: M) -> M:
    """Let the factorised layers of ``model`` run as fused kernels on an NVIDIA GPU; ``model`` itself is returned.

    A layer (k x k, d') + (1 x 1, d), its bias, the activation and the 2 x 2 max-pooling behind it become one launch,
    in which the map of d' channels stays on the chip. Activations are recognised in ``nn.Sequential`` and in
    torchvision's residual blocks, whose addition is fused too; layers elsewhere are fused without them. A first
    convolution of few channels is fused with the activation behind it. Everything else stays as it is. Parameters keep
    their names, so a state dict fits before and after, and ``result.save`` stores the same folder.

    The first run on a GPU measures which kernel is the fastest for each layer, a few seconds a layer, and keeps the
    answer for later runs. Give the network and its images in bfloat16 or float16, channels-last, under
    ``torch.inference_mode()``; float32 is computed in TF32 where ``torch.backends.cudnn.allow_tf32`` says so, else to
    float32's own accuracy. Where the kernels do not apply (on a CPU, in training) the same layers run as torch's own
    operations.

    A copy of the weights is kept in the order the kernels read them, and renewed when they change. A change through
    ``.data`` cannot be seen: call ``optimize_(model)`` again after it. A CUDA graph, also that of
    ``torch.compile(mode="max-autotune")``, reads this copy: run the network once before recording, and once more when
    its weights have changed.

    Raises:
        LeanconvError: where the network is on a GPU that cannot run the kernels, or has no layer to fuse.

    Examples:
        >>> import leanconv, torch
        >>> network, images = leanconv.models.character_cnn(), torch.rand(16, 1, 24, 24)
        >>> result = leanconv.accelerate(network, images, 2, solver="linear", samples=500, progress=False)
        >>> before = result.model(images)
        >>> torch.equal(leanconv.optimize_(result.model)(images), before)
        True
    """
    if not isinstance(model, nn.Module):
        raise LeanconvError(f"model is a {type(model).__name__}; give a network, a torch.nn.Module.")
    for device in {parameter.device for parameter in model.parameters()}:
        if device.type == "cuda" and (problem := missing(device)) is not None:
            raise LeanconvError(problem)
    factorised = {name: _refusal(module) for name, module in model.named_modules() if isinstance(module, Factored)}
    if all(why is not None for why in factorised.values()):
        why = f" ({listing([f'{name}: {reason}' for name, reason in factorised.items()], 3)})" if factorised else ""
        raise LeanconvError(
            f"{type(model).__name__} has no factorised layer the kernels can compute{why}; give a network that "
            "leanconv.accelerate or leanconv.load returned."
        )
    for parameter in model.parameters():
        pack.forget(parameter)
        prepared.forget(parameter)
    _fuse(model)
    return model


def apply(model: nn.Module, kernels: Kernels) -> None:
    """``optimize_`` where ``kernels`` is "auto" and they run here."""
    devices = {parameter.device for parameter in model.parameters()}
    if kernels == "auto" and devices and all(available(device) for device in devices):
        _fuse(model)


def check_kernels(kernels: Any) -> None:
    if kernels not in KERNELS:
        raise LeanconvError(f"kernels={kernels!r} is not known; use {listing(map(repr, KERNELS))}.")


def _fuse(model: nn.Module) -> None:
    """Fuse what can be fused: first layers with what follows them, then those that are left on their own."""
    modules = list(model.modules())
    uses = Counter(id(child) for module in modules for child in module._modules.values())
    shared = {module for module in modules if uses[id(module)] > 1}
    for module in modules:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            _fuse_row(module, shared)
        elif type(module) in BLOCKS:
            _fuse_block(module, shared)
    for module in modules:
        if type(module) is Factored:
            _turn(module, "none")


def _fuse_row(row: nn.Sequential, shared: set[nn.Module]) -> None:
    """Layers of a sequence and what comes right behind them. A ``shared`` layer may be followed by different ones."""
    # An identity does nothing: what is behind it follows the layer too.
    modules = [(name, m) for name, m in row._modules.items() if m is not None and type(m) is not nn.Identity]
    for position, (_, layer) in enumerate(modules):
        following = modules[position + 1 : position + 3]
        if type(layer) not in (Factored, nn.Conv2d) or layer in shared or not following:
            continue
        activation = activation_of(following[0][1])
        if activation is None or not _turn(layer, activation):
            continue
        layer.pooled = len(following) > 1 and is_pooling(following[1][1])  # type: ignore[assignment]
        for name, module in following[: 2 if layer.pooled else 1]:
            row._modules[name] = Absorbed().train(module.training)


def _fuse_block(block: nn.Module, shared: set[nn.Module]) -> None:
    """A residual block of torchvision's, where at least one layer can be fused."""
    if _hooked(block) or type(block.relu) is not nn.ReLU or _hooked(block.relu):
        return
    turned = False
    for number in (1, 2, 3):  # a BasicBlock has two
        layer, norm = (getattr(block, f"{kind}{number}", None) for kind in ("conv", "bn"))
        folded = type(norm) is nn.Identity and not _hooked(norm)
        if type(layer) is Factored and folded and layer not in shared:
            turned |= _turn(layer, "relu")
    if turned:
        block.__class__ = BLOCKS[type(block)]


def _turn(layer: nn.Module, activation: str) -> bool:
    """Make ``layer`` a fused one with this activation, if it can be one."""
    if _hooked(layer) or any(_hooked(child) for child in layer.children()) or _refusal(layer) is not None:
        return False
    layer.__class__ = FusedFactored if isinstance(layer, Factored) else FusedConv2d
    layer.activation = activation  # type: ignore[assignment]
    return True


def _refusal(layer: nn.Module) -> str | None:
    """Why the kernels cannot compute a layer."""
    if isinstance(layer, nn.Conv2d):
        # Others are cuDNN's best case; one of few channels is its worst.
        return why_not(layer) if layer.in_channels <= FEW_CHANNELS else "it was not factorised"
    rows = convolutions(layer)
    *first, last = [*layer.children()] or [layer]
    if not isinstance(last, nn.Conv2d) or any(isinstance(m, (nn.Conv1d, nn.Conv3d, nn.Linear)) for m in first):
        return "it is not made of two-dimensional convolutions"
    if any(row.bias is not None for row in rows[:-1]):
        return "a factor before the last has a bias"
    return next((why for why in map(why_not, rows) if why is not None), None)


def activation_of(module: nn.Module) -> str | None:
    """What the kernels call an activation; None if they do not know it."""
    spec = None if _hooked(module) else activation_of_module(module)
    return spec.name if spec is not None and spec.name in ACTIVATIONS else None


def is_pooling(module: nn.Module) -> bool:
    """Whether it takes the largest of every 2 x 2."""
    if type(module) is not nn.MaxPool2d or _hooked(module) or module.ceil_mode or module.return_indices:
        return False
    sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
    return [_pair(size) for size in sizes] == [(2, 2), (2, 2), (0, 0), (1, 1)]


def _hooked(module: nn.Module) -> bool:
    """Whether someone sees or changes what goes in or comes out, which fusing would change."""
    parametrized = isinstance(getattr(module, "parametrizations", None), nn.ModuleDict)
    return parametrized or has_hooks(module) or bool(module._forward_pre_hooks)
