"""Networks the method is measured on, and their weights before training."""

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
    "SpatialPyramidPool",
    "VGG16Cifar",
    "alexnet",
    "character_cnn",
    "initialise",
    "spp10",
    "vgg16",
    "vgg16_cifar",
]
