"""The run's spec: what run.toml says, checked.

One frozen pydantic model per table of run.toml. Field names are the field's own (lr, betas, weight_decay, warmup_steps,
local_steps ...); every field carries its unit and its reason in `description`, from which `isles init` and the reference in
docs/spec.md are made, so that there is one text and no second to go stale.

Defaults follow the published recipes: AdamW (0.9, 0.95), weight decay 0.1, clip 1.0, cosine with warm-up; outer Nesterov with
lr 0.7 and momentum 0.9 every 1,000 local steps (DiLoCo, arXiv 2311.08105). The lowest room of the house: it imports no other
part of isles but the errors.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*$", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

Positive = Annotated[int, Field(gt=0)]


def parse_size(text: str | int | float) -> int:
    """`"0.13M"` -> 130000, `"30B"` -> 30_000_000_000, `124` -> 124. Raises ValueError when it is no positive count."""
    match = _SIZE.match(str(text))
    count = round(float(match[1]) * _SIZE_UNITS[match[2].upper()]) if match else 0
    if count <= 0:
        raise ValueError(f"{text!r} is not a size; write a count such as 130000, '0.13M' or '30B'")
    return count


class Table(BaseModel):
    """A table of run.toml: frozen, and it knows its own keys only."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation not in (bool, bool | None):
            raise ValueError(f"{str(value).lower()} does not fit here")
        return value


class RunTable(Table):
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name of the run, used in folders and pictures"
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed of everything random: initial weights, data order, stochastic rounding"
    )
    steps: Positive = Field(10_000, description="local steps (one AdamW step each) that every cluster trains")


class ModelTable(Table):
    """Exactly one of `family`, `config`, `pretrained` and `module` says where the model comes from."""

    family: Literal["gpt2", "llama", "qwen3"] | None = Field(None, description="architecture to build from a preset")
    parameters: str | int | None = Field(
        None, description="preset size, 0.1M to 50B, for example '0.13M' or '30B'; layers and width are chosen to come close"
    )
    layers: int | None = Field(None, ge=1, le=1024, description="transformer blocks, instead of the preset's")
    hidden_size: int | None = Field(None, ge=1, le=65536, description="width of the residual stream, instead of the preset's")
    heads: Positive | None = Field(None, description="attention heads, instead of the preset's")
    config: str | None = Field(None, description="path of a transformers config.json, for any causal language model")
    pretrained: str | None = Field(None, description="folder (or hub id) of a pretrained model to go on from")
    module: str | None = Field(
        None,
        min_length=1,
        description="a name for a model that a training script of your own builds; the script brings model and data",
    )
    tie_embeddings: bool | None = Field(
        None, description="share input embedding and output head; the family's and size's habit when left out"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, about a third more compute"
    )
    compile: bool = Field(False, description="torch.compile the model: faster steps after a slow first one")

    @model_validator(mode="after")
    def _one_source(self) -> ModelTable:
        given = [k for k in ("family", "config", "pretrained", "module") if getattr(self, k) is not None]
        if len(given) != 1:
            said = "none of them is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"give exactly one of family, config, pretrained and module; {said}")
        shape = [k for k in ("parameters", "layers", "hidden_size", "heads") if getattr(self, k) is not None]
        if self.family is None and shape:
            raise ValueError(f"{shape[0]} goes with family; {given[0]} already fixes the shape")
        if self.family is not None and self.parameters is None and (self.layers is None or self.hidden_size is None):
            raise ValueError("family needs parameters (for example '0.13M'), or both layers and hidden_size")
        trained = [k for k in ("tie_embeddings", "activation_checkpointing", "compile") if getattr(self, k)]
        if self.module is not None and trained:
            raise ValueError(f"{trained[0]} is the script's own business with module; leave it out")
        return self

    @field_validator("parameters")
    @classmethod
    def _size(cls, value: str | int | None) -> str | int | None:
        if value is not None and not 100_000 <= parse_size(value) <= 50_000_000_000:
            raise ValueError(f"presets go from 0.1M to 50B parameters, not {value}")
        return value


class DataTable(Table):
    path: str = Field(
        "data", min_length=1, description="folder of token shards, made by `isles data prepare`; relative to run.toml"
    )
    inputs: tuple[str, ...] = Field(
        (), description="text to prepare into `path` when it does not exist yet: files, folders, globs, or 'python:stdlib'"
    )
    tokenizer: str = Field(
        "bytes", description="'bytes' (built in), a tokenizer.json file, or a transformers tokenizer folder or hub id"
    )
    held_out: float = Field(0.01, gt=0, lt=0.5, description="share of the documents kept out of training, for held-out loss")
    sequence_length: int = Field(1024, ge=8, description="tokens a sequence")


