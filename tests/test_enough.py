"""samples="auto": how many responses a layer needs, by its error on images it was not fitted to."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError, storage
from leanconv.fit import samples_needed
from leanconv.options import MOST, Options
from leanconv.report import write_report
from leanconv.result import Accelerated
from leanconv.solve import Enough, Regression, ResponseSpace, enough, reduced_rank, thinned
from tests.conftest import plain_network, relative, smooth_images
from tests.test_cli import COMMON, leanconv_command, place  # noqa: F401
from tests.test_workdir import assert_equal, killed_after, original_is_not_measured, run

module = importlib.import_module("leanconv.solve.enough")  # the package has a function of its name


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squared(a: Tensor) -> float:
    return float(a.square().sum())


def mixed(n: int, p: int, seed: int = 0) -> Tensor:
    """Correlated columns, with a mean."""
    return numbers(n, p, seed=seed) @ numbers(p, p, seed=seed + 1) + numbers(p, seed=seed + 2)


def case(kind: str, n: int = 3840) -> tuple[Regression, Tensor]:
    """What is fitted, and from which columns in the end."""
    if kind == "in a space":  # 5 inputs for 8 filters
        filters = numbers(8, 5, seed=7)
        y, space = mixed(n, 5) @ filters.T, ResponseSpace.of(filters)
    elif kind == "halfway":  # 8 filters see 12 numbers
        before, filters, x = numbers(4, 5, seed=6), numbers(8, 4, 1, 3, seed=7), mixed(n, 12)
        y, space = x @ filters.flatten(1).T, ResponseSpace.behind(x, filters, before)
    else:
        y = mixed(n, 8)
        space = ResponseSpace.anywhere(y)
    if kind == "symmetric":
        return Regression(y, y, space), y
    z = y @ numbers(8, 8, seed=4) + 3 * numbers(n, 8, seed=5)
    if space.inputs is not None:
        z = z + space.inputs @ numbers(12, 8, seed=8)  # what no mixture of the 8 filters gives
    return Regression(z, y, space), y if space.inputs is None else space.inputs


def by_the_book(x: Tensor, z: Tensor, rank: int, fitted: Tensor, held: Tensor, *, symmetric: bool) -> float:
    """The relative error on rows held out: regress, then keep the leading directions of what was fitted."""
    x_mean, z_mean = x[fitted].mean(0), z[fitted].mean(0)
    centred, wanted = x[fitted] - x_mean, z[fitted] - z_mean
    whole = torch.eye(x.shape[1]).double()
    if not symmetric:
        whole = torch.linalg.lstsq(centred, wanted, driver="gelsd").solution
    right = torch.linalg.svd(centred @ whole, full_matrices=False).Vh[:rank]
    found = (x[held] - x_mean) @ whole @ right.T @ right + z_mean
    return relative(found, z[held])


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("kind", ["anywhere", "symmetric", "in a space", "halfway"])
def test_the_curve_is_that_of_plain_regressions(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLERANCE", -1.0)  # it does not end early
    if kind == "in a space":
        rank = min(rank, 5)
    one, x = case(kind)
    found = enough([one], rank, images=40)
    assert found is not None
    fitted, held = module.parted(len(one.y), 40, alike=True)
    order = module._drawn(len(fitted))
    if kind == "symmetric" and rank == 8:
        assert all(error < 1e-6 for _, error in found.curve)
        return
    assert [rows for rows, _ in found.curve] == [len(fitted) // 8, len(fitted) // 4, len(fitted) // 2, len(fitted)]
    for step, (_, error) in zip((1, 2, 4, 8), found.curve, strict=True):
        rows = fitted[order < step]
        plain = by_the_book(x, one.z, rank, rows, held, symmetric=kind == "symmetric")
        assert error == pytest.approx(plain, rel=2e-4)  # pseudo-samples make a difference
        space = one.space if one.space.inputs is None else replace(one.space, inputs=x[rows])
        y = one.y[rows]
        usual = reduced_rank(y if one.z is one.y else one.z[rows], y, rank, space=space)
        assert error == pytest.approx(relative(usual(x[held]), one.z[held]), rel=1e-8)


def test_squared_errors_of_groups_add_up() -> None:
    a, b = case("anywhere")[0], case("in a space")[0]
    alone = [enough([one], 3, images=40) for one in (a, b)]
    both = enough([a, b], 3, images=40)
    assert both is not None
    held = module.parted(3840, 40, alike=True)[1]
    sizes = [squared(one.z[held]) for one in (a, b)]
    apart = sum(size * found.curve[0][1] ** 2 for size, found in zip(sizes, alone, strict=True) if found)
    assert both.curve[0][1] ** 2 * sum(sizes) == pytest.approx(apart)


@cache
def needed(p: int, noise: float, *, n: int = 16_000, rank: int = 4) -> Enough:
    """8 responses from p inputs and noise, of which a fit of rank 4 cannot have all."""
    x, filters = numbers(n, p, seed=p).float(), numbers(8, p, seed=1).float() / p**0.5
    clean = x @ filters.T
    space = ResponseSpace(torch.eye(p, dtype=torch.float64), filters.double(), x)
    found = enough([Regression(clean + noise * numbers(n, 8, seed=2).float(), clean, space)], rank, images=80)
    assert found is not None
    return found


def test_more_unknowns_need_more_samples() -> None:
    found = [needed(p, 2.0) for p in (8, 200, 400, 800)]
    assert [a.rows < b.rows for a, b in pairwise(found)] == [True] * 3
    assert found[0].rows == 2000
    assert [one.enough for one in found] == [True, True, True, False]
    assert found[-1].rows == 16_000


def test_more_noise_needs_more_samples() -> None:
    rows = [needed(300, noise).rows for noise in (0.1, 0.3, 2.0)]
    assert rows[0] < rows[1] < rows[2]


def test_the_size_chosen_is_the_first_that_doubling_hardly_helps() -> None:
    for p in (8, 200, 800):
        found = needed(p, 2.0)
        falls = [1 - after / before for (_, before), (_, after) in pairwise(found.curve)]
        assert all(fall >= module.TOLERANCE for fall in falls[:-1])
        assert (falls[-1] < module.TOLERANCE) == found.enough
        assert found.rows == (16_000 * 2 ** (len(falls) - 1) // 8 if found.enough else 16_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_responses_in_few_dimensions_need_few_samples(dtype: torch.dtype, symmetric: bool) -> None:
    y = (numbers(40_000, 3) @ numbers(3, 64, seed=1) + 1).to(dtype)
    z = y if symmetric else (y @ numbers(64, 64, seed=2).to(dtype)) / 8
    found = enough([Regression(z, y, ResponseSpace.anywhere(y))], 4, images=100)
    assert found is not None
    assert found.rows == 5000
    assert found.enough
    assert found.curve[0][1] < 1e-3


def test_dead_layers_need_few_samples() -> None:
    y = torch.zeros(20_000, 4)
    found = enough([Regression(y, y, ResponseSpace.anywhere(y))], 2, images=100)
    assert found is not None
    assert (found.rows, found.enough) == (2500, True)


@pytest.mark.parametrize("images", [8, 40, 83, 1000])
@pytest.mark.parametrize("each", [1, 9, 50])
def test_rows_held_out_are_of_other_images(images: int, each: int) -> None:
    fitted, held = (rows // each for rows in module.parted(images * each, images, alike=True))
    assert not set(fitted.tolist()) & set(held.tolist())
    assert len(fitted) + len(held) == images * each
    assert len(set(held.tolist())) == -(-images // 8)
    # And they are spread over all.
    assert all((held // 8 == part).any() for part in range(images // each // 8))


@pytest.mark.parametrize("images", [8, 40, 300])
@pytest.mark.parametrize("seed", range(5))
def test_so_they_are_where_images_have_more_and_fewer_rows(images: int, seed: int) -> None:
    sizes = torch.randint(20, 41, (images,), generator=torch.Generator().manual_seed(seed))
    image = torch.arange(images).repeat_interleave(sizes)
    fitted, held = module.parted(len(image), images, alike=False)
    assert not set(image[fitted].tolist()) & set(image[held].tolist())
    assert len(held) > 0.07 * len(image)
    assert len(fitted) > 0.3 * len(image)


def test_thinning_favours_no_column_of_a_map() -> None:
    rows = thinned(100 * 16 * 16, 100 * 16 * 4)
    assert len(rows) == 6400
    assert (rows // 4).tolist() == list(range(6400))  # one of each four
    columns = torch.bincount(rows % 16, minlength=16)
    assert columns.min() > 300  # 400 each, where every fourth row would be 1600 in four columns
    assert torch.equal(thinned(100, 100), torch.arange(100))
    assert torch.equal(thinned(1000, 300), thinned(1000, 300))


def test_with_few_rows_or_images_all_are_taken() -> None:
    y = mixed(4000, 4)
    few = Regression(y[:1999], y[:1999], ResponseSpace.anywhere(y))
    assert enough([few], 2, images=40) is None
    assert enough([Regression(y, y, ResponseSpace.anywhere(y))], 2, images=7) is None


def auto(images: Tensor | None = None, model: nn.Module | None = None, **other: Any) -> Accelerated:
    given = smooth_images(48) if images is None else images
    arguments = {"speedup": 2.0, "samples": "auto", "progress": False, **other}
    return leanconv.accelerate(model or plain_network(), given, **arguments)


def response_errors(model: nn.Module, accelerated: nn.Module, images: Tensor) -> list[float]:
    """Behind every activation."""
    found: list[list[Tensor]] = []
    for network in (model, accelerated):
        seen: list[Tensor] = []
        handles = [
            layer.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output.clone()))
            for layer in network.modules()
            if isinstance(layer, nn.ReLU)
        ]
        with torch.no_grad():
            network(images)
        for handle in handles:
            handle.remove()
        found.append(seen)
    return [relative(b, a) for a, b in zip(*found, strict=True)]


def test_errors_on_unseen_images_are_no_worse_than_with_few_samples() -> None:
    model, images, unseen = plain_network(), smooth_images(64, 32), smooth_images(64, 32, seed=1)
    found = auto(images, model)
    ranks = {layer.name: layer.ranks for layer in found.layers}
    few = auto(images, model, ranks=ranks, samples=2000)
    pairs = zip(response_errors(model, found.model, unseen), response_errors(model, few.model, unseen), strict=True)
    assert all(a <= 1.005 * b for a, b in pairs)
    assert all(2000 <= layer.samples < 64 * 32 * 32 and layer.enough for layer in found.layers)
    assert all(layer.samples >= 2000 and layer.enough is None for layer in few.layers)


@pytest.mark.parametrize("arguments", [{}, {"asymmetric": False}, {"refine": "closed-form"}, {"solver": "linear"}])
def test_a_layer_is_fitted_to_what_is_reported(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def spy(probe: Any, choice: Any, split: Any, *, target: Any, given: Any, solver: Any) -> Any:
        seen[probe.site.name] = len(target.y), len(given.y)
        return usual(probe, choice, split, target=target, given=given, solver=solver)

    solving = importlib.import_module("leanconv.solving")
    usual = solving.fit_site
    monkeypatch.setattr(solving, "fit_site", spy)
    result = auto(**arguments)
    assert seen == {layer.name: (layer.samples, layer.samples) for layer in result.layers}
    assert {layer.enough for layer in result.layers} <= {True, False}


def test_free_filters_have_more_unknowns_and_need_more_samples() -> None:
    images, model = smooth_images(100), plain_network()
    tied, free = (auto(images, model, refine=refine) for refine in ("none", "closed-form"))
    assert [layer.ranks for layer in tied.layers] == [layer.ranks for layer in free.layers]
    assert sum(layer.samples for layer in free.layers) > sum(layer.samples for layer in tied.layers)


def test_as_many_active_responses_are_needed_through_an_activation() -> None:
    # Of the first layer the linear solver's input and the nonlinear one's are the same.
    images, model = smooth_images(200), plain_network()
    linear, nonlinear = (auto(images, model, solver=solver).layers[0] for solver in ("linear", "nonlinear"))
    assert linear.enough
    rows = []
    model[5].register_forward_hook(lambda _, __, output: rows.append(output.clone()))
    with torch.no_grad():
        model(images)
    active = float((rows[0] > 0).float().mean())
    assert 0.2 < active < 0.8
    assert nonlinear.samples == pytest.approx(linear.samples / active, rel=0.05)


def test_too_few_images_are_said_in_a_line() -> None:
    result = auto(refine="closed-form")
    short = [layer for layer in result.layers if layer.enough is False]
    assert short
    assert str(result).splitlines()[-1] == f"{len(short)} of 3 layers would gain from more samples; give more images."
    assert all(layer.samples == 48 * 64 for layer in short)
    sated = replace(result, layers=[replace(layer, enough=True) for layer in result.layers])
    assert "more samples" not in str(sated)


def test_no_layer_is_thinned_on_too_few_images_to_judge_by() -> None:
    result = auto(smooth_images(7, 32))
    assert [layer.samples for layer in result.layers] == [7 * 1024, 7 * 256, 7 * 256]
    assert {layer.enough for layer in result.layers} == {None}


def test_grouped_and_residual_layers_are_looked_at() -> None:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.grouped = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, groups=2)
            self.last = nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            return (x + self.last(self.grouped(x).relu())).relu()

    for asymmetric in (True, False):
        result = auto(model=Residual().eval(), scheme="channel", asymmetric=asymmetric)
        assert [layer.name for layer in result.layers] == ["grouped", "last"]
        assert all(layer.enough and 2000 <= layer.samples < 48 * 256 for layer in result.layers)


def test_without_a_fit_nothing_is_looked_at() -> None:
    assert {(layer.samples, layer.enough) for layer in auto(scheme="spatial").layers} == {(0, None)}


def test_a_layer_on_other_rows_than_images_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four crops of every image run as one batch: a layer has other rows than images."""
    seen: list[bool] = []

    def spy(*given: Any, alike: bool, **more: Any) -> Any:
        seen.append(alike)
        return samples_needed(*given, alike=alike, **more)

    monkeypatch.setattr(importlib.import_module("leanconv.solving"), "samples_needed", spy)

    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.cat([x[:, :, i : i + 12, j : j + 12] for i in (0, 4) for j in (0, 4)])
            return self.body(rows)

    result = auto(model=Crops().eval())
    assert seen == [False] * 3
    assert all(layer.enough is not None for layer in result.layers)


