"""Networks the method is measured on, and their weights before training."""

from leanconv.models.detectors import FastRCNN, fast_rcnn_vgg16, faster_rcnn_vgg16
from leanconv.models.initial import initialise
from leanconv.models.networks import (
    BUILDERS,
    SPP10,
    CharacterCNN,
    SpatialPyramidPool,
    VGG16Cifar,
    alexnet,
    character_cnn,
    spp10,
    vgg16,
    vgg16_cifar,
)

__all__ = [
    "BUILDERS",
    "SPP10",
    "CharacterCNN",
    "FastRCNN",
    "SpatialPyramidPool",
    "VGG16Cifar",
    "alexnet",
    "character_cnn",
    "fast_rcnn_vgg16",
    "faster_rcnn_vgg16",
    "initialise",
    "spp10",
    "vgg16",
    "vgg16_cifar",
]
