"""The mathematics: functions from tensors to tensors. Nothing here knows what a network is.

Samples are rows: responses ``y`` are ``n x d`` (n samples of d filters). Products over samples that end in an
inverse or an eigenproblem are accumulated in float64; results come back in the dtype of the samples.
"""

from leanconv.solve.activations import Activation, activation
from leanconv.solve.holdout import Parts, parted
from leanconv.solve.metric import Metric
from leanconv.solve.moments import Moments
from leanconv.solve.nonlinear import nonlinear
from leanconv.solve.nonlinear_holdout import unseen
from leanconv.solve.reduced_rank import LowRank, components, pca, reduced_rank, spectrum
from leanconv.solve.response_space import ResponseSpace
from leanconv.solve.sample_size import Enough, Gap, Regression, enough, thinned
from leanconv.solve.spatial_als import swept
from leanconv.solve.spatial_svd import (
    FilterBasis,
    SeenBasis,
    SpatialFactors,
    TwoStep,
    spatial_basis,
    spatial_basis_as_seen,
)

__all__ = [
    "Activation",
    "Enough",
    "FilterBasis",
    "Gap",
    "LowRank",
    "Metric",
    "Moments",
    "Parts",
    "Regression",
    "ResponseSpace",
    "SeenBasis",
    "SpatialFactors",
    "TwoStep",
    "activation",
    "components",
    "enough",
    "nonlinear",
    "parted",
    "pca",
    "reduced_rank",
    "spatial_basis",
    "spatial_basis_as_seen",
    "spectrum",
    "swept",
    "thinned",
    "unseen",
]
