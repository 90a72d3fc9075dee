"""Text from a model: enough to see what it has learned. Serving is for others, from an exported folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from isles.errors import ModelError, UsageError
from isles.model.build import longest_context

_COLDEST = 1e-4  # below it logits / temperature overflows, and nothing but the likeliest token would be drawn anyway


class TextCodec(Protocol):
    """What generating needs of a tokenizer."""

    @property
    def eos_id(self) -> int: ...
    def encode(self, text: str) -> Any: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: TextCodec,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """The prompt and what the model goes on with, up to an end-of-text token.

    temperature 0 always takes the likeliest token; top_k 0 chooses among all. A context longer than the model's is cut from the left, an
    empty prompt starts after an end-of-text. The same seed gives the same text. No KV cache: the cut context moves every position.
    Raises UsageError for a temperature or top_k below 0, ModelError when the model's output is not finite."""
    if not 0 <= temperature < float("inf") or top_k < 0:
        raise UsageError(
            f"temperature {temperature} and top_k {top_k} must be numbers from 0 on; 0 and 0 take the likeliest token"
        )
    longest = longest_context(model.config) or 1024
    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    prompt_ids = [int(i) for i in tokenizer.encode(prompt)]
    ids = prompt_ids or [tokenizer.eos_id]
    shown_from = 0 if prompt_ids else 1
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = torch.tensor([ids[-longest:]], device=device)
            logits = model(input_ids=context, use_cache=False).logits[0, -1].float().cpu()
            token = _choose(logits, temperature, top_k, generator)
            if token == tokenizer.eos_id:
                break
            ids.append(token)
    finally:
        model.train(was_training)
    return tokenizer.decode(ids[shown_from:])


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if not logits.max().isfinite():  # -inf for a token that may not be drawn is sound
        raise ModelError("the model's output holds NaN or infinity, so it has diverged; use an earlier checkpoint")
    if temperature < _COLDEST:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        values, indices = logits.topk(top_k)
    else:
        values, indices = logits, torch.arange(logits.numel())
    chosen = torch.multinomial(torch.softmax(values / temperature, -1), 1, generator=generator)
    return int(indices[chosen])
