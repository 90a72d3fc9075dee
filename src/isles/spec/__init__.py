"""The spec room: what run.toml may say, how it is read, and how a new one is written. It imports nothing of isles but the errors."""

from isles.spec.load import load_spec, spec_from
from isles.spec.tables import (
    CheckpointTable,
    ClusterEvent,
    ClustersTable,
    CodecTable,
    DataTable,
    EvalTable,
    ModelTable,
    OptimizerTable,
    OuterTable,
    RunTable,
    Spec,
    StreamingTable,
    Table,
    TrainTable,
    parse_size,
)
from isles.spec.template import render_spec

__all__ = [
    "CheckpointTable",
    "ClusterEvent",
    "ClustersTable",
    "CodecTable",
    "DataTable",
    "EvalTable",
    "ModelTable",
    "OptimizerTable",
    "OuterTable",
    "RunTable",
    "Spec",
    "StreamingTable",
    "Table",
    "TrainTable",
    "load_spec",
    "parse_size",
    "render_spec",
    "spec_from",
]
