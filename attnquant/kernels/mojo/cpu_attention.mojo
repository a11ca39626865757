"""Attention on a CPU over MAX's paged cache, from a fused projection to what its queries see.

First every new token's queries and keys are normalised per head and rotated, and keys and values
go to the cache. Then rows of queries, all heads that share a key-value head side by side, meet the
keys that they may see and no others, a block of keys at a time, under a running maximum (Milakov
and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). A sequence of few new tokens is cut
along its keys instead, and the parts are put together afterwards: so one token of one sequence
keeps all cores busy. How it is cut depends on the sequence alone: results do not depend on the
number of cores, nor on the other sequences of a batch.
"""

from std.math import align_up, ceildiv
from std.utils.numerics import neg_inf

from .attention_tiles import KEYS, gather, merge, rotate, scores, softmax
from .crew import Crew
from .int8_dot import Floats, LANES
from .operands import Norm, inverse_rms
from .stream import tasks_of

comptime ATTENTION_STEPS = 3
"""Of a crew."""
comptime ROWS = 32
"""Rows of queries that meet a block of keys while it is in a core's own cache."""
comptime SPAN = 128
"""Keys that make a part worth a task."""
comptime MOST_SPANS = 32

# What a task is told, in so many integers.
comptime SEQUENCE = 0
comptime HEAD = 1
comptime TOKEN = 2
comptime COUNT = 3
comptime FIRST = 4
comptime LAST = 5
comptime PART = 6
comptime ITEM = 7


