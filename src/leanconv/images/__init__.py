"""Reading pictures: folders, tar files and datasets in, batches of tensors out."""

from leanconv.images.find import find_pictures, held_out
from leanconv.images.loading import Pictures, WholePictures, spread, stream
from leanconv.images.picture import Picture
from leanconv.images.preprocess import Preprocess, TenViews

__all__ = [
    "Picture",
    "Pictures",
    "Preprocess",
    "TenViews",
    "WholePictures",
    "find_pictures",
    "held_out",
    "spread",
    "stream",
]
