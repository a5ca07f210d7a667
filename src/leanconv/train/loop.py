"""The training loop: steps, checks on images held out, checkpoints. The best weights win."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from leanconv.calibrate.processes import Processes
from leanconv.errors import LeanconvError
from leanconv.network.recognise import BATCH_NORMS
from leanconv.network.user_model import copied, model_failed
from leanconv.progress import Stage
from leanconv.system.random_state import seeded
from leanconv.train.checkpoint import Checkpoint
from leanconv.train.cuda_graphs import Steps
from leanconv.train.dataset import Batch, Examples, Split, seed_from
from leanconv.train.history import History, Row
from leanconv.train.objectives import Distillation, Goal, Judged, WithGoal
from leanconv.train.optimizers import optimizers, set_rate, takes_tensors
from leanconv.train.settings import FinetuneConfig

# Steps between two looks at the loss, each of which waits for the GPU.
LOOK_EVERY = 10
# Steps between two checkpoints.
KEEP_EVERY = 200


@dataclass
class Stepper:
    """Steps of training, which change ``model`` in place; and ``average``, the average of its weights, with ``ema``."""

    model: nn.Module
    goal: Goal
    config: FinetuneConfig
    device: torch.device
    team: Processes

    def __post_init__(self) -> None:
        model, config, gpu = self.model, self.config, self.device.type == "cuda"
        self._step = 0
        self._dtype = next(model.parameters()).dtype
        # "auto": bfloat16 only where a GPU gains from it.
        self._bf16 = config.precision == "bf16" or (config.precision == "auto" and gpu)
        self._optimizers = optimizers(
            model, config.optimizer, config.lr, self.device, weight_decay=config.weight_decay, bf16=self._bf16
        )
        if self._bf16 and gpu:
            # Tensor cores take half-precision convolutions in this layout; from another, data is rearranged first.
            model.to(memory_format=torch.channels_last)
            if isinstance(self.goal, Distillation):
                self.goal.original.to(memory_format=torch.channels_last)
        self.average: nn.Module | None = copied(model) if config.ema else None
        self._network: nn.Module = WithGoal(model, self.goal)
        self._recording = Steps(self._gradients, self._move) if self._recordable() else None

    def begin(self) -> None:
        """With the weights as they are now."""
        if self.team.world > 1:
            # A network may have weights that these images do not reach.
            self._network = DistributedDataParallel(self._network, find_unused_parameters=True)

    def __call__(self, batch: Batch, rate: float, step: int) -> Tensor:
        """Do step number ``step``; return its loss."""
        self._step = step
        for optimizer in self._optimizers:
            set_rate(optimizer, rate, self.device)
        images = self.on_device(batch)
        with seeded(seed_from(self.config.seed, "step", step, self.team.rank), self.device):  # what dropout draws
            if self._recording is None:
                loss = self._gradients(images, batch.labels, batch.count)
                self._move()
            else:
                loss = self._recording(images)
                # A graph changes weights unseen by autograd, which must know that what was made from them is old.
                for parameter in self.model.parameters():
                    torch.autograd.graph.increment_version(parameter)
        if self.average is not None:
            self._add_to(self.average)
        return loss

    def _recordable(self) -> bool:
        """Whether this loop allows recording: labels are read, dropout draws, and processes wait for each other."""
        quiet = isinstance(self.goal, Distillation) and self.team.world == 1
        return quiet and self.device.type == "cuda" and all(map(takes_tensors, self._optimizers))

    def _gradients(self, images: Tensor, labels: Tensor | None = None, count: int | None = None) -> Tensor:
        """Compute those of the weights; return the loss. ``count``: images of all processes."""
        self.model.train(self.goal.right == "top-1")  # dropout is for training with labels
        for module in self.model.modules():
            if isinstance(module, BATCH_NORMS):
                module.eval()  # keeps the statistics of the images the network was trained on
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses, _ = self.judge(self._network, images, labels)
        self.team.all_gather("ready")  # if a process failed, all end here, before they wait for its gradients
        # DistributedDataParallel takes the mean over processes: this makes it the mean over the images of all.
        loss = losses.sum() * (self.team.world / (count or len(images)))
        loss.backward()
        return loss.detach().float()

    def _move(self) -> None:
        """Move the weights by their gradients."""
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for optimizer in self._optimizers:
            optimizer.step()

    @torch.no_grad()
    def _add_to(self, average: nn.Module) -> None:
        """Add the weights to their average, which starts with those after the first step. torch's AveragedModel would
        wait for the GPU every time, to send it a count."""
        old: list[Tensor] = list(average.parameters())
        new: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(old, new, 1 - self.config.decay(self._step) if self._step else 1.0)
        for before, after in zip(average.buffers(), self.model.buffers(), strict=True):
            before.copy_(after)

    def on_device(self, batch: Batch) -> Tensor:
        images = batch.images.to(self.device, non_blocking=True)
        return images.to(self._dtype) if images.is_floating_point() else images

    def judge(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        """``network`` is one with its goal."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
            try:
                judged: Judged = network(images, labels)
                return judged
            except LeanconvError:
                raise
            except Exception as error:
                raise model_failed(error, images) from error

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            # How to compute depends on this device, not on that of the state.
            for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: own[key] for key in ("fused", "foreach", "capturable") if key in own})
            optimizer.load_state_dict(saved)
        if self.average is not None:
            self.average.load_state_dict(state["average"])


