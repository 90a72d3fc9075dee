"""Compiled loops run wherever Python does, whether or not the result can be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import resource, numpy as np
from isles.codec import decode, get_codec
from isles.spec import CodecTable
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
values = np.float32([1, 2, 3])
assert decode(get_codec(CodecTable(name="bf16")).encode(values)).tolist() == [1, 2, 3]
"""


def test_a_disk_that_fills_up_costs_a_compilation_not_the_run(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-B", "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(p.stat().st_size <= 100 for p in tmp_path.rglob("*") if p.is_file())
