"""One site of an all-reduce in fp32 by torch.distributed over Gloo.

--buckets: in buckets of 32 MB, all started at once and then waited for, which is what torchft's DiLoCo has its process group do (there `bucket_cap_mb`);
without it in one tensor.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.site import measure, parser, values

BUCKET = 32 << 20  # bytes


def main() -> None:
    arguments = parser((__doc__ or "").split("\n")[0])
    arguments.add_argument("--buckets", action="store_true")
    arguments.add_argument("--device", help="whose network device is used")
    given = arguments.parse_args()
    if given.device:
        os.environ["GLOO_SOCKET_IFNAME"] = given.device
    torch.set_num_threads(1)
    addresses = given.addresses.split(",")
    dist.init_process_group(
        "gloo", init_method=f"file://{given.folder}/rendezvous", rank=given.index, world_size=len(addresses),
        timeout=datetime.timedelta(minutes=20),
    )  # fmt: skip
    own = values(given, given.index)

    def once(_: int) -> torch.Tensor:
        tensor = own.clone()
        pieces = tensor.split(BUCKET // 4) if given.buckets else [tensor]
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()
        return tensor.div_(len(addresses))

    measure(given, once)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
