"""From a saved folder to one ONNX file, and answers and time of it in onnxruntime.

    python examples/onnx_deploy.py vgg16-4x --out vgg16-4x.onnx
    python examples/onnx_deploy.py --out digits-4x.onnx         # without a folder: a network of its own; offline

Needs `pip install 'leanconv[onnx]'`. What runs the file (`serve`) uses onnxruntime and numpy only: neither torch nor
leanconv has to be installed where it is deployed. The folder must be of a network that leanconv can build by name.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import leanconv
from leanconv.demo import digits, train


def accelerated(options: argparse.Namespace) -> tuple[nn.Module, tuple[int, int, int]]:
    """The network and the shape of an image it takes."""
    if options.folder is None:
        pictures, labels = digits()
        model = train(pictures[:1000], labels[:1000], epochs=options.epochs)
        return leanconv.accelerate(model, pictures[:300], 4, samples=2000).model, (1, 32, 32)
    result = leanconv.load_result(options.folder)
    read = result.preprocess or {"channels": 3, "size": 224}
    return result.model, (read["channels"], read["size"], read["size"])


def serve(path: Path, images: np.ndarray, rounds: int = 10) -> tuple[np.ndarray, float]:
    """Answers, and the median of milliseconds a batch."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        (answer,) = session.run(None, {"images": images})
        times.append(1000 * (time.perf_counter() - started))
    return answer, statistics.median(times)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="what result.save or leanconv accelerate wrote")
    parser.add_argument("--out", type=Path, required=True, help="the new .onnx file")
    parser.add_argument("--epochs", type=int, default=6, help="of training, without a folder")
    options = parser.parse_args(arguments)
    try:
        model, shape = accelerated(options)
        example = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
        path = leanconv.export(model, example, options.out).path  # compared with torch before it gets its name
    except leanconv.LeanconvError as error:
        raise SystemExit(f"onnx_deploy.py: {error}") from error
    images = np.random.default_rng(0).random((4, *shape), np.float32)
    answer, milliseconds = serve(path, images)
    with torch.no_grad():
        expected = model(torch.from_numpy(images)).numpy()
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, takes any batch of {' x '.join(map(str, shape))}")
    print(f"batch of 4 on one thread: {milliseconds:.1f} ms")
    print(f"largest difference from torch: {np.abs(answer - expected).max() / np.abs(expected).max():.1e}")


if __name__ == "__main__":
    main()
