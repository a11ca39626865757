"""What becomes of rows before a packed matmul on a CPU, and after it: norms, activations, sums."""

from std.math import exp, rsqrt

from .crew import Crew
from .int8_dot import Floats, LANES
from .stream import tasks_of

# What a row of `x` goes through first: nothing; a norm; the product of its second half and an
# activation of its first.
comptime PLAIN = 0
comptime NORMED = 1
comptime GELU = 2
comptime SILU = 3


@fieldwise_init
struct Norm(Copyable, Movable, TrivialRegisterPassable):
    """A root mean square norm: `x / sqrt(mean(x^2) + eps) * (gain + gain_offset)`."""

    var gain: Pointer[Float32, ImmUntrackedOrigin]
    var gain_offset: Float32
    var eps: Float32

    @always_inline
    def inverse[dtype: DType](self, x: Pointer[Scalar[dtype], _], columns: Int) -> Float32:
        """What a row of a multiple of 16 columns is multiplied by, before its gains."""
        return inverse_rms(x, columns, self.eps)

    @always_inline
    def apply(self, values: Floats, inverse: Float32, column: Int) -> Floats:
        """A row's values from a column on, given its `inverse`."""
        return values * inverse * self.gains[LANES](column)

    @always_inline
    def gains[width: SIMDLength](self, column: Int) -> SIMD[DType.float32, width]:
        return self.gain.unsafe_load[width=width](column) + self.gain_offset


@always_inline
def inverse_rms[
    dtype: DType
](x: Pointer[Scalar[dtype], _], columns: Int, eps: Float32) -> Float32:
    """`1 / sqrt(mean(x^2) + eps)` of a row of a multiple of 16 columns."""
    var squares = Floats(0)
    for k in range(0, columns, LANES):
        var values = x.unsafe_load[width=LANES](k).cast[DType.float32]()
        squares = values.fma(values, squares)
    return rsqrt(squares.reduce_add() / Float32(columns) + eps)


@always_inline
def take[
    dtype: DType
](
    target: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[dtype], _],
    columns: Int,
    kind: Int,
    norm: Norm,
):
    """Writes what the matmul multiplies: `columns` numbers, a multiple of 16.

    Args:
        target: The row that is written.
        x: The row that is read, twice as long for an activation.
        columns: Columns of W.
        kind: `PLAIN`, `NORMED`, `GELU` or `SILU`.
        norm: Which, for `NORMED`.
    """
    var inverse = norm.inverse(x, columns) if kind == NORMED else Float32(1)
    for k in range(0, columns, LANES):
        var values = x.unsafe_load[width=LANES](k).cast[DType.float32]()
        if kind == NORMED:
            values = norm.apply(values, inverse, k)
        elif kind != PLAIN:
            var up = x.unsafe_load[width=LANES](columns + k).cast[DType.float32]()
            values = activated(values, kind) * up
        target.unsafe_store(k, values)


@always_inline
def activated[
    width: SIMDLength, //
](x: SIMD[DType.float32, width], kind: Int) -> SIMD[DType.float32, width]:
    """SiLU, or GELU by its tanh (Hendrycks and Gimpel, arXiv 1606.08415).

    Both are `x / (1 + exp(-t))`, since `(1 + tanh(u)) / 2` is `1 / (1 + exp(-2 u))`.
    """
    # 2 sqrt(2 / pi), and 0.044715 times that.
    comptime linear = Float32(1.5957691216057308)
    comptime cubic = Float32(0.07135481282717886)
    var t = x if kind == SILU else x * (x * x).fma(type_of(x)(cubic), type_of(x)(linear))
    return x / (1 + exp(-t))


def add(
    mut crew: Crew,
    total: Pointer[mut=True, Float32, _],
    residual: Pointer[Float32, _],
    y: Pointer[Float32, _],
    rows: Int,
    columns: Int,
    normed: Bool,
    norm: Norm,
    factor: Float32,
):
    """`total = (residual + norm(y)) * factor`, row by row, in one step.

    Args:
        crew: Who does it.
        total: `[rows, columns]`; may be the residual.
        residual: `[rows, columns]`.
        y: `[rows, columns]`.
        rows: How many.
        columns: A multiple of 16.
        normed: Whether `y` goes through the norm.
        norm: Which.
        factor: Of the sum.
    """
    var tasks = max(1, min(rows, tasks_of(rows * columns * 8)))

    def some(task: Int) {imm}:
        for row in range(task, rows, tasks):
            var own = y.unsafe_offset(row * columns)
            var inverse = norm.inverse(own, columns) if normed else Float32(1)
            for k in range(0, columns, LANES):
                var values = own.unsafe_load[width=LANES](k)
                if normed:
                    values = norm.apply(values, inverse, k)
                values = (residual.unsafe_load[width=LANES](row * columns + k) + values) * factor
                total.unsafe_store(row * columns + k, values)

    crew.share(tasks, some)
