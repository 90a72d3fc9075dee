"""The worker room: local steps over one model copy, and checkpoints that a crash cannot take."""

from isles.worker.loop import StepResult, Trainer, choose_device, held_out_loss
from isles.worker.optim import InnerOptimizer, lr_factor

__all__ = ["InnerOptimizer", "StepResult", "Trainer", "choose_device", "held_out_loss", "lr_factor"]
