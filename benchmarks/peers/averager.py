"""One site of hivemind's averager. A round is counted from when the group is found to when the average is there; finding it takes seconds more, and is left out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.site import measure, parser, together, values

FINDING = 15.0  # seconds in which a group must be found


def compression(name: str) -> Any:
    from hivemind import compression as kinds

    return {"none": kinds.NoCompression, "float16": kinds.Float16Compression, "8bit": kinds.Uniform8BitQuantization}[name]()


def main() -> None:
    arguments = parser((__doc__ or "").split(".")[0])
    arguments.add_argument("--compression", choices=["none", "float16", "8bit"], default="none")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    import hivemind
    from hivemind.averaging import DecentralizedAverager
    from hivemind.utils import get_dht_time

    addresses = given.addresses.split(",")
    entry = given.folder / "entry"
    if given.index:
        while not entry.exists():
            time.sleep(0.05)
    known = entry.read_text().split() if given.index else []
    dht = hivemind.DHT(
        initial_peers=known, host_maddrs=[f"/ip4/{addresses[given.index]}/tcp/0"], start=True, use_relay=False, use_auto_relay=False,
        use_ipfs=False,
    )  # fmt: skip
    if not given.index:
        (given.folder / "entry.new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        (given.folder / "entry.new").rename(entry)
    own = values(given, given.index)
    averager = DecentralizedAverager(
        [own.clone()], dht, start=True, prefix="bench", target_group_size=len(addresses), min_group_size=len(addresses),
        compression=compression(given.compression), min_matchmaking_time=4.0, request_timeout=3.0, allreduce_timeout=1200,
        sender_timeout=300, reducer_timeout=600,
    )  # fmt: skip
    together(given, "made")
    controls: dict[int, Any] = {}

    def find(i: int) -> None:
        """Have a group, whose all-reduce waits for a word."""
        with averager.get_tensors() as tensors:
            tensors[0].copy_(own)
        controls[i] = averager.step(
            wait=False, require_trigger=True, scheduled_time=get_dht_time() + 4.0, timeout=1200, allow_retries=True
        )
        time.sleep(FINDING)

    def once(i: int) -> torch.Tensor:
        controls[i].allow_allreduce()
        group = controls[i].result(1200)
        if group is None or len(group) != len(addresses):
            raise RuntimeError(f"hivemind found no group of {len(addresses)}: {group}")
        with averager.get_tensors() as tensors:
            return tensors[0].clone()

    measure(given, once, find)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
