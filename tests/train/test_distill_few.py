"""Distillation from few images: a tenth is put aside before the layers are fitted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leanconv.calibrate.batches import take
from leanconv.config import Distill
from leanconv.demo import digits, train
from leanconv.result import Accelerated
from leanconv.train import distill as refine
from leanconv.train.finetune import finetune
from tests.support.distilling import images, run
from tests.support.equality import relative

# Fixtures, which pytest looks for by name in this file.


@pytest.mark.parametrize("batches", [1, 7])
def test_what_it_is_judged_by_is_put_aside(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.arange(60.0).reshape(60, 1, 1, 1)
    fitted, judges = refine.put_aside(take(given.split(60 // batches)), seed=3)
    rest = torch.cat([piece for batch in fitted for piece in batch.pieces])
    assert len(judges) == 6
    assert torch.equal(torch.cat([rest, judges]).flatten().sort().values, given.flatten())
    assert torch.equal(rest.flatten().sort().values, rest.flatten())  # in order
    assert torch.equal(judges, refine.put_aside(take(given.split(10)), seed=3)[1])  # however they are cut
    assert not torch.equal(judges, refine.put_aside(take(given), seed=4)[1])


@pytest.mark.usefixtures("short")
def test_layers_are_fitted_to_the_others_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Tensor] = {}

    def watched(result: Accelerated, data: Tensor, *other: object, validation: Tensor, **more: object) -> object:
        seen.update(trained=data, judged=validation)
        return finetune(result, data, *other, validation=validation, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(refine, "finetune", watched)
    result = run()
    assert (result.images, result.check.images, len(seen["trained"])) == (40, 8, 29)
    assert len(torch.cat([seen["trained"], seen["judged"]]).unique(dim=0)) == 32
    fitted = run("closed-form", images=seen["trained"])
    # Gradients of the output round otherwise where images go through in other batches.
    assert [(one.ranks, one.samples) for one in result.layers] == [(one.ranks, one.samples) for one in fitted.layers]
    assert [one.error for one in result.layers] == pytest.approx([one.error for one in fitted.layers], rel=5e-3)
    enough = images(refine.FEW)
    run(Distill(steps=1), images=enough)
    assert seen["judged"] is None
    assert len(seen["trained"]) == refine.FEW * 9 // 10  # the others are held out to check the result
    assert len(torch.cat([seen["trained"], enough]).unique(dim=0)) == refine.FEW


def test_the_course_is_that_of_all_images_but_those_held_out_to_check_the_result() -> None:
    result = run(Distill(steps=1), images=images(400))
    assert result.training["settings"]["batch"] == refine.course(360)[1] != refine.course(324)[1]


@pytest.mark.usefixtures("short")
def test_images_some_of_which_stay_out_do_not_travel_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are known by their place, which for those behind them changes."""
    sent: list[int] = []
    monkeypatch.setattr("leanconv.calibrate.prefetch.Travel.send", lambda _, batches, room: sent.append(batches.images))
    run()
    assert sent == []
    run("closed-form")
    run(Distill(steps=1), images=images(refine.FEW))
    assert sent == [32, refine.FEW * 9 // 10]


@pytest.mark.parametrize("count", [40, 550])
def test_images_that_autograd_follows(count: int) -> None:
    given = images(count).requires_grad_()
    assert run(Distill(steps=2), images=given).training["history"]["rows"][-1]["step"] >= 2
    assert given.grad is None


@pytest.mark.nightly
def test_few_images_are_enough_to_gain_by() -> None:
    """Judged by images it was fitted to the closed form looked best, and this training was stopped and forgotten."""
    pictures, labels = digits()
    model = train(pictures[:600], labels[:600], epochs=2)
    unseen = pictures[1000:]

    def lost(refined: str) -> float:
        result = run(refined, model=model, images=pictures[:20], speedup=4.0)
        with torch.no_grad():
            return relative(result.model(unseen), model(unseen))

    assert lost("distill") < 0.95 * lost("closed-form")
