"""Reading pictures: folders and tar files in, batches of tensors out."""

from leanconv.images.batches import Pictures, Placed, ReadImages, read_all, stream
from leanconv.images.find import Picture, find_pictures
from leanconv.images.preprocess import Preprocess

__all__ = ["Picture", "Pictures", "Placed", "Preprocess", "ReadImages", "find_pictures", "read_all", "stream"]