class TrainTable(Table):
    """The local training loop of every cluster."""

    local_steps: Positive = Field(1000, description="local steps in a round (H); every round the clusters synchronise")
    local_steps_schedule: tuple[tuple[int, int], ...] = Field(
        (), description="pairs [step, H]: from that local step on a round has H local steps, instead of local_steps"
    )
    batch_size: Positive = Field(32, description="sequences per cluster and local step")
    micro_batch_size: Positive | None = Field(
        None, description="sequences per forward pass; gradients accumulate up to batch_size; batch_size when left out"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: matrix products in bf16 over fp32 master weights")
    device: str = Field("auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:N or mps")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads that torch may use; 0 leaves torch's own choice")

    @model_validator(mode="after")
    def _divides(self) -> TrainTable:
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}")
        steps = [step for step, _ in self.local_steps_schedule]
        if steps != sorted(set(steps)) or any(step < 0 or h < 1 for step, h in self.local_steps_schedule):
            raise ValueError("local_steps_schedule needs pairs [step, H] with rising steps from 0 on and H of at least 1")
        return self

    def local_steps_at(self, step: int) -> int:
        """H of the round that begins after `step` local steps."""
        current = self.local_steps
        for start, h in self.local_steps_schedule:
            if start <= step:
                current = h
        return current


