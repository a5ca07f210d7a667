"""Ranks by the clock: the choice on made-up times, what is timed and kept, refusals, and whole runs in small."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv import Target
from leanconv.cli.main import run
from leanconv.config import Options
from leanconv.demo import DigitsNet
from leanconv.errors import LeanconvError
from leanconv.forms import CHANNEL, RESPONSES, SCHEMES, SPATIAL, THREE_D, Choice
from leanconv.forms.spatial import FILTERS
from leanconv.network.survey import survey
from leanconv.ranks import Candidate
from leanconv.ranks.latency import layer_times as measure
from leanconv.ranks.latency import selector
from leanconv.ranks.latency.choose import (
    Times,
    best_at,
    forms,
    interpolated,
    merit,
    partner,
    reach,
    select_timed,
    sizes,
    undominated,
)
from leanconv.ranks.latency.layer_times import (
    Cache,
    Stopwatch,
    conditions_of,
    example_of,
    folder,
    form_network,
    key_of,
    written,
)
from leanconv.runtimes.bench.measure import Rounds
from leanconv.runtimes.runners import RUNTIMES
from tests.support.candidates import NETWORK, candidate
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

# Along which forms of the 3d scheme are compared.
BOTH = (FILTERS, RESPONSES)


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken in a moment, of few forms, and kept in a folder of the test."""
    monkeypatch.setenv("LEANCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(selector, "SECONDS", 0.01)
    monkeypatch.setattr("leanconv.ranks.latency.choose.sizes", lambda limit: [r for r in (4, 8, 16) if r <= limit])


def table(one: Candidate, *, unit: int = 1, scheme: str = "3d") -> Times:
    """Made-up times: multiply-accumulates of ranks filled up to multiples of ``unit``, and a start for every factor."""

    def filled(rank: int) -> int:
        return -(-rank // unit) * unit

    found: Times = {None: one.cost.dense / 1e7 + 0.01}
    ranks = [r for r in (4, 8, 12, 16, 20, 24, 28, 32, 48) if r <= one.geometry.channel_limit]
    for d1 in ranks:
        if scheme != "spatial":
            found[Choice(CHANNEL, (d1,))] = CHANNEL.macs(one.cost, (filled(d1),)) / 1e7 + 0.02
        if scheme != "channel":
            found[Choice(SPATIAL, (d1,))] = SPATIAL.macs(one.cost, (filled(d1),)) / 1e7 + 0.02
        if scheme == "3d":
            for d2 in ranks:
                found[Choice(THREE_D, (d2, d1))] = THREE_D.macs(one.cost, (filled(d2), filled(d1))) / 1e7 + 0.03
    return found


def time_of(tables: dict[str, Times], plan: dict[str, Choice]) -> float:
    return sum(table[plan.get(name)] for name, table in tables.items())


def total(plan: dict[str, Choice], factor: float = 2.0) -> float:
    return sum(merit(one, plan.get(one.name), factor) for one in NETWORK)


def tables_of(**arguments: Any) -> dict[str, Times]:
    return {one.name: table(one, **arguments) for one in NETWORK}


@pytest.mark.parametrize("scheme", ["channel", "spatial"])
@pytest.mark.parametrize("share", [0.2, 0.35, 0.6])
def test_choice_equals_brute_force(scheme: str, share: float) -> None:
    three = NETWORK[1:]
    tables = {one.name: table(one, unit=8, scheme=scheme) for one in three}
    budget = share * sum(tables[one.name][None] for one in three)
    found = best_at(three, tables, budget, 2.0)
    rows = itertools.product(*(table.items() for table in tables.values()))
    plans = [row for row in rows if sum(ms for _, ms in row) <= budget]
    best = max(sum(merit(one, choice, 2.0) for one, (choice, _) in zip(three, row, strict=True)) for row in plans)
    assert time_of(tables, found) <= budget
    assert sum(merit(one, found.get(one.name), 2.0) for one in three) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_budget_holds_and_more_time_keeps_more(scheme: str) -> None:
    tables = tables_of(unit=8, scheme=scheme)
    dense = sum(rows[None] for rows in tables.values())
    kept = []
    for share in (0.12, 0.2, 0.3, 0.5, 1.01):
        plan = select_timed(NETWORK, tables, share * dense)
        assert time_of(tables, plan) <= share * dense
        kept.append(total(best_at(NETWORK, tables, share * dense, 2.0)))
    assert kept == sorted(kept)
    assert plan == {}  # in the original's time every layer stays as it is


def test_a_larger_rank_that_costs_nothing_is_taken() -> None:
    """Hardware that works in sixteens: no rank is chosen that could have been larger in the same time."""
    tables = tables_of(unit=16)
    plan = select_timed(NETWORK, tables, 0.25 * sum(rows[None] for rows in tables.values()))
    assert plan
    assert all(rank % 16 == 0 for choice in plan.values() for rank in choice.ranks)
    # and on hardware that minds every rank, others are
    fine = tables_of(unit=1)
    plan = select_timed(NETWORK, fine, 0.25 * sum(rows[None] for rows in fine.values()))
    assert any(rank % 16 for choice in plan.values() for rank in choice.ranks)


def test_a_form_that_is_slow_here_is_left() -> None:
    """The same energies, another clock: where one-way filters are slow the pair of k x k and 1 x 1 is chosen."""
    tables = tables_of(unit=8)
    slow = {
        name: {choice: ms * (20 if choice and choice.form is not CHANNEL else 1) for choice, ms in rows.items()}
        for name, rows in tables.items()
    }
    budget = 0.3 * sum(rows[None] for rows in tables.values())
    assert {choice.form for choice in select_timed(NETWORK, slow, budget).values()} == {CHANNEL}
    assert THREE_D in {choice.form for choice in select_timed(NETWORK, tables, budget).values()}


def test_undominated_keeps_what_no_other_covers() -> None:
    one = NETWORK[2]
    rows = table(one, unit=16)
    kept = undominated(one, rows)
    for choice, ms in rows.items():
        mine = reach(one, choice, BOTH)
        assert any(
            faster <= ms and all(a >= b for a, b in zip(reach(one, other, BOTH), mine, strict=True))
            for other, faster in kept.items()
        )
    for first, second in itertools.permutations(kept, 2):
        covered = all(a >= b for a, b in zip(reach(one, first, BOTH), reach(one, second, BOTH), strict=True))
        assert not (covered and kept[first] <= kept[second])


def test_both_ranks_of_the_3d_form_save_alike() -> None:
    """At the d' a d'' goes with, the one-way filters cost 1 / t of k x k filters."""
    one = NETWORK[2]
    for spatial, factor in ((12, 1.7), (30, 2.2), (40, 1.3)):
        rank = partner(one, THREE_D, spatial, factor)
        one_way = spatial * (one.cost.vertical + one.cost.horizontal * rank)
        assert rank < one.geometry.channel_limit
        assert rank * one.cost.reduce == pytest.approx(factor * one_way)
        at = math.floor(rank)
        assert merit(one, Choice(THREE_D, (spatial, at)), factor) == pytest.approx(
            math.log(one.energy(Choice(CHANNEL, (at,))))
        )


def test_with_too_little_time_the_fastest_forms_are_chosen() -> None:
    tables = tables_of()
    plan = select_timed(NETWORK, tables, 0.01)
    assert time_of(tables, plan) == pytest.approx(sum(min(rows.values()) for rows in tables.values()))


def test_times_between_two_sizes_are_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Times = {None: 9.0, Choice(CHANNEL, (64,)): 1.0, Choice(CHANNEL, (80,)): 2.0, Choice(CHANNEL, (96,)): 4.0}
    known |= {Choice(CHANNEL, (rank,)): float(rank) for rank in (8, 10, 128, 160)}
    known |= {Choice(THREE_D, (a, b)): float(a * b) for a in (128, 160) for b in (32, 256, 320)}
    found = interpolated(known)
    assert found.items() >= known.items()
    assert {choice.ranks for choice in found if choice and choice.form is CHANNEL and choice not in known} == {(144,)}
    assert found[Choice(CHANNEL, (144,))] == 144
    assert found[Choice(THREE_D, (144, 32))] == 144 * 32
    assert found[Choice(THREE_D, (144, 304))] == pytest.approx(144 * 304)
    assert Choice(THREE_D, (144, 48)) not in found


def test_forms_timed_are_those_that_may_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanconv.ranks.latency.choose.sizes", sizes)
    for one in [*NETWORK, candidate("one", 64, 64, k=1)]:
        chosen = forms(one.geometry, one.cost, SCHEMES["3d"], 3.0)
        assert chosen
        assert len(set(chosen)) == len(chosen)
        assert all(one.macs(choice) < one.cost.dense for choice in chosen)
        assert {c.form for c in chosen} == ({CHANNEL} if one.name == "one" else {CHANNEL, SPATIAL, THREE_D})
    assert {c.form for c in forms(NETWORK[0].geometry, NETWORK[0].cost, SCHEMES["spatial"], 3.0)} == {SPATIAL}
    assert sizes(16) == [*range(1, 9), 10, 12, 14, 16]


class Counting(Stopwatch):
    """Says what it was asked to measure."""

    asked: list[tuple[str, int]]

    def _measured(self, site: Any, choices: Any, before: Any) -> Any:
        self.asked.append((site.name, len(choices)))
        return super()._measured(site, choices, before)


def watch() -> Counting:
    target = Target(device="cpu")
    found = Counting(target, Stopwatch.of(target).cache)
    found.asked = []
    return found


def test_layers_alike_are_timed_once_and_times_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]).eval()
    first, *alike = survey(model, torch.rand(1, 3, 8, 8)).sites
    choices = [Choice(CHANNEL, (2,)), Choice(THREE_D, (4, 3))]
    found = watch()
    found.measure([(site, choices) for site in alike])
    assert found.asked == [(alike[0].name, 2)]
    again = watch()
    again.measure([(alike[2], choices), (alike[1], [*choices, Choice(SPATIAL, (2,))]), (first, [])])
    assert again.asked == [(alike[1].name, 1), (first.name, 0)]
    before, now = found.times(alike[0]), again.times(alike[0])
    # what was known is as it was; the new time was put on the same scale
    assert now.items() >= before.items()
    assert all(ms > 0 for ms in now.values())


