"""Networks the method is measured on."""

from leanconv.models.detectors import FastRCNN, fast_rcnn_vgg16, faster_rcnn_vgg16
from leanconv.models.networks import (
    BUILDERS,
    SPP10,
    CharacterCNN,
    ResNetCifar,
    SpatialPyramidPool,
    VGG16Cifar,
    alexnet,
    character_cnn,
    resnet20_cifar,
    resnet56_cifar,
    spp10,
    vgg16,
    vgg16_cifar,
)

__all__ = [
    "BUILDERS",
    "SPP10",
    "CharacterCNN",
    "FastRCNN",
    "ResNetCifar",
    "SpatialPyramidPool",
    "VGG16Cifar",
    "alexnet",
    "character_cnn",
    "fast_rcnn_vgg16",
    "faster_rcnn_vgg16",
    "resnet20_cifar",
    "resnet56_cifar",
    "spp10",
    "vgg16",
    "vgg16_cifar",
]
