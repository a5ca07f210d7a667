"""Batch norm folded into the layer before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leanconv.network.sites import Site


def folded(model: nn.Module, site: Site, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Filters (d x c x kernel) and bias (d) of a site, its batch norm included.

    In eval mode batch norm is y -> scale (y - mean) + shift with scale = gamma / sqrt(var + eps).
    """
    layer = model.get_submodule(site.name)
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    w = weight.detach().to(torch.float64)
    d = site.geometry.out_channels
    b = bias.detach().to(torch.float64) if isinstance(bias, Tensor) else w.new_zeros(d)
    if site.batch_norm is not None:
        norm = model.get_submodule(site.batch_norm)
        mean, var = norm.running_mean, norm.running_var
        assert isinstance(mean, Tensor)
        assert isinstance(var, Tensor)
        scale = (var.to(torch.float64) + float(norm.eps)).rsqrt()  # type: ignore[arg-type]
        if isinstance(norm.weight, Tensor):
            scale = scale * norm.weight.detach().to(torch.float64)
        w = w * scale.reshape(-1, *[1] * (w.dim() - 1))
        b = (b - mean.to(torch.float64)) * scale
        if isinstance(norm.bias, Tensor):
            b = b + norm.bias.detach().to(torch.float64)
    return w.reshape(d, site.geometry.in_channels, *site.geometry.kernel).to(dtype), b.to(dtype)
