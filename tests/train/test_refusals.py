"""What cannot be trained, or trained on, is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import leanconv
from leanconv.errors import LeanconvError
from leanconv.train.objectives import Supervised
from tests.support.training import (
    quadrants,
    small,
    tune,
)

IMAGES, LABELS = quadrants(20)


REFUSALS = [
    ({"data": (IMAGES, LABELS + 3)}, r"there is a label \d, but the network has 4 outputs \(classes 0 to 3\)"),
    ({"data": (IMAGES, LABELS - 1)}, "there is a label -1, but the network has 4 outputs"),
    ({"data": IMAGES}, "the data has no labels; give pairs of image and class, or the original to learn from"),
    ({"data": (IMAGES[:0], LABELS[:0])}, "the data is empty"),
    ({"validation": (IMAGES[:0], LABELS[:0])}, "the validation data is empty"),
    ({"data": (IMAGES, LABELS[:9])}, "there are 20 images and 9 labels; give one label an image"),
    ({"data": (IMAGES, LABELS.float())}, r"the labels are torch.float32 of shape \(20,\); give one class index"),
    ({"data": (IMAGES, F.one_hot(LABELS))}, r"the labels are torch.int64 of shape \(20, \d\)"),
    ({"data": iter([IMAGES])}, "data is a list_iterator; give tensors or a dataset with a length"),
    ({"data": (IMAGES[:4], LABELS[:4])}, "holdout=0.1 of 4 images leaves none to hold out; give more images"),
    ({"holdout": 0.99}, "holdout=0.99 of 20 images leaves too few to train on"),
    ({"holdout": 1.0}, "holdout=1.0 must be a number at least 0 and under 1"),
    ({"data": (torch.zeros(20, 5, 8, 8), LABELS)}, r"the model raised RuntimeError on a batch of shape \(2, 5, 8, 8\)"),
    ({"data": (IMAGES + torch.inf, LABELS)}, "answers NaN or infinity on the images held out before any training"),
    ({"network": nn.Conv2d(3, 4, 3)}, "the model returned a Tensor of shape .* where images x classes is needed"),
    ({"network": nn.Flatten()}, "the network has no weights to train"),
    ({"network": "vgg16"}, "model is a str; give a torch.nn.Module"),
    ({"original": nn.Sequential(nn.Flatten(), nn.Linear(192, 7))}, r"the network answers \(2, 4\) where the original"),
    ({"original": 3}, "model is a int"),
    ({"epochs": 0}, "epochs=0 must be a whole number from 1"),
    ({"batch": 2.5}, "batch=2.5 must be a whole number"),
    ({"lr": -1e-5}, "lr=-1e-05 must be a number above 0"),
    ({"lr": float("nan")}, "lr=nan must be a number above 0"),
    ({"optimizer": "lbfgs"}, "optimizer='lbfgs' is not known; use 'sgd', 'adam', 'muon'"),
    ({"schedule": ["cosine"]}, "schedule=.* is not known; use 'constant', 'cosine'"),
    ({"precision": "int8"}, "precision='int8' is not known"),
    ({"ema": 1.0}, "ema=1.0 must be a number at least 0 and under 1"),
    ({"clip": -1}, "clip=-1 must be a number at least 0"),
    ({"warmup": -1}, "warmup=-1 must be a whole number"),
    ({"patience": True}, "patience=True must be a whole number"),
    ({"features": 2}, "features goes with original, the network to learn from, which is not given"),
    ({"precision": "fp16"}, "precision='fp16' is not known; use 'auto', 'off', 'bf16'"),
    ({"seed": 1 << 64}, "seed=18446744073709551616 must be a whole number from 0"),
    ({"workers": -1}, "workers=-1 must be a whole number from 0"),
    ({"original": small(), "features": -1, "network": "accelerated"}, "features=-1 must be a whole number"),
    ({"original": small(), "network": "accelerated"}, "original has no layer"),
    ({"device": "toaster"}, "device='toaster' cannot be used here"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSALS)
def test_bad_input_is_refused_in_one_sentence(
    changed: dict[str, object], message: str, accelerated: leanconv.Accelerated
) -> None:
    if changed.get("network") == "accelerated":
        changed = {**changed, "network": accelerated}
    with pytest.raises(LeanconvError, match=message) as caught:
        tune(**{"data": (IMAGES, LABELS), **changed})
    assert "\n" not in str(caught.value)


def test_a_plain_module_is_not_saved() -> None:
    with pytest.raises(LeanconvError, match=r"save model.state_dict\(\)"):
        tune(epochs=1).save("nowhere")
    assert Supervised.right == "top-1"