class OptimizerTable(Table):
    """The inner optimizer: each cluster's own, never averaged."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon (torch.optim.Muon for matrices, AdamW for the rest)"
    )
    lr: float = Field(4e-4, gt=0, description="peak learning rate (AdamW)")
    muon_lr: float = Field(0.02, gt=0, description="peak learning rate of Muon's matrices")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="momentum of Muon")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates of first and second moment")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay, on tensors of two and more dimensions")
    clip_norm: float = Field(1.0, ge=0, description="largest global gradient norm; 0 turns clipping off")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="after warm-up: cosine to min_lr_ratio; wsd: flat, then linear decay over the last decay_ratio; or constant",
    )
    warmup_steps: int = Field(1000, ge=0, description="local steps of linear warm-up")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate as a share of the peak")
    decay_ratio: float = Field(0.2, ge=0, le=1, description="share of the run that wsd decays over")

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"betas must lie in [0, 1), not {list(value)}")
        return value


class OuterTable(Table):
    """The outer optimizer: moves the global parameters by the averaged pseudo-gradient."""

    name: Literal["nesterov", "sparseloco"] = Field(
        "nesterov", description="nesterov (DiLoCo), or sparseloco (no momentum, meant for the topk codec)"
    )
    lr: float = Field(0.7, gt=0, description="outer learning rate (eta)")
    momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum (mu); 0 with lr 1 is parameter averaging")
    weighting: Literal["tokens", "uniform"] = Field(
        "tokens", description="weight of a contribution: tokens trained since the cluster's last sync, or one each"
    )
    merge: Literal["mean", "radial"] = Field(
        "mean",
        description="mean, or radial: mean of norms times mean direction, per tensor (Decoupled DiLoCo, arXiv 2604.21428)",
    )

    @model_validator(mode="after")
    def _momentum(self) -> OuterTable:
        if self.name == "sparseloco" and "momentum" in self.model_fields_set and self.momentum:
            raise ValueError("outer optimizer sparseloco has no momentum; leave momentum out or set it to 0")
        return self


class CodecTable(Table):
    """How contributions and averages are encoded."""

    name: Literal["fp32", "bf16", "int8", "int4", "topk"] = Field(
        "int8", description="fp32, bf16, int8, int4, or topk (SparseLoCo, arXiv 2508.15706)"
    )
    block_size: Literal[32, 64, 128, 256] | None = Field(
        None, description="values that share one scale (int8: 128, int4: 64 when left out)"
    )
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="rounding of int8 and int4")
    k: int = Field(64, ge=1, le=4096, description="topk: entries kept of every 4,096")
    residual_decay: float = Field(0.95, ge=0, le=1, description="topk: beta of the error feedback e = beta e + d")


class StreamingTable(Table):
    """Fragments and overlap (Streaming DiLoCo, arXiv 2501.18512). One fragment and no overlap is plain DiLoCo."""

    fragments: Positive = Field(
        1, description="fragments (P) that synchronise one after the other; embeddings, final norm and head are one of them"
    )
    order: Literal["strided", "sequential"] = Field(
        "strided", description="which transformer blocks form a fragment: every (P-1)-th, or neighbours"
    )
    overlap: int = Field(0, ge=0, description="local steps (tau) between sending a fragment and merging the result")
    merge: Literal["mix", "keep", "eager"] = Field(
        "keep",
        description="mix: x = alpha x + (1 - alpha) g; keep: x = g + progress since sent; eager: overlap of a whole round with the own stale part swapped for the fresh one (arXiv 2502.12996)",
    )
    alpha: float = Field(0.5, ge=0, le=1, description="mix: share of the local parameters that is kept")


class ClusterEvent(Table):
    """A planned event of a simulated cluster, by local step of the run."""

    cluster: int = Field(ge=0, description="cluster's number, from 0")
    kind: Literal["leave", "join", "late"] = Field(
        description="leave, join, or late (not ready for the rounds that close in the window)"
    )
    step: int = Field(ge=0, description="local step of the run at which it happens")
    until: int | None = Field(None, ge=0, description="late: local step at which the cluster is ready again")


class ClustersTable(Table):
    """The simulated clusters."""

    count: int = Field(4, ge=1, le=1024, description="clusters (M)")
    quorum: Positive | None = Field(None, description="clusters (K) that must be ready to close a round; all when left out")
    grace: int = Field(0, ge=0, description="local steps that a round stays open for late clusters once the quorum is ready")
    speeds: tuple[float, ...] = Field((), description="relative speed of each cluster, at most 1; all equal when left out")
    pace: Literal["wait", "train", "scale"] = Field(
        "wait",
        description="a cluster that is ready before the round closes: wait (stand still), train (go on; weights follow the tokens); or scale (H in proportion to speed, so that all are ready together)",
    )
    join_state: Literal["fresh", "peer"] = Field(
        "fresh", description="a joiner's AdamW state: fresh with a short warm-up, or taken from a peer"
    )
    join_warmup_steps: int = Field(20, ge=0, description="local steps of linear warm-up of a joiner with fresh state")
    events: tuple[ClusterEvent, ...] = Field((), description="planned leaves, joins and late rounds")

    @model_validator(mode="after")
    def _fits(self) -> ClustersTable:
        if self.quorum is not None and self.quorum > self.count:
            raise ValueError(f"quorum {self.quorum} is more than the {self.count} clusters")
        if self.speeds and len(self.speeds) != self.count:
            raise ValueError(f"speeds names {len(self.speeds)} clusters, count is {self.count}")
        if any(not 0 < speed <= 1 for speed in self.speeds):
            raise ValueError("speeds must lie in (0, 1]")
        for event in self.events:
            if event.cluster >= self.count:
                raise ValueError(f"event names cluster {event.cluster}; there are {self.count}, numbered from 0")
            if (event.kind == "late") != (event.until is not None) or (event.until or event.step + 1) <= event.step:
                raise ValueError("an event of kind late needs until, later than step; leave and join have none")
        return self


class EvalTable(Table):
    every: Positive | None = Field(None, description="local steps between held-out evaluations; once a round when left out")
    sequences: Positive = Field(64, description="held-out sequences in an evaluation, always the same ones")


class CheckpointTable(Table):
    every: Positive | None = Field(
        None, description="local steps between checkpoints; only at the end and on Ctrl-C when left out"
    )
    keep: Positive = Field(2, description="checkpoints kept; the oldest goes first")


class Spec(Table):
    """A whole run.toml. The names of its fields are the names of the tables."""

    run: RunTable = RunTable()
    model: ModelTable
    data: DataTable = DataTable()
    train: TrainTable = TrainTable()
    optimizer: OptimizerTable = OptimizerTable()
    outer: OuterTable = OuterTable()
    codec: CodecTable = CodecTable()
    streaming: StreamingTable = StreamingTable()
    clusters: ClustersTable = ClustersTable()
    eval: EvalTable = EvalTable()
    checkpoint: CheckpointTable = CheckpointTable()

    @model_validator(mode="after")
    def _streaming_fits(self) -> Spec:
        streaming, every_h = self.streaming, [self.train.local_steps, *(h for _, h in self.train.local_steps_schedule)]
        if any(h % streaming.fragments for h in every_h):
            raise ValueError(
                f"train.local_steps {every_h} must be multiples of streaming.fragments {streaming.fragments}, so that fragments take even turns"
            )
        if streaming.overlap > min(every_h):
            raise ValueError(f"streaming.overlap {streaming.overlap} is longer than a round of {min(every_h)} local steps")
        if streaming.merge == "eager" and any(h != streaming.overlap for h in every_h):
            raise ValueError(
                "streaming.merge 'eager' is for an overlap of one whole round: set streaming.overlap to train.local_steps"
            )
        return self