def test_other_machines_and_targets_have_files_of_their_own() -> None:
    paths = {Stopwatch.of(Target(device="cpu", threads=n, batch=b)).cache.path for n in (1, 2) for b in (1, 8)}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {folder()}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', None])
def test_a_damaged_file_is_left_out_with_a_remark_and_rewritten(content: str | None, capsys: Any) -> None:
    facts = {"cpu": "one", "target": {}}
    cache = Cache.opened(facts)
    cache.times("layer")[None] = 1.5
    cache.times("layer")[Choice(THREE_D, (4, 2))] = 0.5
    cache.keep()
    assert Cache.opened(facts).layers == cache.layers
    assert capsys.readouterr().err == ""
    whole = cache.path.read_text()
    cache.path.write_text(whole.replace("1.5", '"x"') if content is None else content)
    damaged = Cache.opened(facts)
    assert damaged.layers == {}
    assert "cannot be read" in capsys.readouterr().err
    damaged.layers = cache.layers
    damaged.keep()
    assert cache.path.read_text() == whole


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEANCONV_CACHE", str(tmp_path / "file"))
    cache = Cache.opened({})
    cache.keep()
    assert "set LEANCONV_CACHE" in capsys.readouterr().err
    monkeypatch.delenv("LEANCONV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "leanconv"


CASES = [
    (nn.Conv2d(6, 8, 3, padding=1), (6, 9, 7)),
    (nn.Conv2d(6, 8, (3, 5), stride=2, padding=(1, 2), dilation=(1, 2)), (6, 20, 30)),
    (nn.Conv2d(6, 8, 3, padding="same"), (6, 9, 7)),
    (nn.Conv2d(6, 8, 3, groups=2, bias=False), (6, 9, 9)),
    (nn.Conv1d(6, 8, 5), (6, 30)),
    (nn.Linear(12, 10), (12,)),
]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("case", CASES, ids=[str(layer) for layer, _ in CASES])
def test_small_networks_written_directly_compute_the_same(
    runtime: str, case: tuple[nn.Module, tuple[int, ...]]
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip(runtime)
    layer, shape = case
    network = nn.Sequential(layer, nn.ReLU()).eval()
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    made = written(network, example)
    assert made is not None
    call = RUNTIMES[runtime].open_onnx(made, example, conditions_of(Target(runtime=runtime)))
    torch.testing.assert_close(torch.as_tensor(call()[0]), network(example).detach(), rtol=1e-4, atol=1e-5)


def test_what_is_not_plain_is_left_to_the_exporter() -> None:
    pytest.importorskip("onnx")
    example = torch.rand(1, 3, 8, 8)
    assert written(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")), example) is None
    assert written(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()), example) is None


def test_forms_of_a_layer_are_what_would_stand_in_its_place() -> None:
    model = plain_network(batch_norm=False)
    site = survey(model, torch.rand(1, 3, 16, 16)).sites[2]
    example = example_of(site, 3)
    whole = form_network(site, None)(example)
    assert [type(module) for module in form_network(site, Choice(THREE_D, (6, 5)))] == [*[nn.Conv2d] * 3, nn.ReLU]
    for choice in (Choice(CHANNEL, (5,)), Choice(SPATIAL, (6,)), Choice(THREE_D, (6, 5))):
        assert form_network(site, choice)(example).shape == whole.shape
    assert json.loads(key_of(site))[2] == "relu"


BAD = [
    ({"target": Target()}, r"target=.* goes with ranks='latency' only"),
    ({"latency": 5}, r"latency=5.0 goes with ranks='latency' only"),
    ({"ranks": {"2": 5}, "latency": 5}, r"goes with ranks='latency' only"),
    ({"ranks": "latency", "latency": 0}, r"latency=0 must be milliseconds above 0"),
    ({"ranks": "latency", "target": "torch"}, r"target is a str; give leanconv.Target"),
    ({"ranks": "latency", "target": {"cores": 2}}, r"'cores', which does not exist"),
    ({"ranks": "latency", "speedup": 0.5}, r"speedup=0.5 must be"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LeanconvError, match=message):
        Options.check(**arguments)


def test_target_is_checked_and_described() -> None:
    assert str(Target(runtime="openvino", threads=2, batch=8)) == "openvino on cpu, 2 threads, batch 8, float32"
    for arguments, message in [
        ({"runtime": "onyx"}, "did you mean onnxruntime"),
        ({"runtime": "torch-compile"}, "did you mean torch"),
        ({"dtype": "int8"}, "use float32, bfloat16, float16"),
        ({"threads": 0}, "threads=0 must be a whole number"),
        ({"batch": 1.5}, "batch=1.5 must be a whole number"),
    ]:
        with pytest.raises(LeanconvError, match=message):
            Target(**arguments)
    options = Options.check(ranks="latency", latency=5, target={"runtime": "onnxruntime"})
    assert Options.from_json(json.loads(json.dumps(options.to_json()))).target == options.target


@pytest.mark.parametrize(("runtime", "extra"), [("onnxruntime", "onnx"), ("openvino", "openvino")])
def test_a_missing_runtime_names_the_extra(runtime: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, runtime, None)
    with pytest.raises(LeanconvError, match=rf"{runtime} is not installed; pip install 'leanconv\[{extra}\]'"):
        leanconv.accelerate(
            plain_network(), smooth_images(), ranks=leanconv.Latency(target=Target(runtime=runtime)), progress=False
        )


class MadeUp(Stopwatch):
    """Times by multiply-accumulates."""

    def _measured(self, site: Any, choices: Any, before: Any) -> Any:
        one = Candidate(name=site.name, geometry=site.geometry, cost=site.cost)
        return {choice: one.macs(choice) / 1e6 for choice in (None, *choices)}

    def scale(self, sites: Any, other: Any) -> float:
        return survey(DigitsNet().eval(), torch.rand(1, 1, 32, 32)).macs / 1e6


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up times choose the ranks, and both networks are timed at the end."""
    torch.manual_seed(0)
    model = DigitsNet().eval()
    images = smooth_images(8, 32, 1)

    def made_up(networks: Any, *_: Any) -> Rounds:
        times = {name: survey(network, images[:1]).macs / 1e9 for name, network in networks.items()}
        return Rounds({name: [seconds] * 5 for name, seconds in times.items()}, 1, True)

    monkeypatch.setattr(selector, "Stopwatch", MadeUp)
    monkeypatch.setattr(selector.Networks, "_rounds", lambda self, networks: made_up(networks))
    arguments: dict[str, Any] = {"solver": "linear", "samples": 200, "progress": False, "workdir": tmp_path / "work"}
    result = leanconv.accelerate(model, images, 1.5, ranks="latency", **arguments)
    assert 1.5 <= result.speedup < 1.6
    found = result.timing
    assert found is not None
    assert found.target == Target(device="cpu")
    assert found.original_ms > 0
    assert found.accelerated_ms > 0
    assert 0 < found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(found.original_ms / found.accelerated_ms, rel=0.2)
    assert f"{found.ratio:.2f}x less time" in str(result)
    assert "torch on cpu, 1 thread, batch 1, float32" in str(result)
    result.save(tmp_path / "saved")
    loaded = leanconv.load_result(tmp_path / "saved", model)
    assert loaded.timing == found
    assert loaded.options == result.options
    torch.testing.assert_close(loaded.model(images), result.model(images))
    # Gone on with, a run has the plan it had, whatever the clock would say now.
    again = leanconv.accelerate(model, images, 1.5, ranks="latency", **arguments)
    assert [(layer.name, layer.ranks) for layer in again.layers] == [(x.name, x.ranks) for x in result.layers]
    assert torch.equal(again.model(images), result.model(images))
    with pytest.raises(LeanconvError, match=r"speedup=1000 cannot be reached in torch: .* ask for that"):
        leanconv.accelerate(model, images, 1000, ranks="latency", solver="linear", samples=200, progress=False)


def test_all_the_time_in_the_world() -> None:
    """Milliseconds in place of a ratio, by the real clock."""
    result = leanconv.accelerate(
        plain_network(), smooth_images(), ranks=leanconv.Latency(ms=1e6), solver="linear", samples=200, progress=False
    )
    assert result.layers == []
    assert result.timing is not None
    assert result.timing.ratio > 0
    assert math.isnan(result.options.speedup)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from tests.support.pictures import encoded

    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    torch.manual_seed(0)\n    return nn.Sequential("
        "nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    (tmp_path / "photos").mkdir()
    for number in range(3):
        (tmp_path / "photos" / f"{number}.png").write_bytes(encoded(seed=number))
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> int:
        base = ["leanconv", "accelerate", "net.py:build", "--images", "photos", "--size", "16", "--workers", "0"]
        monkeypatch.setattr(sys, "argv", [*base, *arguments])
        with pytest.raises(SystemExit) as end:
            run()
        return int(end.value.code or 0)

    timed = ("--ranks", "latency", "--device", "cpu", "--samples", "100", "--solver", "linear", "--quiet", "--json")
    assert command("--out", "fast", *timed, "--threads", "1", "--batch", "2", "--latency", "1e6") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["timing"]["target"] == Target(device="cpu", batch=2).to_json()
    assert data["options"]["ranks"] == "latency"
    assert command("--out", "other", "--runtime", "openvino") == 2
    assert "--runtime goes with --ranks latency only" in capsys.readouterr().err
    assert command("--out", "other", "--latency", "5") == 2
    assert "latency=5.0 goes with ranks='latency' only" in capsys.readouterr().err
    assert command("--out", "other", "--ranks", "latency", "--runtime", "tvm") == 2
    assert "'tvm', which does not exist" in capsys.readouterr().err
