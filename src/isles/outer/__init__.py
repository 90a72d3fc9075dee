"""The outer room: how contributions are merged, how the global parameters step, and how a cluster takes the result."""

from isles.outer.local import LocalFragment
from isles.outer.merge import contribution_weights, radial_rescale, radial_weights, tensor_norms
from isles.outer.optimizer import OuterOptimizer, outer_optimizer

__all__ = [
    "LocalFragment",
    "OuterOptimizer",
    "contribution_weights",
    "outer_optimizer",
    "radial_rescale",
    "radial_weights",
    "tensor_norms",
]
