"""The training loop: steps, checks on images held out, checkpoints; the best weights win."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from leanconv.entrance import copied
from leanconv.errors import LeanconvError
from leanconv.network.failure import model_failed
from leanconv.network.recognise import BATCH_NORMS
from leanconv.progress import Stage
from leanconv.team import Team
from leanconv.train.checkpoint import Checkpoint
from leanconv.train.examples import Batch, Examples, mixed, seeded
from leanconv.train.goals import Goal, WithGoal
from leanconv.train.history import History, Row
from leanconv.train.optimizers import optimizers, reached
from leanconv.train.settings import Settings

# Steps between looks at the loss; a GPU has to be waited for.
LOOK_EVERY = 10
# A network that has lost more than this share of what it got right was trained with too large a rate; if that is more
# than chance does: FEW images at least, and three standard deviations of a count.
COLLAPSE, FEW = 0.5, 10

Weights = dict[str, Tensor]


@dataclass
class Loop:
    """``model`` is trained in place and ends with the best weights seen."""

    model: nn.Module
    goal: Goal
    examples: Examples
    training: Sequence[int]  # indices
    held: Examples
    held_out: Sequence[int]
    settings: Settings
    device: torch.device
    team: Team
    stage: Stage
    checkpoint: Checkpoint | None
    arguments: dict[str, Any]
    step: int = 0
    history: History = field(init=False)

    def __post_init__(self) -> None:
        given = self.settings
        self.history = History(given.epochs, self.goal.right)
        self.per_epoch = Examples.steps(self.training, given.batch * self.team.world)
        self.steps = given.epochs * self.per_epoch
        self.dtype = next(self.model.parameters()).dtype
        self.half = _half(given.precision, self.device)
        self.optimizers = optimizers(self.model, given, self.device, self.half)
        if self.half is not None and self.device.type == "cuda":
            # Tensor cores take half-precision convolutions in this layout; in the other they are turned around first.
            for network in (self.model, getattr(self.goal, "original", None)):
                if network is not None:
                    network.to(memory_format=torch.channels_last)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.half is torch.float16)
        self.average: AveragedModel | None = None
        if given.ema:
            self.average = AveragedModel(copied(self.model), multi_avg_fn=self._into)
        self.network: nn.Module = WithGoal(self.model, self.goal)
        self.best: Weights = _copy(self.model.state_dict())
        self._sum, self._since = torch.zeros((), device=self.device), 0
        self._started = time.monotonic()

    def run(self) -> History:
        """To the end of the epochs, or until it is of no use to go on."""
        restored = self._restore()
        if self.team.world > 1:
            # A network may have weights that these images do not reach.
            self.network = DistributedDataParallel(self.network, find_unused_parameters=True)
        if not restored:
            self._check()
            self._keep()
        begun = self.step
        while self.step < self.steps and self.history.stopped is None:
            for batch in self._epoch():
                rate = self.settings.rate(self.step, self.steps)
                self._train(batch, rate)
                self.step += 1
                self.stage.advance()
                last = self.step == self.steps
                checking = last or self.step % (self.settings.check_every or self.per_epoch) == 0
                if (self.step % LOOK_EVERY == 0 or checking) and self._broken():
                    break
                if checking:
                    self._check(rate)
                    self._say(begun)
                    if self._hopeless():
                        break
                if self.step % self.settings.checkpoint_every == 0 and not last:
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
        return self.examples.training(
            self.training,
            batch=self.settings.batch,
            seed=self.settings.seed,
            epoch=epoch,
            start=start,
            rank=self.team.rank,
            world=self.team.world,
        )

    def _train(self, batch: Batch, rate: float) -> None:
        _training_mode(self.model, dropout=self.goal.right == "top-1")
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
        with seeded(mixed(self.settings.seed, "step", self.step, self.team.rank), self.device):  # what dropout draws
            losses, _ = self._judged(self.network, batch)
        self.team.words("ready")  # who failed up to here ends all, before they wait for its gradients
        # DistributedDataParallel takes the mean over processes: this makes it the mean over the images of all.
        loss = losses.sum() * (self.team.world / batch.count)
        self.scaler.scale(loss).backward()
        self._move()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self._sum += loss.detach().float()
        self._since += 1

    def _move(self) -> None:
        """The weights by their gradients; none of them where one has overflowed: clipped together, all would be NaN."""
        moving = reached(self.optimizers)
        for optimizer in moving:
            self.scaler.unscale_(optimizer)
        overflow = False
        if self.settings.clip or self.scaler.is_enabled():
            norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            overflow = self.scaler.is_enabled() and not math.isfinite(norm)
            if self.settings.clip and not overflow:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), self.settings.clip, norm)
        for optimizer in () if overflow else moving:
            self.scaler.step(optimizer)
        self.scaler.update()

    @torch.no_grad()
    def _into(self, average: Any, weights: Any, number: Any) -> None:
        torch._foreach_lerp_(average, weights, 1 - self.settings.decay(self.step))

    def _judged(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Loss and rightness of every image."""
        images = batch.images.to(self.device, non_blocking=True)
        if images.is_floating_point():
            images = images.to(self.dtype)
        with torch.autocast(self.device.type, self.half) if self.half is not None else nullcontext():
            try:
                loss, right = network(images, batch.labels)
                return loss, right
            except LeanconvError:
                raise
            except Exception as error:
                raise model_failed(error, images) from error

    def _broken(self) -> bool:
        """Whether the loss is no number any more, in any process."""
        if all(math.isfinite(value) for value in self.team.words(float(self._sum))):
            return False
        self._not_a_number("the loss")
        return True

    def _not_a_number(self, what: str) -> None:
        self.history.stopped = (
            f"{what} became NaN or infinite by step {self.step} (lr={self.settings.lr:g}); training stopped, the last "
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
            lr=self.settings.rate(0, self.steps) if rate is None else rate,
            loss=loss if self._since else None,
            held_loss=held_loss,
            held_right=held_right,
        )
        self._sum, self._since = torch.zeros_like(self._sum), 0
        if self.history.add(row):
            self.best = _copy(judged.state_dict())

    def _judged_network(self) -> nn.Module:
        """The network, or the average of its weights."""
        return self.model if self.average is None or not self.step else self.average.module

    @torch.no_grad()
    def _measure(self) -> tuple[float | None, float | None]:
        if not self.held_out:
            return None, None
        network = WithGoal(self._judged_network().eval(), self.goal)
        loss, right, known = 0.0, 0, True
        batches = self.held.plain(self.held_out, batch=self.settings.batch, rank=self.team.rank, world=self.team.world)
        for batch in batches:
            losses, found = self._judged(network, batch)
            loss += float(losses.sum())
            known = known and found is not None
            right += 0 if found is None else int(found.sum())
        sums = self.team.words([loss, float(right), float(known)])
        count = len(self.held_out)
        total, rights = (sum(found[place] for found in sums) / count for place in (0, 1))
        return total, rights if all(found[2] for found in sums) else None

    def _hopeless(self) -> bool:
        """Whether there is no point in going on, or something is wrong already."""
        if self.history.stopped is not None:
            return True
        rows, first = self.history.rows, self.history.first
        now = rows[-1]
        if now.held_loss is None or first.held_loss is None:
            return False
        before, after = first.held_right or 0.0, now.held_right or 0.0
        count = len(self.held_out)
        lost = (before - after) * count
        if after < COLLAPSE * before and lost >= max(FEW, 3 * math.sqrt(before * count)):
            self.history.stopped = (
                f"held-out {self.goal.right} collapsed from {100 * before:.2f} % to {100 * after:.2f} % by step "
                f"{self.step}: lr={self.settings.lr:g} is too large; training stopped, the best weights are kept. Try "
                "a tenth of it."
            )
        since = sum(1 for row in rows if row.step > self.history.best)
        patience = self.settings.patience if self.step < self.steps else 0
        if self.history.stopped is None and patience and since >= patience:
            self.history.stopped = f"no better for {since} checks; training stopped at step {self.step}."
        return self.history.stopped is not None

    def _say(self, begun: int) -> None:
        row = self.history.rows[-1]
        if row.step < self.step:
            return
        left = (time.monotonic() - self._started) / max(1, self.step - begun) * (self.steps - self.step)
        said = zip(self.history.heads, row.cells(self.settings.epochs), strict=True)
        text = ", ".join(f"{head} {cell}" for head, cell in said if cell)
        self.stage.label(f"{text}, {int(left) // 60}:{int(left) % 60:02d} left")

    def _keep(self) -> None:
        if self.checkpoint is None:
            return
        seconds = self.history.seconds + time.monotonic() - self._started
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "best": self.best,
            "history": {**self.history.to_json(), "seconds": seconds, "unreadable": self._unreadable()},
            "sum": float(self._sum),
            "since": self._since,
        }
        self.checkpoint.keep(self.arguments, state)

    def _unreadable(self) -> list[str]:
        """As far as this process and those before it know."""
        return sorted({*self.history.unreadable, *self.examples.bad, *self.held.bad})

    def _restore(self) -> bool:
        """Go on from the last checkpoint, which the lead has."""
        state = self.team.share(None if self.checkpoint is None else self.checkpoint.load(self.arguments))
        if state is None:
            return False
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, found in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(found)
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.best = {key: value.to(self.device) for key, value in state["best"].items()}
        self.history = History.from_json(state["history"])
        self._sum, self._since = torch.tensor(state["sum"], device=self.device), state["since"]
        for _ in range(self.step):
            self.stage.advance()
        return True


def _training_mode(model: nn.Module, *, dropout: bool) -> None:
    """Batch norms keep their statistics: what the network learnt on is not what it is tuned on."""
    model.train(dropout)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.eval()


def _copy(weights: Weights) -> Weights:
    return {key: value.detach().clone() for key, value in weights.items()}


def _half(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of mixed precision; by itself only where a GPU gains from it."""
    if precision == "off" or (precision == "auto" and device.type != "cuda"):
        return None
    return torch.float16 if precision == "fp16" else torch.bfloat16
