"""What makes two specs the same run."""

from __future__ import annotations

from blake3 import blake3

from isles.spec.tables import Spec


def spec_digest(spec: Spec) -> str:
    """blake3 of everything in a spec that changes what is trained; how often it is measured and saved does not count."""
    unsaid = (
        {"module"} if spec.model.module is None else set()
    )  # a key that came later: the digests of other specs stay what they were
    text = spec.model_dump_json(exclude={"checkpoint": True, "eval": True, "model": unsaid})
    return blake3(text.encode()).hexdigest()
