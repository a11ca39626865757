"""One parallel region for many steps: cores that go through the same steps together.

Handing work to another core and waiting for it takes MAX some ten microseconds, as long as many of
a decode step's matmuls do. So a core is handed a whole sequence of steps once. In each step,
whoever is there takes its tasks one by one, and goes on when all are done. A core that comes late
finds tasks taken and catches up, so that nobody ever waits for a core that has not started: there
is nothing to deadlock on.
"""

from std.atomic import Atomic, Ordering
from std.ffi import external_call
from std.sys import CompilationTarget, llvm_intrinsic
from max.algorithm import sync_parallelize

comptime LINE = 8
"""Integers to a cache line's worth of distance, 64 bytes."""
comptime SPINS = 2000
"""Looks at a counter, some tens of microseconds, after which other threads may have the core."""


struct Crew(Copyable, Movable):
    """One core's place in the sequence of steps."""

    var counters: Pointer[Int64, MutUntrackedOrigin]
    """Of each step, the tasks taken and the tasks done; shared by all cores."""
    var step: Int

    def __init__(out self, counters: Pointer[Int64, MutUntrackedOrigin]):
        self.counters = counters
        self.step = 0

    @always_inline
    def share[Task: def(Int) -> None](mut self, tasks: Int, task: Task):
        """Does the next step: `task(0)` ... `task(tasks - 1)`, each on one core."""
        var taken = self.counters.unsafe_offset(2 * LINE * self.step)
        var done = taken.unsafe_offset(LINE)
        self.step += 1
        var finished = 0
        while True:
            var index = Int(Atomic.fetch_add[ordering=Ordering.RELAXED](taken, 1))
            if index >= tasks:
                break
            task(index)
            finished += 1
        if finished:
            _ = Atomic.fetch_add[ordering=Ordering.RELEASE](done, Int64(finished))
        var spins = 0
        while Int(Atomic.load[ordering=Ordering.ACQUIRE](done)) < tasks:
            spins += 1
            if spins > SPINS:
                _ = external_call["sched_yield", Int32]()
            else:
                comptime if CompilationTarget.is_x86():
                    llvm_intrinsic["llvm.x86.sse2.pause", NoneType]()


def together[Body: def(mut Crew) -> None](cores: Int, steps: Int, body: Body):
    """Runs `body` on so many cores, each of which does the same steps, at most so many."""
    var memory = List[Int64](length=2 * LINE * steps, fill=0)
    var counters = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()

    def enter(core: Int) {imm}:
        var crew = Crew(counters)
        body(crew)

    sync_parallelize(enter, cores)
    _ = memory^
