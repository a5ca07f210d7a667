"""What is measured of every layer: how far the output moves by an error of its responses."""

from __future__ import annotations

from leanconv.calibrate.batches import Batch, out_of_memory
from leanconv.calibrate.gradients import AT_ONCE, Gradients, output_gradients
from leanconv.calibrate.streams import Streams, as_fits, drawn, in_parts
from leanconv.errors import LeanconvError
from leanconv.ranks.spectra import Spectra

# Images that gradients are taken of: two to three passes of so many.
IMAGES = 128
STAGE = "measuring layers"


def measure_gradients(streams: Streams, spectra: Spectra) -> dict[str, Gradients]:
    """Of every layer. Raises LeanconvError where there are none, or no memory for those of one image."""
    images = drawn(streams, IMAGES)
    if streams.cutting is not None and streams.cutting.one_by_one:
        images = list(in_parts(images, AT_ONCE))

    def run(batches: list[Batch]) -> dict[str, Gradients]:
        with streams.clock.stage(STAGE), streams.reporter.stage(STAGE, len(batches)) as stage:
            return output_gradients(
                streams.original,
                batches,
                spectra.dense,
                spectra.targets.get,
                device=streams.device,
                seed=streams.seed,
                step=stage.advance,
            )

    try:
        return as_fits(images, run)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise LeanconvError(f"there is no memory for those of one image ({type(error).__name__})") from error