@dataclass
class Loop:
    """``model`` is trained in place and ends with the best weights that were measured."""

    model: nn.Module
    goal: Goal
    split: Split
    config: FinetuneConfig
    device: torch.device
    team: Processes
    stage: Stage
    checkpoint: Checkpoint | None

    def __post_init__(self) -> None:
        config, team = self.config, self.team
        self.share = {"batch": config.batch, "rank": team.rank, "world": team.world}
        self.step = 0
        self.per_epoch = Examples.steps(self.split.training, config.batch * team.world)
        self.steps = config.epochs * self.per_epoch
        self.history = History(config.epochs, self.goal.right)
        self.stepper = Stepper(self.model, self.goal, config, self.device, team)
        self.best = _copy(self.model.state_dict())
        # Of the steps since the last check: the sum of their losses, and their number.
        self._sum, self._since = torch.zeros((), device=self.device), 0
        self._started, self._first = time.monotonic(), 0  # the time, and the step this process starts with

    def run(self) -> History:
        """Train to the end of the epochs, or until it is of no use to go on."""
        restored = self._restore()
        self.stepper.begin()
        if not restored:
            self._check()
            self._save()
        while self.step < self.steps and self.history.stopped is None:
            self._epoch()
        self.model.load_state_dict(self.best)
        self.model.eval()
        self.history.unreadable = sorted({name for names in self.team.all_gather(self._unreadable()) for name in names})
        self._save()
        self.history.seconds += time.monotonic() - self._started
        return self.history

    def _epoch(self) -> None:
        """The rest of the current epoch."""
        epoch, start = divmod(self.step, self.per_epoch)
        batches = self.split.examples.training(
            self.split.training, seed=self.config.seed, epoch=epoch, start=start, **self.share
        )
        for batch in batches:
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
                self._report()
                if self.history.stopped is None:
                    patience = self.config.patience if self.step < self.steps else 0
                    count = len(self.split.held_out)
                    self.history.stopped = self.history.reason_to_stop(count, self.config.lr, patience)
                if self.history.stopped is not None:
                    return
            if self.step % KEEP_EVERY == 0 and self.step < self.steps:
                self._save()

    def _broken(self) -> bool:
        """Whether the loss of any process is no finite number."""
        if all(math.isfinite(value) for value in self.team.all_gather(float(self._sum))):
            return False
        self._stop_broken("the loss")
        return True

    def _stop_broken(self, what: str) -> None:
        self.history.stopped = (
            f"{what} became NaN or infinite by step {self.step} (lr={self.config.lr:g}); training stopped, the last "
            "good weights are kept. Try a smaller lr, or clip the gradients."
        )

    def _check(self, rate: float | None = None) -> None:
        """Measure on the images held out; keep the weights if they are the best so far."""
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
            self._stop_broken("the weights" if held_loss is None else "the held-out loss")
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
        for batch in self.split.held.plain(indices, **self.share):
            losses, rights = self.stepper.judge(judged, self.stepper.on_device(batch), batch.labels)
            loss += float(losses.sum())
            known = known and rights is not None
            right += 0 if rights is None else int(rights.sum())
        loss_sums, right_sums, all_known = zip(*self.team.all_gather((loss, right, known)), strict=True)
        return sum(loss_sums) / len(indices), sum(right_sums) / len(indices) if all(all_known) else None

    def _report(self) -> None:
        """Show the last row and the time left."""
        row = self.history.rows[-1]
        if row.step < self.step:
            return
        left = (time.monotonic() - self._started) / max(1, self.step - self._first) * (self.steps - self.step)
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
        """As far as this process and earlier ones know."""
        return sorted({*self.history.unreadable, *self.split.examples.bad, *self.split.held.bad})

    def _restore(self) -> bool:
        """Go on from the last checkpoint, which the lead process has."""
        state = self.team.broadcast(None if self.checkpoint is None else self.checkpoint.load())
        if state is None:
            return False
        self.step = self._first = state["step"]
        self.stepper.load(state)
        self.best = {key: value.to(self.device) for key, value in state["best"].items()}
        self.history = History.from_json(state["history"])
        self._sum, self._since = torch.tensor(state["sum"], device=self.device), state["since"]
        for _ in range(self.step):
            self.stage.advance()
        return True


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in weights.items()}
