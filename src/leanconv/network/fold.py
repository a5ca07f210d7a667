"""Batch norm folded into the layer before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leanconv.network.effective_conv import plain_form
from leanconv.network.recognise import is_norm_with_activation
from leanconv.network.sites import Site


def folded(model: nn.Module, site: Site, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Filters (d x c x kernel, c of one group) and bias (d) of a site, its batch norm included.

    In eval mode batch norm is y -> scale (y - mean) + shift with scale = gamma / sqrt(var + eps).
    """
    plain = plain_form(model.get_submodule(site.name), site.in_size)
    assert plain is not None  # otherwise the layer would not be a site
    w = plain.weight.to(torch.float64)
    d = site.geometry.out_channels
    b = w.new_zeros(d) if plain.bias is None else plain.bias.to(torch.float64)
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
    return w.reshape(d, -1, *site.geometry.kernel).to(dtype), b.to(dtype)


class Filters:
    """The folded filters of a network's sites, each computed once while its weights stay as they are."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._known: dict[tuple[str, str | None, torch.dtype], tuple[Tensor, Tensor]] = {}

    def of(self, site: Site, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (site.name, site.batch_norm, dtype)
        if key not in self._known:
            self._known[key] = folded(self.model, site, dtype)
        return self._known[key]


def without_norm(norm: nn.Module) -> nn.Module:
    """What replaces a folded batch norm: nothing, or the activation that some norms include."""
    rest = nn.Sequential(norm.drop, norm.act) if is_norm_with_activation(norm) else nn.Identity()  # type: ignore[arg-type]
    return rest.train(norm.training)
