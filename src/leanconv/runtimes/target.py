"""What a network is made fast for, and the times that were measured there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from leanconv.errors import LeanconvError, listing, unknown_name, whole


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how ``ranks="latency"`` times the network and its layers.

    Attributes:
        runtime: ``"torch"`` (operation by operation), ``"onnxruntime"`` or ``"openvino"``: each that is ``timeable`` in
            ``leanconv.runtimes.runners``.
        device: for example ``"cpu"`` or ``"cuda"``. Default: where the model is for torch, the CPU for the others.
        threads: CPU threads of the runtime. One by default: what is fast on one thread is fast on each of many.
        batch: images a call.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.

    Examples:
        >>> import leanconv
        >>> print(leanconv.Target(runtime="onnxruntime"))
        onnxruntime on cpu, 1 thread, batch 1, float32
    """

    runtime: str = "torch"
    device: str | None = None
    threads: int = 1
    batch: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        from leanconv.runtimes.runners import DTYPES, RUNTIMES  # here: importing leanconv loads no runner

        timeable = [name for name, runner in RUNTIMES.items() if runner.timeable]
        if self.runtime not in timeable:
            raise unknown_name(str(self.runtime), timeable, what="runtime", where="target")
        if self.dtype not in DTYPES:
            raise LeanconvError(f"dtype={self.dtype!r} of the target is not known; use {listing(DTYPES)}.")
        device = RUNTIMES[self.runtime].device if self.device is None else str(self.device)
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "threads", whole("threads", self.threads, 1))
        object.__setattr__(self, "batch", whole("batch", self.batch, 1))

    @classmethod
    def check(cls, value: Any) -> Target:
        """``value`` as it is, the default for None, or one made from a mapping of the same names."""
        if isinstance(value, cls):
            return value
        settings = {} if value is None else value
        if not isinstance(settings, Mapping):
            raise LeanconvError(f"target is a {type(value).__name__}; give leanconv.Target(runtime=..., threads=...).")
        known = tuple(cls.__dataclass_fields__)
        for name in settings:
            if name not in known:
                raise unknown_name(str(name), known, what="setting", where="target")
        return cls(**settings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        place = "" if self.device is None else f" on {self.device}"
        return f"{self.runtime}{place}, {threads}, batch {self.batch}, {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Both networks timed in turns.

    Attributes:
        target: what they were timed on.
        original_ms: median milliseconds of a call of the original.
        accelerated_ms: and of the accelerated network.
        ratio: how many times longer the original takes.
        low: lower end of the ratio's 95 % interval.
        high: upper end.
    """

    target: Target
    original_ms: float
    accelerated_ms: float
    ratio: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        return cls(**{**data, "target": Target(**data["target"])})

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f}x less time (95 % interval {self.low:.2f} to {self.high:.2f}): {self.original_ms:.2f} ms "
            f"-> {self.accelerated_ms:.2f} ms; {self.target}"
        )