REFUSED = ["many", "Auto", 0, -1, 2.5, True, None]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_other_words_and_numbers_are_refused(given: Any) -> None:
    with pytest.raises(LeanconvError) as caught:
        auto(samples=given)
    assert str(caught.value) == f"samples={given!r} must be a whole number from 1 on, or 'auto'."


def test_options_keep_the_word() -> None:
    options = Options.check(samples="auto")
    assert options.most_samples == MOST
    assert options.to_json()["samples"] == "auto"
    assert Options.from_json(json.loads(json.dumps(options.to_json()))) == replace(options, speedup=4.0)
    assert Options.check(samples=7).most_samples == 7
    with pytest.raises(LeanconvError, match="samples=1099511627776 must be a whole number from 1 to"):
        Options.check(samples=1 << 40)


def test_what_was_found_is_saved_and_older_folders_load(tmp_path: Path) -> None:
    result = auto(refine="closed-form")
    folder = result.save(tmp_path / "net")
    again = leanconv.load_result(folder, plain_network())
    assert again.layers == result.layers
    assert again.options == result.options
    assert "as many as needed responses sampled a layer" in write_report(folder).read_text()
    path = folder / storage.DESCRIPTION
    data = json.loads(path.read_text())
    assert [(layer["samples"], layer["enough"]) for layer in data["layers"]] == [
        (layer.samples, layer.enough) for layer in result.layers
    ]
    for layer in data["layers"]:
        del layer["samples"], layer["enough"]
    del data["sha256"]
    path.write_text(json.dumps({**data, "sha256": storage._digest(data)}))
    old = leanconv.load_result(folder, plain_network())
    assert old.layers == [replace(layer, samples=0, enough=None) for layer in result.layers]


