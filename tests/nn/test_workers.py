"""MAX's workers give way to the thread that hands them work, and to no one else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os
from pathlib import Path
from max.driver import CPU
from max.engine import InferenceSession
from attnquant.nn.workers import let_workers_give_way

session = InferenceSession(devices=[CPU()])
found = [let_workers_give_way(), let_workers_give_way()]
nice = {}
for thread in Path("/proc/self/task").iterdir():
    name = (thread / "comm").read_text(encoding="utf-8").strip()
    nice.setdefault(name, []).append(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
print(json.dumps([found, nice, os.getpriority(os.PRIO_PROCESS, os.getpid())]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: priorities of threads")
def test_workers_are_nicer_than_the_thread_that_hands_them_work() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    found, nice, own = json.loads(done.stdout.splitlines()[-1])
    workers = [value for name, values in nice.items() if "Thread" in name for value in values]
    assert found[0] == found[1] == len(workers) >= 1
    # Asked for twice, it is done once.
    assert set(workers) == {min(own + 5, 19)}
    assert own == os.getpriority(os.PRIO_PROCESS, 0)
