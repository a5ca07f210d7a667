"""One step of training: gradients of the goal, the weights moved by them, and their average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from leanconv.calibrate.processes import Processes
from leanconv.errors import LeanconvError
from leanconv.network.recognise import BATCH_NORMS
from leanconv.network.user_model import copied, model_failed
from leanconv.system.random_state import seeded
from leanconv.train.cuda_graphs import Steps
from leanconv.train.dataset import Batch, mixed
from leanconv.train.objectives import Distillation, Goal, Judged, WithGoal
from leanconv.train.optimizers import optimizers, set_rate, takes_tensors
from leanconv.train.settings import FinetuneConfig


class Stepper:
    """``model`` is changed in place, step by step; ``average`` of its weights if the settings ask for it."""

    def __init__(self, model: nn.Module, goal: Goal, config: FinetuneConfig, device: torch.device, team: Processes):
        self.model, self.goal, self.config, self.device, self.team = model, goal, config, device, team
        self._step = 0
        self._dtype = next(model.parameters()).dtype
        # bfloat16 in mixed precision; by itself only where a GPU gains from it.
        self._bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
        self._optimizers = optimizers(
            model, config.optimizer, config.lr, device, weight_decay=config.weight_decay, bf16=self._bf16
        )
        if self._bf16 and device.type == "cuda":
            # Tensor cores take half-precision convolutions in this layout; in the other they are turned around first.
            model.to(memory_format=torch.channels_last)
            if isinstance(goal, Distillation):
                goal.original.to(memory_format=torch.channels_last)
        self.average: nn.Module | None = copied(model) if config.ema else None
        self._network: nn.Module = WithGoal(model, goal)
        self._recording = Steps(self._unlabelled, self._move) if self._recordable() else None

    def begin(self) -> None:
        """With the weights as they are now."""
        if self.team.world > 1:
            # A network may have weights that these images do not reach.
            self._network = DistributedDataParallel(self._network, find_unused_parameters=True)

    def __call__(self, batch: Batch, rate: float, step: int) -> Tensor:
        """Step number ``step``; its loss."""
        self._step = step
        for optimizer in self._optimizers:
            set_rate(optimizer, rate, self.device)
        images = self.placed(batch)
        with seeded(mixed(self.config.seed, "step", step, self.team.rank), self.device):  # what dropout draws
            if self._recording is None:
                loss = self._gradients(images, batch.labels, batch.count)
                self._move()
            else:
                loss = self._recording(images)
                # A graph writes weights behind torch's back: what was made of them must be seen to be out of date.
                for parameter in self.model.parameters():
                    torch.autograd.graph.increment_version(parameter)
        if self.average is not None:
            self._average(self.average)
        return loss

    def _recordable(self) -> bool:
        """Whether steps may be recorded, as far as this loop goes: labels are looked at, dropout draws, and processes
        wait for one another."""
        quiet = isinstance(self.goal, Distillation) and self.team.world == 1
        return quiet and self.device.type == "cuda" and all(map(takes_tensors, self._optimizers))

    def _unlabelled(self, images: Tensor) -> Tensor:
        return self._gradients(images, None, len(images))

    def _gradients(self, images: Tensor, labels: Tensor | None, count: int) -> Tensor:
        """Compute those of the weights; return the loss. ``count``: images of all processes."""
        self.model.train(self.goal.right == "top-1")  # dropout is for training with labels
        for module in self.model.modules():
            if isinstance(module, BATCH_NORMS):
                module.eval()  # keeps its statistics: what the network learnt on is not what it is tuned on
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses, _ = self.judged(self._network, images, labels)
        self.team.all_gather("ready")  # a process that failed ends all here, before they wait for its gradients
        # DistributedDataParallel takes the mean over processes: this makes it the mean over the images of all.
        loss = losses.sum() * (self.team.world / count)
        loss.backward()
        return loss.detach().float()

    def _move(self) -> None:
        """The weights by their gradients."""
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for optimizer in self._optimizers:
            optimizer.step()

    @torch.no_grad()
    def _average(self, average: nn.Module) -> None:
        """Add the weights to their average, which begins with those of the first step. torch's AveragedModel would wait
        for the GPU every time, to send it a count."""
        old: list[Tensor] = list(average.parameters())
        new: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(old, new, 1 - self.config.decay(self._step) if self._step else 1.0)
        for before, after in zip(average.buffers(), self.model.buffers(), strict=True):
            before.copy_(after)

    def placed(self, batch: Batch) -> Tensor:
        images = batch.images.to(self.device, non_blocking=True)
        return images.to(self._dtype) if images.is_floating_point() else images

    def judged(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        """Of a network with its goal."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
            try:
                judged: Judged = network(images, labels)
                return judged
            except LeanconvError:
                raise
            except Exception as error:
                raise model_failed(error, images) from error

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            # How it computes is this device's matter, whichever the state was written on.
            for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: own[key] for key in ("fused", "foreach", "capturable") if key in own})
            optimizer.load_state_dict(saved)
        if self.average is not None:
            self.average.load_state_dict(state["average"])