@pytest.mark.parametrize("arguments", [{}, {"asymmetric": False}, {"refine": "closed-form"}], ids=str)
def test_a_run_goes_on_where_it_stopped(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"samples": "auto", "images": smooth_images(48), **arguments}
    whole = run(None, **given)
    assert all(layer.enough is not None for layer in whole.layers)
    killed_after(2, monkeypatch, tmp_path, **given)
    original_is_not_measured(monkeypatch)
    assert_equal(whole, run(tmp_path, **given))
    assert_equal(whole, run(tmp_path, **given))  # finished: all of it is read
    with pytest.raises(LeanconvError, match="samples='auto', but samples=2000 was given"):
        run(tmp_path, **{**given, "samples": 2000})


ACCELERATE = f"accelerate net.py:build --images photos --speedup 2 --out fast {COMMON}"


@pytest.mark.usefixtures("place")
def test_the_command_line(leanconv_command) -> None:  # noqa: F811
    code, out, err = leanconv_command(f"{ACCELERATE} --samples auto --json --quiet --report")
    assert code == 0, err
    found = json.loads(out)
    assert found["options"]["samples"] == "auto"
    assert [layer["samples"] for layer in found["layers"]] == [
        8 * 16 * 16 if layer["enough"] is False else 2000 for layer in found["layers"]
    ]
    assert {layer["enough"] for layer in found["layers"]} <= {True, False}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("given", ["many", "0"])
def test_the_command_line_refuses_other_words(given: str, leanconv_command) -> None:  # noqa: F811
    code, _, err = leanconv_command(f"{ACCELERATE} --samples {given}")
    assert code == 2
    assert "must be a whole number from 1 on, or 'auto'." in err
