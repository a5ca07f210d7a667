"""The training loop: steps, checks on images held out, checkpoints; the best weights win."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from leanconv.calibrate.processes import Team
from leanconv.errors import LeanconvError
from leanconv.progress import Stage
from leanconv.train.checkpoint import Checkpoint
from leanconv.train.dataset import Batch, Examples, Split
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
        team: Team,
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
        self._sum, self._since = torch.zeros((), device=device), 0
        self._started = time.monotonic()

    def run(self) -> History:
        """To the end of the epochs, or until it is of no use to go on."""
        restored = self._restore()
        self.stepper.begin()
        if not restored:
            self._check()
            self._keep()
        begun = self.step
        while self.step < self.steps and self.history.stopped is None:
            for batch in self._epoch():
                rate = self.config.rate(self.step, self.steps)
                self._sum += self.stepper(batch, rate, self.step)
                self._since += 1
                self.step += 1
                self.stage.advance()
                checking = self.step % self.per_epoch == 0
                if (self.step % LOOK_EVERY == 0 or checking) and self._broken():
                    break
                if checking:
                    self._check(rate)
                    self._say(begun)
                    if self._hopeless():
                        break
                if self.step % KEEP_EVERY == 0 and self.step < self.steps:
                    self._keep()
        self.model.load_state_dict(self.best)
        self.model.eval()
        found = self.team.words(self._unreadable())
        self.history.unreadable = sorted({name for names in found for name in names})
        self._keep()
        self.history.seconds += time.monotonic() - self._started
        return self.history

    def _epoch(self) -> Iterator[Batch]:
        epoch, start = divmod(self.step, self.per_epoch)
        split, config, team = self.split, self.config, self.team
        return split.examples.training(
            split.training,
            batch=config.batch,
            seed=config.seed,
            epoch=epoch,
            start=start,
            rank=team.rank,
            world=team.world,
        )

    def _broken(self) -> bool:
        """Whether the loss is no number any more, in any process."""
        if all(math.isfinite(value) for value in self.team.words(float(self._sum))):
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
        judged = self._judged_network()
        loss = sum(self.team.words(float(self._sum))) / self.team.world / max(1, self._since)
        held_loss, held_right = self._measure()
        largest = nn.utils.get_total_norm(list(judged.parameters()), math.inf) if held_loss is None else held_loss
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
            self.best = _copy(judged.state_dict())

    def _judged_network(self) -> nn.Module:
        """The network, or the average of its weights."""
        average = self.stepper.average
        return self.model if average is None or not self.step else average

    @torch.no_grad()
    def _measure(self) -> tuple[float | None, float | None]:
        if not self.split.held_out:
            return None, None
        network = WithGoal(self._judged_network().eval(), self.goal)
        loss, right, known = 0.0, 0, True
        team = self.team
        for batch in self.split.held.plain(
            self.split.held_out, batch=self.config.batch, rank=team.rank, world=team.world
        ):
            losses, found = self.stepper.judged(network, self.stepper.placed(batch), batch.labels)
            loss += float(losses.sum())
            known = known and found is not None
            right += 0 if found is None else int(found.sum())
        sums = self.team.words([loss, float(right), float(known)])
        count = len(self.split.held_out)
        total, rights = (sum(found[place] for found in sums) / count for place in (0, 1))
        return total, rights if all(found[2] for found in sums) else None

    def _hopeless(self) -> bool:
        """Whether there is no point in going on, or something is wrong already."""
        if self.history.stopped is None:
            patience = self.config.patience if self.step < self.steps else 0
            self.history.stopped = self.history.no_use(len(self.split.held_out), self.config.lr, patience)
        return self.history.stopped is not None

    def _say(self, begun: int) -> None:
        row = self.history.rows[-1]
        if row.step < self.step:
            return
        left = (time.monotonic() - self._started) / max(1, self.step - begun) * (self.steps - self.step)
        said = zip(self.history.heads, row.cells(self.config.epochs), strict=True)
        text = ", ".join(f"{head} {cell}" for head, cell in said if cell)
        self.stage.label(f"{text}, {int(left) // 60}:{int(left) % 60:02d} left")

    def _keep(self) -> None:
        if self.checkpoint is None:
            return
        seconds = self.history.seconds + time.monotonic() - self._started
        state = {
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
        state = self.team.share(None if self.checkpoint is None else self.checkpoint.load())
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
