"""The comparison with other libraries: its table, and what the README says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.peers import run as peers

ROOT = Path(__file__).parents[2]


TABLE = ROOT / "benchmarks" / "results" / "peers.json"


def test_the_committed_table_is_that_of_its_rows() -> None:
    rows = json.loads(TABLE.read_text())
    assert peers.markdown(rows).rstrip("\n") + "\n" == TABLE.with_suffix(".md").read_text()
    assert {row["way"].partition(", norms")[0] for row in rows} == set(peers.WAYS)


def test_the_readme_has_the_best_of_each() -> None:
    rows = [row for row in json.loads(TABLE.read_text()) if (row["model"], row["asked"]) == ("resnet20-cifar10", 2.0)]
    text = " ".join((ROOT / "README.md").read_text().split())
    plain, by_output, aimet, pruning, tucker = (
        f"{min(row['increase'] for row in rows if row['way'].partition(', norms')[0] == way):.2f}" for way in peers.WAYS
    )
    assert f'{plain} points of top-1 with `ranks="energy"`, and {by_output} with `ranks="sensitivity"`' in text
    assert f"AIMET's spatial SVD {aimet}, tensorly-torch's Tucker decomposition {tucker}" in text
    assert f"Torch-Pruning {pruning}, each" in text
    assert f"of {rows[0]['original']['top1']:.2f} % top-1" in text
    least, most = (pick(row["macs"] for row in rows) for pick in (min, max))
    assert f"{least:.2f}x to {most:.2f}x fewer convolution MACs" in text


@pytest.mark.parametrize("speedup", [1.3, 3.0, 8.0])
def test_the_least_is_taken_that_gives_the_speedup(speedup: float) -> None:
    """A network of ever fewer channels: the first narrow enough."""

    def made(cut: float) -> nn.Module:
        return nn.Conv2d(8, max(1, round(1000 * (1 - cut))), 3)

    class Subject:
        model, calibration = made(0.0), (torch.rand(2, 8, 6, 6),)

    found = peers.least_cut(made, Subject, speedup)  # type: ignore[arg-type]
    ratio = peers.conv_macs(Subject.model, Subject) / peers.conv_macs(found, Subject)  # type: ignore[arg-type]
    assert peers.conv_macs(Subject.model, Subject) == 1000 * 8 * 9 * 16  # type: ignore[arg-type]
    assert speedup <= ratio < 1.05 * speedup


def test_a_network_that_cannot_be_cut_so_far_is_no_row() -> None:
    def made(cut: float) -> nn.Module:
        return nn.Conv2d(8, max(30, round(100 * (1 - cut))), 3)

    class Subject:
        model, calibration = made(0.0), (torch.rand(2, 8, 6, 6),)

    with pytest.raises(peers.CannotCut, match="8x cannot be had"):
        peers.least_cut(made, Subject, 8.0)  # type: ignore[arg-type]


def test_who_cannot_is_said_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One way cannot, the package of another is missing: the table has the others all the same."""
    like = json.loads(TABLE.read_text())[0]

    def rows_of(subject: object, speedup: float, way: str) -> list[dict[str, object]]:
        if way == "Torch-Pruning":
            raise peers.CannotCut("2x cannot be had in this way: so much is left whatever is taken away.")
        if way == "AIMET spatial SVD":
            raise ModuleNotFoundError("No module named 'aimet_torch'")
        return [{**like, "asked": speedup, "way": way}]

    monkeypatch.setattr(peers, "rows_of", rows_of)
    monkeypatch.setitem(peers.NETWORKS, "resnet20-cifar10", lambda *_: None)
    words = ["--data", "none", "--model", "resnet20-cifar10", "--speedups", "2"]
    monkeypatch.setattr(sys, "argv", ["run", *words, "--work", str(tmp_path / "work"), "--out", str(tmp_path)])
    for _ in range(2):  # the second time from what was kept
        peers.main()
        said = capsys.readouterr().out
        assert "Torch-Pruning is left out: 2x cannot be had" in said
        assert "AIMET spatial SVD is left out: No module" in said
        found = {row["way"] for row in json.loads((tmp_path / "peers.json").read_text())}
        assert found == set(peers.WAYS) - {"Torch-Pruning", "AIMET spatial SVD"}
        monkeypatch.setattr(peers, "WAYS", dict(reversed(list(peers.WAYS.items()))))  # rows are kept by name


def test_batch_norms_are_measured_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    images = 5 + torch.rand(20, 3, 8, 8)

    class Subject:
        calibration = images.split(10)

    found = peers.norms_measured_anew(model, Subject)  # type: ignore[arg-type]
    assert found is not None
    torch.testing.assert_close(found(images).mean((0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    assert float(model[1].running_mean.abs().max()) == 0  # type: ignore[union-attr, operator]
    assert peers.norms_measured_anew(nn.Sequential(nn.Conv2d(3, 4, 3)), Subject) is None  # type: ignore[arg-type]
