"""The model room: models from presets, configs or folders, the flat vector that clusters synchronise, and what leaves the run."""

from isles.model.build import build_model, check_built_here, count_parameters, prepare_for_training
from isles.model.export import check_export_target, export_model, load_exported
from isles.model.generate import generate
from isles.model.layout import FlatParameters, Layout, Slot, remap

__all__ = [
    "FlatParameters",
    "Layout",
    "Slot",
    "build_model",
    "check_built_here",
    "check_export_target",
    "count_parameters",
    "export_model",
    "generate",
    "load_exported",
    "prepare_for_training",
    "remap",
]
