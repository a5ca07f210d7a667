"""How much memory a network takes to run.

On a GPU torch's allocator knows. On a CPU the peak of the process says little: it never falls, it holds both networks,
and memory freed by one call is used again by the next. What is counted there instead are the tensors alive at the same
time, weights and input included; it is the same on every run. What a convolution borrows inside one call is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = "torch's allocator: weights, and what one call adds at its peak"
CPU = "tensors alive at once in torch: weights, input and activations; no workspace of the convolution library"


def peak_bytes(model: nn.Module, example: Any, call: Any, device: torch.device) -> int:
    """Peak memory of ``call``, which runs ``model`` on ``example``; see GPU and CPU for what is counted."""
    own = _bytes([*model.parameters(), *model.buffers()])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        # The other network lies in the same memory and is not counted.
        return own + torch.cuda.max_memory_allocated(device) - before
    own += _bytes([leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)])
    living = _Living()
    with torch.no_grad(), living:
        model(example)
    return own + living.peak


def _bytes(tensors: list[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Living(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # A view or an in-place result lives in the memory of what it was made from.
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone).atexit = False
