"""MAX's worker threads on a CPU, and how they share the cores with the thread that needs them.

A worker looks for work for 200 us before it sleeps, and there is one for each core. So when a step
is done, all cores are busy looking for the next one, and the thread that is to prepare it waits
until Linux takes a core from one of them. That was a tenth of the time of a small model's steps.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

# What MAX calls them (`poolName` in AsyncRT's CPUDevice.h).
_NAME = "🔥 Thread"

_NICER = 5
"""A third of the weight of the other threads in Linux's scheduler."""


def let_workers_give_way() -> int:
    """Has MAX's workers give way to this process's other threads, where the system is Linux.

    Returns:
        How many workers there are.
    """
    if sys.platform != "linux":
        return 0
    wanted = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER, 19)
    workers = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (thread / "comm").read_text(encoding="utf-8").startswith(_NAME):
                workers += 1
                if os.getpriority(os.PRIO_PROCESS, int(thread.name)) < wanted:
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), wanted)
    return workers
