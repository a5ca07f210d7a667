"""Spatial splits fitted to what their layers see, before these are solved."""

from __future__ import annotations

from leanconv.calibrate.probe import PatchProbe, Probe
from leanconv.engine import Engine
from leanconv.sampling import collected, drawn
from leanconv.solve import Moments, SpatialFactors, swept

# Patches a layer, of so many images: 4 bytes x ROWS x c k k, 151 MB for 512 channels and 3 x 3.
IMAGES, ROWS = 512, 8192


def swept_splits(
    engine: Engine, dense: dict[str, Probe], splits: dict[str, SpatialFactors], sweeps: int
) -> dict[str, SpatialFactors]:
    """``splits`` of the filters ``dense`` probes, both halves fitted in turns to the original's responses. One pass of
    IMAGES images."""
    probes: dict[str, Probe] = {}
    for name in splits:
        probe = dense[name]
        probes[name] = PatchProbe(probe.site, probe.weight, probe.bias)
    seen = collected(engine, drawn(engine, IMAGES), probes, ROWS)
    found: dict[str, SpatialFactors] = {}
    with engine.reporter.stage("fitting splits", len(splits)) as stage:
        for name, split in splits.items():
            patches = Moments.of(seen.get(name).y)
            seen.drop(name)
            found[name] = swept(split, dense[name].weight, patches, sweeps)
            stage.advance()
    seen.close()
    return found
