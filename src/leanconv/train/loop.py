"""The training loop: steps, checks on images held out, checkpoints; the best weights win."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.processes import Processes
from leanconv.errors import LeanconvError
from leanconv.progress import Stage
from leanconv.train.checkpoint import Checkpoint
from leanconv.train.dataset import Examples, Split
from leanconv.train.history import History, Row
from leanconv.train.objectives import Goal, WithGoal
from leanconv.train.settings import FinetuneConfig
from leanconv.train.step import Stepper

# Steps between looks at the loss; a GPU has to be waited for.
LOOK_EVERY = 10
# Steps between two states written to the workdir.
KEEP_EVERY = 200

Weights = dict[str, Tensor]


class Loop:
    """``model`` is trained in place and ends with the best weights seen."""

    def __init__(
        self,
        model: nn.Module,
        goal: Goal,
        split: Split,
        config: FinetuneConfig,
        device: torch.device,
        team: Processes,
        stage: Stage,
        checkpoint: Checkpoint | None,
    ):
        self.model, self.goal, self.split, self.config = model, goal, split, config
        self.device, self.team, self.stage, self.checkpoint = device, team, stage, checkpoint
        self.step = 0
        self.history = History(config.epochs, goal.right)
        self.per_epoch = Examples.steps(split.training, config.batch * team.world)
        self.steps = config.epochs * self.per_epoch
        self.stepper = Stepper(model, goal, config, device, team)
        self.best: Weights = _copy(model.state_dict())
        # Of the steps since the last check: the sum of their losses, and how many they are.
        self._sum, self._since = torch.zeros((), device=device), 0
        self._started = time.monotonic()

    def run(self) -> History:
        """To the end of the epochs, or until it is of no use to go on."""
        restored = self._restore()
        self.stepper.begin()
        if not restored:
            self._check()
            self._save()
        first = self.step
        while self.step < self.steps and self.history.stopped is None:
            self._epoch(first)
        self.model.load_state_dict(self.best)
        self.model.eval()
        self.history.unreadable = sorted({name for names in self.team.all_gather(self._unreadable()) for name in names})
        self._save()
        self.history.seconds += time.monotonic() - self._started
        return self.history

    def _epoch(self, first: int) -> None:
        """What is left of the present epoch. ``first``: the step this process began with."""
        epoch, start = divmod(self.step, self.per_epoch)
        how = {"batch": self.config.batch, "rank": self.team.rank, "world": self.team.world}
        for batch in self.split.examples.training(
            self.split.training, seed=self.config.seed, epoch=epoch, start=start, **how
        ):
            rate = self.config.rate(self.step, self.steps)
            self._sum += self.stepper(batch, rate, self.step)
            self._since += 1
            self.step += 1
            self.stage.advance()
            end_of_epoch = self.step % self.per_epoch == 0
            if (self.step % LOOK_EVERY == 0 or end_of_epoch) and self._broken():
                return
            if end_of_epoch:
                self._check(rate)
                self._say(first)
                if self.history.stopped is None:
                    patience = self.config.patience if self.step < self.steps else 0
                    count = len(self.split.held_out)
                    self.history.stopped = self.history.reason_to_stop(count, self.config.lr, patience)
                if self.history.stopped is not None:
                    return
            if self.step % KEEP_EVERY == 0 and self.step < self.steps:
                self._save()

    def _broken(self) -> bool:
        """Whether the loss is no number any more, in any process."""
        if all(math.isfinite(value) for value in self.team.all_gather(float(self._sum))):
            return False
        self._not_a_number("the loss")
        return True

    def _not_a_number(self, what: str) -> None:
        self.history.stopped = (
            f"{what} became NaN or infinite by step {self.step} (lr={self.config.lr:g}); training stopped, the last "
            "good weights are kept. Try a smaller lr, or clip the gradients."
        )

    def _check(self, rate: float | None = None) -> None:
        """Measure on the images held out; remember the weights if they are the best so far."""
        average = self.stepper.average
        network = self.model if average is None or not self.step else average
        loss = sum(self.team.all_gather(float(self._sum))) / self.team.world / max(1, self._since)
        held_loss, held_right = self._measure(network)
        largest = nn.utils.get_total_norm(list(network.parameters()), math.inf) if held_loss is None else held_loss
        if not math.isfinite(largest):
            if not self.step:
                raise LeanconvError(
                    "the network answers NaN or infinity on the images held out before any training; check its "
                    "weights, the images and the precision."
                )
            self._not_a_number("the weights" if held_loss is None else "the held-out loss")
            return
        row = Row(
            step=self.step,
            epoch=self.step / self.per_epoch,
            lr=self.config.rate(0, self.steps) if rate is None else rate,
            loss=loss if self._since else None,
            held_loss=held_loss,
            held_right=held_right,
        )
        self._sum, self._since = torch.zeros_like(self._sum), 0
        if self.history.add(row):
            self.best = _copy(network.state_dict())

    @torch.no_grad()
    def _measure(self, network: nn.Module) -> tuple[float | None, float | None]:
        """The mean loss and the share of right answers on the images held out."""
        indices = self.split.held_out
        if not indices:
            return None, None
        judged = WithGoal(network.eval(), self.goal)
        loss, right, known = 0.0, 0, True
        how = {"batch": self.config.batch, "rank": self.team.rank, "world": self.team.world}
        for batch in self.split.held.plain(indices, **how):
            losses, rights = self.stepper.judged(judged, self.stepper.placed(batch), batch.labels)
            loss += float(losses.sum())
            known = known and rights is not None
            right += 0 if rights is None else int(rights.sum())
        sums = self.team.all_gather([loss, float(right), float(known)])
        mean_loss, share = (sum(each[place] for each in sums) / len(indices) for place in (0, 1))
        return mean_loss, share if all(each[2] for each in sums) else None

    def _say(self, first: int) -> None:
        row = self.history.rows[-1]
        if row.step < self.step:
            return
        left = (time.monotonic() - self._started) / max(1, self.step - first) * (self.steps - self.step)
        cells = zip(self.history.heads, row.cells(self.config.epochs), strict=True)
        text = ", ".join(f"{head} {cell}" for head, cell in cells if cell)
        self.stage.label(f"{text}, {int(left) // 60}:{int(left) % 60:02d} left")

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        seconds = self.history.seconds + time.monotonic() - self._started
        state: dict[str, Any] = {
            "step": self.step,
            **self.stepper.state(),
            "best": self.best,
            "history": {**self.history.to_json(), "seconds": seconds, "unreadable": self._unreadable()},
            "sum": float(self._sum),
            "since": self._since,
        }
        self.checkpoint.keep(state)

    def _unreadable(self) -> list[str]:
        """As far as this process and those before it know."""
        return sorted({*self.history.unreadable, *self.split.examples.bad, *self.split.held.bad})

    def _restore(self) -> bool:
        """Go on from the last checkpoint, which the lead has."""
        state = self.team.broadcast(None if self.checkpoint is None else self.checkpoint.load())
        if state is None:
            return False
        self.step = state["step"]
        self.stepper.load(state)
        self.best = {key: value.to(self.device) for key, value in state["best"].items()}
        self.history = History.from_json(state["history"])
        self._sum, self._since = torch.tensor(state["sum"], device=self.device), state["since"]
        for _ in range(self.step):
            self.stage.advance()
        return True


def _copy(weights: Weights) -> Weights:
    return {key: value.detach().clone() for key, value in weights.items()}
