"""Reading pictures: folders, tar files and datasets in, batches of tensors out."""

from leanconv.images.find import find_pictures, held_out
from leanconv.images.loading import Pictures, Placed, ReadImages, read_all, stream
from leanconv.images.picture import Picture
from leanconv.images.preprocess import Preprocess
from leanconv.images.ten_crop import TenViews

__all__ = [
    "Picture",
    "Pictures",
    "Placed",
    "Preprocess",
    "ReadImages",
    "TenViews",
    "find_pictures",
    "held_out",
    "read_all",
    "stream",
]
