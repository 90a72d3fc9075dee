"""The data room: text to token shards, and the order in which clusters train on them.

prepare   text -> tokens -> shards + index + hashes (once)
Dataset   memory-mapped sequences over the shards
Ledger    which cluster trains which range of the endless stream of positions
sample_ids / Permutation   which sequence a position is, computed in O(1) memory
"""

from isles.data.claims import Claim, Ledger, Sampler
from isles.data.index import DatasetIndex
from isles.data.open import open_or_prepare
from isles.data.order import Permutation, sample_ids
from isles.data.prepare import Progress, prepare
from isles.data.shards import Dataset
from isles.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "Claim",
    "Dataset",
    "DatasetIndex",
    "Ledger",
    "Permutation",
    "Progress",
    "Sampler",
    "Tokenizer",
    "load_tokenizer",
    "open_or_prepare",
    "prepare",
    "sample_ids",
]