struct Plan(Movable):
    """How the new tokens of a batch are shared out, and what they are worked on in."""

    var owners: List[Int]
    """Each token's sequence."""
    var items: List[Int]
    """Tasks, `ITEM` integers each."""
    var merges: List[Int]
    """Tokens whose keys were cut: head, token, tokens, first part, parts."""
    var tile: Int
    """Tokens of a task at most."""
    var part_size: Int
    """Numbers that are kept of a part."""
    var tasks: Int
    var queries: List[Float32]
    """`[tokens, heads, head_dim]`, as they are scored: normalised, rotated, scaled."""
    var parts: List[Float32]

    def __init__(
        out self,
        row_offsets: Pointer[UInt32, _],
        cache_lengths: Pointer[UInt32, _],
        sequences: Int,
        heads: Int,
        kv_heads: Int,
        head_dim: Int,
        window: Int,
    ):
        """For the arguments, see `attention`."""
        var group = heads // kv_heads
        var tokens = Int(row_offsets[unsafe_offset=sequences])
        self.owners = List[Int](length=tokens, fill=0)
        self.items = List[Int]()
        self.merges = List[Int]()
        self.tile = max(1, ROWS // group)
        self.part_size = self.tile * group * (head_dim + 2)
        var parts = 0
        var work = 0
        for sequence in range(sequences):
            var begin = Int(row_offsets[unsafe_offset=sequence])
            var count = Int(row_offsets[unsafe_offset=sequence + 1]) - begin
            var past = Int(cache_lengths[unsafe_offset=sequence])
            for token in range(count):
                self.owners[begin + token] = sequence
            for token in range(0, count, self.tile):
                var some = min(self.tile, count - token)
                var last = past + token + some
                var first = max(0, past + token + 1 - window) if window > 0 else 0
                var span = last - first
                if count <= self.tile:
                    span = max(SPAN, align_up(ceildiv(span, MOST_SPANS), SPAN))
                var cuts = ceildiv(last - first, span)
                work += some * (last - first) * heads
                for head in range(kv_heads):
                    for cut in range(cuts):
                        self.items.append(sequence)
                        self.items.append(head)
                        self.items.append(begin + token)
                        self.items.append(some)
                        self.items.append(first + cut * span)
                        self.items.append(min(first + (cut + 1) * span, last))
                        self.items.append(parts + cut if cuts > 1 else -1)
                    if cuts > 1:
                        self.merges.append(head)
                        self.merges.append(begin + token)
                        self.merges.append(some)
                        self.merges.append(parts)
                        self.merges.append(cuts)
                        parts += cuts
        self.tasks = max(1, min(len(self.items) // ITEM, tasks_of(2 * work * head_dim)))
        self.queries = List[Float32](unsafe_uninit_length=tokens * heads * head_dim)
        self.parts = List[Float32](unsafe_uninit_length=parts * self.part_size)


@always_inline
def _shared(memory: List[Float32]) -> Pointer[Float32, MutUntrackedOrigin]:
    """Memory of the plan, which outlives what is done by it."""
    return memory.unsafe_ptr().unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()


def attention[
    head_dim: Int, kv_heads: Int, has_values: Bool, norms_values: Bool, window: Int
](
    mut crew: Crew,
    plan: Plan,
    output: Pointer[mut=True, Float32, _],
    projected: Pointer[Float32, _],
    row_offsets: Pointer[UInt32, _],
    blocks: Pointer[mut=True, Float32, _],
    cache_lengths: Pointer[UInt32, _],
    pages: Pointer[UInt32, _],
    table: Pointer[Float32, _],
    query_norm: Norm,
    key_norm: Norm,
    tokens: Int,
    heads: Int,
    page_size: Int,
    page_stride: Int,
    pages_each: Int,
    values_at: Int,
    layer: Int,
    scale: Float32,
    value_eps: Float32,
):
    """Stores the new tokens' keys and values, and attends, in `ATTENTION_STEPS` steps.

    A query sees itself and what precedes it.

    Parameters:
        head_dim: Elements of a head, a multiple of 16.
        kv_heads: Key-value heads.
        has_values: `projected` has values; otherwise they are the keys as projected.
        norms_values: Values are divided by their heads' root mean square.
        window: Keys that a query sees at most, its own included; 0 is all.

    Args:
        crew: Who does it.
        plan: Of the batch.
        output: `[tokens, heads, head_dim]`.
        projected: `[tokens, heads + kv_heads (+ kv_heads), head_dim]`: queries, keys, values.
        row_offsets: `[sequences + 1]`, where each sequence begins among the tokens.
        blocks: The cache: pages of `[2, layers, page_size, kv_heads, head_dim]`, keys first.
        cache_lengths: `[sequences]`, tokens that the cache holds already.
        pages: `[sequences, pages_each]`, which pages a sequence's tokens are in.
        table: `[positions, head_dim]`, cosine and sine of each pair (`rotary_table`).
        query_norm: Over a query's head.
        key_norm: Over a key's.
        tokens: New ones of all sequences.
        heads: Query heads, a multiple of `kv_heads`.
        page_size: Tokens of a page.
        page_stride: Elements from one page to the next.
        pages_each: Width of `pages`.
        values_at: Elements from a page's keys to its values.
        layer: Which layer of the cache.
        scale: Factor on the scores.
        value_eps: Added to the mean square of values.
    """
    comptime token_width = kv_heads * head_dim
    var group = heads // kv_heads
    var width = (heads + (2 if has_values else 1) * kv_heads) * head_dim

    @always_inline
    def cached(sequence: Int, position: Int, head: Int) {imm} -> Int:
        """Where a key is; its value is `values_at` behind it."""
        var page, place = divmod(position, page_size)
        var at = Int(pages[unsafe_offset=sequence * pages_each + page]) * page_stride
        return at + (layer * page_size + place) * token_width + head * head_dim

    var owner = plan.owners.unsafe_ptr()
    var queries, part = _shared(plan.queries), _shared(plan.parts)

    def prepare(token: Int) {imm}:
        var sequence = owner[unsafe_offset=token]
        var place = token - Int(row_offsets[unsafe_offset=sequence])
        var position = Int(cache_lengths[unsafe_offset=sequence]) + place
        var angles = table.unsafe_offset(position * head_dim)
        var row = projected.unsafe_offset(token * width)
        for head in range(heads):
            var at = (token * heads + head) * head_dim
            rotate[head_dim](
                row.unsafe_offset(head * head_dim),
                query_norm,
                scale,
                angles,
                queries.unsafe_offset(at),
            )
        for head in range(kv_heads):
            var key = row.unsafe_offset((heads + head) * head_dim)
            var value = key.unsafe_offset(token_width if has_values else 0)
            var at = cached(sequence, position, head)
            var inverse = Float32(1)
            comptime if norms_values:
                inverse = inverse_rms(value, head_dim, value_eps)
            comptime for d in range(0, head_dim, LANES):
                blocks.unsafe_store(
                    at + values_at + d, value.unsafe_load[width=LANES](d) * inverse
                )
            rotate[head_dim](
                key,
                key_norm,
                1,
                angles,
                blocks.unsafe_offset(at),
            )

    var preparers = max(1, min(tokens, tasks_of(tokens * width * 16)))

    def prepare_some(task: Int) {imm}:
        for token in range(task, tokens, preparers):
            prepare(token)

    crew.share(preparers, prepare_some)

    var rows = plan.tile * group
    var part_size = plan.part_size
    var item = plan.items.unsafe_ptr()
    var count = len(plan.items) // ITEM
    var tasks = plan.tasks

    def work(task: Int) {imm}:
        var own_queries = List[Float32](length=rows * head_dim, fill=0)
        var gathered = List[Float32](length=rows * head_dim, fill=0)
        var block_scores = List[Float32](length=rows * KEYS, fill=0)
        # Of each row, its largest score and the sum of its weights.
        var states = List[Float32](length=rows * 2, fill=0)
        var q = own_queries.unsafe_ptr()
        var o = gathered.unsafe_ptr()
        var s = block_scores.unsafe_ptr()
        var state = states.unsafe_ptr()
        for index in range(task, count, tasks):
            var it = item.unsafe_offset(index * ITEM)
            var sequence, head = it[unsafe_offset=SEQUENCE], it[unsafe_offset=HEAD]
            var token = it[unsafe_offset=TOKEN]
            var own = it[unsafe_offset=COUNT] * group
            var last = it[unsafe_offset=LAST]
            var position = (
                Int(cache_lengths[unsafe_offset=sequence])
                + token
                - Int(row_offsets[unsafe_offset=sequence])
            )
            for row in range(own):
                var place, member = divmod(row, group)
                var at = ((token + place) * heads + head * group + member) * head_dim
                comptime for d in range(0, head_dim, LANES):
                    var x = queries.unsafe_load[width=LANES](at + d)
                    q.unsafe_store(row * head_dim + d, x)
                    o.unsafe_store(row * head_dim + d, Floats(0))
                state[unsafe_offset=2 * row] = neg_inf[DType.float32]()
                state[unsafe_offset=2 * row + 1] = 0

            var key = it[unsafe_offset=FIRST]
            while key < last:
                var some = min(min(KEYS, last - key), page_size - key % page_size)
                var keys = blocks.unsafe_offset(cached(sequence, key, head))
                scores[head_dim, token_width](own, q, keys, some, s)
                for row in range(own):
                    var seen = position + row // group + 1 - key
                    var unseen = max(0, seen - window) if window > 0 else 0
                    softmax[head_dim](
                        s.unsafe_offset(row * KEYS),
                        o.unsafe_offset(row * head_dim),
                        state.unsafe_offset(2 * row),
                        unseen,
                        min(seen, some),
                    )
                var values = keys.unsafe_offset(values_at)
                gather[head_dim, token_width](own, o, values, some, s)
                key += some

            var slot = it[unsafe_offset=PART]
            for row in range(own):
                var place, member = divmod(row, group)
                var target = output.unsafe_offset(
                    ((token + place) * heads + head * group + member) * head_dim
                )
                var factor = 1 / state[unsafe_offset=2 * row + 1]
                if slot >= 0:
                    var kept = part.unsafe_offset(slot * part_size + row * (head_dim + 2))
                    kept[unsafe_offset=head_dim] = state[unsafe_offset=2 * row]
                    kept[unsafe_offset=head_dim + 1] = state[unsafe_offset=2 * row + 1]
                    comptime for d in range(0, head_dim, LANES):
                        kept.unsafe_store(d, o.unsafe_load[width=LANES](row * head_dim + d))
                else:
                    comptime for d in range(0, head_dim, LANES):
                        var x = o.unsafe_load[width=LANES](row * head_dim + d)
                        target.unsafe_store(d, x * factor)
        _ = own_queries^
        _ = gathered^
        _ = block_scores^
        _ = states^

    crew.share(tasks, work)

    var merge_of = plan.merges.unsafe_ptr()

    def put_together(index: Int) {imm}:
        var at = merge_of.unsafe_offset(5 * index)
        var head, token = at[unsafe_offset=0], at[unsafe_offset=1]
        var first = part.unsafe_offset(at[unsafe_offset=3] * part_size)
        for row in range(at[unsafe_offset=2] * group):
            var place, member = divmod(row, group)
            merge[head_dim](
                first.unsafe_offset(row * (head_dim + 2)),
                at[unsafe_offset=4],
                part_size,
                output.unsafe_offset(
                    ((token + place) * heads + head * group + member) * head_dim
                ),
            )

    crew.share(len(plan.merges) // 5, put_together)
