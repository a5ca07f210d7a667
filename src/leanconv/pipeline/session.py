"""What all stages of one run share: the device, the processes, images on their way, the workdir and random states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from leanconv.calibrate.batches import Batch, Batches
from leanconv.calibrate.memory import Memory, device_share
from leanconv.calibrate.prefetch import travelling
from leanconv.calibrate.processes import Processes
from leanconv.config import Options
from leanconv.network.user_model import check_model, device_of, parse_device
from leanconv.progress import reporter
from leanconv.storage.workdir import Workdir, digest_of_batch, digest_of_model
from leanconv.system.process_memory import heap_at_hand, quiet_collector
from leanconv.system.random_state import untouched_rng
from leanconv.system.stage_clock import Clock
from leanconv.system.threads import Threads


class Notebook:
    """Measurements, in memory and in the workdir if there is one."""

    def __init__(self, session: Session):
        self._session = session
        self._known: dict[str, dict[str, Any]] = {}

    def read(self, name: str) -> dict[str, Any]:
        if name not in self._known:
            work = self._session.work
            self._known[name] = {} if work is None else work.read_notes(name)
        return self._known[name]

    def write(self, name: str, data: dict[str, Any]) -> None:
        self._known[name] = data
        if self._session.work is not None:
            self._session.work.write_notes(name, data)


class Session:
    """``limit``: bytes of memory the run may keep things in; None: half of what is free."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None,
        seed: int,
        *,
        progress: bool = False,
        workdir: str | os.PathLike[str] | None = None,
        limit: int | None = None,
        threads: int | None = None,
    ):
        check_model(model)
        self.device = device_of(model) if device is None else parse_device(device)
        self.progress, self._seed, self._limit = progress, seed, limit
        self.threads = Threads(threads, follows=self.device.type == "cpu")
        self.team = Processes(self.device)
        self.clock = Clock(self.device)
        self.reporter = reporter(progress and self.team.is_main)
        self.share = device_share(self.device, limit)
        self.keeps_state = workdir is not None
        self.work: Workdir | None = None  # of the main process; the others keep nothing
        self.notes = Notebook(self)
        self._digests: list[tuple[int, str]] = []  # of the images, as they were given
        self._workdir = workdir
        self._stack = ExitStack()
        self.travel = self._stack.enter_context(travelling(self.device))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around every stage: random states and threads are restored at its end, and an error in one process ends all.
        A caller in inference mode still gets a network that can be trained."""
        with (
            untouched_rng(self._seed),
            quiet_collector(),
            heap_at_hand(),
            self.threads.held(),
            torch.inference_mode(False),
            self.team.ending_together(),
        ):
            if self._workdir is not None and self.work is None and self.team.is_main:
                self.work = Workdir(self._workdir)
                self._stack.callback(self.work.close)
            yield

    def close(self) -> None:
        self._stack.close()

    def memory(self) -> Memory:
        """The memory that is free now, without images already on their way to a GPU."""
        folder = None if self.work is None else self.work.folder
        return Memory(self.device, self._limit, folder, self.share if self.travel.bytes else None)

    def check_alike(self, model: nn.Module, images: int, options: Options) -> None:
        """Refuse to go on where the processes were given different things."""
        self.team.check_equal("arguments", [options.to_json(), not self.keeps_state])
        self.team.check_equal("images", images)
        if self.team.world > 1:
            self.team.check_equal("weights", digest_of_model(model))

    def watch(self, batch: Batch) -> None:
        """As it was read."""
        if self.keeps_state:
            self._digests.append(digest_of_batch(batch))

    def open_workdir(self, model: nn.Module, batches: Batches, put_aside: int, options: Options) -> None:
        """Check the arguments against what the workdir holds. ``put_aside``: images that ``batches`` leave out."""
        for _ in batches:  # read and watched to the last
            pass
        shares = self.team.all_gather(self._digests)
        if self.work is not None:
            images = hashlib.sha256(repr(sorted(item for share in shares for item in share)).encode()).hexdigest()
            facts = {"model": digest_of_model(model), "images": images, "device": self.device.type}
            self.work.begin({**facts, "put aside": put_aside}, options)
        if self.threads.free:  # one number from here on, that of an earlier process: others round otherwise
            known = None if self.work is None else self.work.threads
            self.threads.keep(self.team.broadcast(known or self.threads.count))

    def begin(self, options: Options, plan: dict[str, Any] | None = None) -> None:
        """``plan``: as it is saved, once it is known."""
        if self.work is not None:
            self.work.begin_run(options, plan)

    def finish(self) -> None:
        if self.work is not None:
            self.work.finish()
