"""Spatial splits fitted to what their layers see, before these are solved."""

from __future__ import annotations

from leanconv.calibrate.probes import PatchProbe, Probe
from leanconv.pipeline.engine import Engine
from leanconv.pipeline.image_subset import collected, drawn
from leanconv.solve import Moments, SpatialFactors, swept

# Patches a layer, of so many images: 4 bytes x ROWS x c k k, 151 MB for 512 channels and 3 x 3.
IMAGES, ROWS = 512, 8192


def swept_splits(
    engine: Engine, dense: dict[str, Probe], splits: dict[str, SpatialFactors], sweeps: int
) -> dict[str, SpatialFactors]:
    """``splits`` of the filters ``dense`` probes, both halves fitted in turns to the original's responses; those of
    layers that an earlier process has solved are left out. One pass of IMAGES images.

    Images that are held out later, to judge a layer's fit by, are among them: white patches are beside these, and who
    judges does so with the horizontal half fitted anew.
    """
    done = {} if engine.work is None else engine.work.solved(engine.device)
    probes: dict[str, Probe] = {
        name: PatchProbe(dense[name].site, dense[name].weight, dense[name].bias) for name in splits if name not in done
    }
    if not probes:
        return {}
    images, found = drawn(engine, IMAGES), {}
    with engine.reporter.stage("fitting splits", len(images) + len(probes)) as stage:
        seen = collected(engine, images, probes, ROWS, stage.advance)
        for name, probe in probes.items():
            patches = Moments.of(seen.get(name).y)
            seen.drop(name)
            found[name] = swept(splits[name], probe.weight, patches, sweeps)
            stage.advance()
    seen.close()
    return found
