"""isles: train one language model on GPU clusters scattered around the world, joined only by the ordinary internet.

The public interface, loaded when first touched so that `import isles` stays quick:

    OuterOptimizer        the outer step (Nesterov) over a list of tensors
    get_codec, decode, decode_accumulate    contributions to bytes and back
    Dataset, Permutation, Ledger            token shards, their order, and who trains what
    load_spec, Spec       run.toml
    Cluster               a training script of one's own as a cluster of a run between machines
    IslesCallback         the same for a transformers Trainer
    simulate              a whole run of M clusters in one process
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isles.agent.callback import IslesCallback
    from isles.agent.cluster import Cluster
    from isles.codec import decode, decode_accumulate, get_codec
    from isles.data import Dataset, Ledger, Permutation
    from isles.errors import IslesError
    from isles.outer import OuterOptimizer
    from isles.simulator import simulate
    from isles.spec import Spec, load_spec

__version__ = "0.1.0"
_HOMES = {
    "Cluster": "isles.agent.cluster",
    "IslesCallback": "isles.agent.callback",
    "OuterOptimizer": "isles.outer",
    "get_codec": "isles.codec",
    "decode": "isles.codec",
    "decode_accumulate": "isles.codec",
    "Dataset": "isles.data",
    "Permutation": "isles.data",
    "Ledger": "isles.data",
    "IslesError": "isles.errors",
    "Spec": "isles.spec",
    "load_spec": "isles.spec",
    "simulate": "isles.simulator",
}
__all__ = [
    "Cluster",
    "Dataset",
    "IslesCallback",
    "IslesError",
    "Ledger",
    "OuterOptimizer",
    "Permutation",
    "Spec",
    "decode",
    "decode_accumulate",
    "get_codec",
    "load_spec",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'isles' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
