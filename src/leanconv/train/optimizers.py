"""Which optimizer moves which weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leanconv.network.layers.kinds import REPLACEABLE
from leanconv.train.muon import Muon
from leanconv.train.settings import Optimizer

# Adam's rate for what is no matrix, in parts of Muon's: one is in parts of the weights, the other in what they are in.
SHARE = 0.1


def optimizers(
    model: nn.Module, kind: Optimizer, lr: float, device: torch.device, *, weight_decay: float = 0.0, bf16: bool = False
) -> list[torch.optim.Optimizer]:
    """Those of ``model``'s weights that are trained; the rate of a group of them is its ``share`` of ``lr``. ``bf16``:
    whether the network runs in mixed precision."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "sgd":
        return [torch.optim.SGD([{"params": trained, "share": 1.0}], lr=lr, momentum=0.9, weight_decay=weight_decay)]
    filters = _filters(model) if kind == "muon" else []
    known = set(map(id, filters))
    rest = [parameter for parameter in trained if id(parameter) not in known]
    made: list[torch.optim.Optimizer] = []
    if filters:
        # Half precision is enough for a direction, and on a GPU that has it the products are almost free.
        dtype = torch.bfloat16 if bf16 and device.type == "cuda" else None
        made.append(Muon([{"params": filters, "share": 1.0}], lr, weight_decay=weight_decay, dtype=dtype))
    if rest:
        group = {"params": rest, "share": SHARE if kind == "muon" else 1.0}
        gpu = device.type == "cuda"  # there one kernel, and a step of it can be recorded
        made.append(torch.optim.AdamW([group], lr=lr, weight_decay=weight_decay, fused=gpu or None, capturable=gpu))
    return made


def takes_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its rate may be a number on the device, which a step that was recorded reads anew every time."""
    return isinstance(optimizer, Muon | torch.optim.AdamW)


def set_rate(optimizer: torch.optim.Optimizer, rate: float, device: torch.device) -> None:
    """That of all weights; a group's is its share."""
    for group in optimizer.param_groups:
        own = rate * group["share"]
        if device.type != "cuda" or not takes_tensors(optimizer):
            group["lr"] = own
        elif isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
            group["lr"].fill_(own)
        else:
            group["lr"] = torch.tensor(own, device=device)


def _filters(model: nn.Module) -> list[nn.Parameter]:
    """Weights that are one matrix, each once. Filters in groups are many small ones; a step in parts of weights that
    are all zero would never leave it."""
    filters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None) if isinstance(module, REPLACEABLE) else None
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad or getattr(module, "groups", 1) > 1:
            continue
        if bool(weight.detach().any()):
            filters[id(weight)] = weight
    return list(filters.values())
