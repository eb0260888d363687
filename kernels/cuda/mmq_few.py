"""Products of quantized weights with 1 to 16 tokens (docs/numerics.md, section 3): the weights are read once for all of them.
How a block multiplies: `few_product`."""
from dataclasses import dataclass, replace
from functools import lru_cache

from ...quant.formats import CHUNK, FORMATS
from ...quant.tile import ROWS
from ..call import Call
from .ending import STORE, gate_and_store
from .few_product import TOGETHER, products
from .few_slots import MOST_TOKENS, box_words, shared_words
from .launch import F32, I32, Kernel, N, U32, even_bytes, factory, need
from .operands import addresses, gated_of, qkv_of
from .quantize import most_rows
from .tile_form import QUAD
from .tile_walk import best_of_tiles, by_turns, in_a_row

# Warps of a block that multiply at most, by its tokens: 16 leave 128 registers a thread, 11 and that which adds 168, 7 and that
# which adds 255. With 8 tokens an eighth one, which shares a scheduler with that which adds, is late.
MAX_WARPS = {1: 16, QUAD: 11, 2 * QUAD: 7, MOST_TOKENS: 11}
ROUND_WORDS = 2112    # of a round's sums, if it has more chunks than warps: 64 chunks of one token
LATENCY = 3           # chunks that a scheduler can issue while one waits
SCHEDULERS = 4        # of a multiprocessor: warp w of all belongs to w % 4


def threads_of(n_tokens: int, n_warps: int) -> int:
    """Of a block with so many warps that multiply: of several tokens with the warp that adds."""
    return 32 * (n_warps + (n_tokens > 1))


@factory([(fmt.name, n_tokens) for fmt in FORMATS.values() if fmt.is_quantized for n_tokens in MAX_WARPS])
def mmq_few_kernel(name, n_tokens):
    run = products((name,), n_tokens, by_turns(1, n_tokens, STORE))

    def kernel(words, act, out, n_rows, n_cols, n, n_boxes):
        # A block: row tiles from blockIdx.x by gridDim.x, tokens from blockIdx.y * n_tokens
        run(((words,), (out, out), out, n_rows), act, n_cols, n, n_boxes)
    return Kernel(kernel, (U32, U32, F32, N, N, N, N), threads_of(n_tokens, MAX_WARPS[n_tokens]))


@factory([("Q8_0", 1), ("Q4_K", 4), ("IQ2_S", 8), ("Q6_K", 16)])
def mmq_few_bias_kernel(name, n_tokens):
    run = products((name,), n_tokens, in_a_row(1, n_tokens, True))

    def kernel(words, act, bias, out, n_rows, n_cols, n, n_boxes):  # blocks as in mmq_few_kernel
        run(((words,), (out,), (n_rows,), (bias,)), act, n_cols, n, n_boxes)
    return Kernel(kernel, (U32, U32, F32, F32, N, N, N, N), threads_of(n_tokens, MAX_WARPS[n_tokens]))


@factory([("Q4_K", 1), ("Q8_0", 1), ("Q6_K", 1), ("Q4_1", 4), ("IQ2_S", 8), ("Q6_K", 16)])
def mmq_few_argmax_kernel(name, n_tokens):
    run = products((name,), n_tokens, best_of_tiles(n_tokens))

    def kernel(words, act, parts, n_rows, n_cols, n, n_boxes):  # blocks as in mmq_few_kernel
        run(((words,), (words,), parts, n_rows), act, n_cols, n, n_boxes)
    return Kernel(kernel, (U32, U32, I32, N, N, N, N), threads_of(n_tokens, MAX_WARPS[n_tokens]))


@factory([("silu", "Q4_K", "Q4_K", False, 1), ("gelu", "IQ2_S", "IQ3_S", True, 8), ("relu", "Q8_0", "Q6_K", True, 16)])
def mmq_few_glu_kernel(activation, gate, up, biased, n_tokens):
    run = products((gate, up), n_tokens, by_turns(2, n_tokens, gate_and_store(activation, biased)))

    def kernel(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n, n_boxes):  # blocks as in mmq_few_kernel
        run(((gate_words, up_words), (gate_bias, up_bias), out, n_rows), act, n_cols, n, n_boxes)
    return Kernel(kernel, (U32, U32, F32, F32, U32, F32, N, N, N, N), threads_of(n_tokens, MAX_WARPS[n_tokens]))


@factory([("Q4_K", "Q4_K", "Q4_K", False, 1), ("Q4_K", "Q4_K", "Q6_K", True, 1), ("Q8_0", "Q8_0", "Q8_0", False, 8),
          ("IQ2_S", "IQ3_S", "Q4_K", True, 16)])
def mmq_few_qkv_kernel(q, k, v, biased, n_tokens):
    run = products((q, k, v), n_tokens, in_a_row(3, n_tokens, biased))

    def kernel(q_words, k_words, v_words, act, q_bias, k_bias, v_bias, q_out, k_out, v_out, q_rows, k_rows, v_rows, n_cols, n,
               n_boxes):
        # blocks as in mmq_few_kernel
        run(((q_words, k_words, v_words), (q_out, k_out, v_out), (q_rows, k_rows, v_rows), (q_bias, k_bias, v_bias)), act,
            n_cols, n, n_boxes)
    return Kernel(kernel, (U32,) * 4 + (F32,) * 6 + (N,) * 6, threads_of(n_tokens, MAX_WARPS[n_tokens]))


@dataclass(frozen=True)
class FewShape:
    """Launch of mmq_few: tokens of a block, its warps that multiply, the boxes for sums of chunks (`few_product`), blocks over
    row tiles and tokens, bytes of shared memory. Boxes are, of a single token, the chunks of a round: all of a row or whole turns
    of the warps; of several tokens a power of two, more than the warps, and no less than are added together."""
    n_tokens: int
    n_warps: int
    n_boxes: int
    grid: tuple[int, int]
    n_bytes: int

    @property
    def n_threads(self) -> int:
        return threads_of(self.n_tokens, self.n_warps)


def work(n_warps: int, n_blocks: int, n_chunks: int) -> int:
    """How long n_blocks of n_warps on a multiprocessor take for n_chunks each: turns of the warps, each as long as the busiest
    scheduler has warps, or as a warp waits for its own loads and sums, which is about as long as LATENCY chunks are issued
    (docs/kernels-log.md)."""
    return -(-n_chunks // n_warps) * max(LATENCY, -(-n_blocks * n_warps // SCHEDULERS))


def is_even(n_warps: int) -> bool:
    """Whether schedulers share the warps that multiply evenly, alone or with that which adds, or have one each at most."""
    return n_warps < SCHEDULERS or n_warps % SCHEDULERS in (0, SCHEDULERS - 1)


def boxes_of(n_tokens: int, n_warps: int, n_chunks: int) -> int:
    """As of `FewShape`."""
    if n_tokens > 1:
        return max(TOGETHER, 1 << n_warps.bit_length())
    if n_chunks * box_words(1, 1) <= ROUND_WORDS:
        return n_chunks
    return n_warps * min(-(-n_chunks // n_warps), max(1, ROUND_WORDS // (n_warps * box_words(1, 1))))


def shape_of(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_tokens: int, n_warps: int, n_blocks: int,
             row_words: int = 0) -> FewShape:
    """The shape with so many warps a block that multiply. names: formats of the matrices; n_blocks: of the grid over row tiles at
    most; row_words: as of `shared_words`."""
    n_tiles, n_chunks = -(-n_rows // ROWS), -(-n_cols // CHUNK)
    n_boxes = boxes_of(n_tokens, n_warps, n_chunks)
    n_sides = 1 if n_boxes >= n_chunks and n_tiles <= n_blocks and len(names) == 1 else 2
    n_bytes = 4 * shared_words(names, n_tokens, n_warps, n_boxes, min(n, n_tokens), n_sides, row_words)
    return FewShape(n_tokens, n_warps, n_boxes, (min(n_tiles, n_blocks), -(-n // n_tokens)), n_bytes)


@lru_cache(None)
def few_shape(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
              row_words: int = 0) -> FewShape:
    """As many tokens as a block can take, and one block a multiprocessor, `evenly`. Warps: of those numbers that registers and
    shared memory hold the one that `work` finds the fastest, the smallest of equals; of several tokens only even ones and the
    largest are tried. names: formats of the matrices; row_words: as of `shared_words`."""
    n_tokens = next((t for t in MAX_WARPS if t >= n), MOST_TOKENS)
    n_tiles, n_chunks = -(-n_rows // ROWS), -(-n_cols // CHUNK)
    n_each = n_chunks if n_tokens == 1 else n_chunks * -(-n_tiles // n_multiprocessors)  # that warps of a block take by turns
    most = min(MAX_WARPS[n_tokens], n_each)
    numbers = [n_warps for n_warps in range(1, most + 1) if n_tokens == 1 or n_warps == most or is_even(n_warps)]
    shapes = [shape_of(names, n_rows, n_cols, n, n_tokens, n_warps, n_multiprocessors, row_words) for n_warps in numbers]
    fitting = [shape for shape in shapes if shape.n_bytes <= shared_limit] or shapes[:1]
    best = min(fitting, key=lambda shape: work(shape.n_warps, 1, n_each))
    return evenly(best, n_multiprocessors, shared_limit) if 2 * best.grid[0] * best.grid[1] > n_multiprocessors else best


def evenly(shape: FewShape, n_multiprocessors: int, shared_limit: int) -> FewShape:
    return replace(shape, n_bytes=even_bytes(shape.n_bytes, shape.grid[0] * shape.grid[1], n_multiprocessors, shared_limit))


def few_launch(call: Call, kernel: Kernel, args: tuple):
    """In the shape of the plan. args: of the kernel, in front of the boxes."""
    shape, (n, n_cols) = call.plan, call.x.shape
    need(n <= most_rows(n_cols), "n", n, f"1..{most_rows(n_cols)}")
    return call.device.launch(kernel, shape.grid, shape.n_threads, (*args, shape.n_boxes), shape.n_bytes)


def mmq_few(call: Call):
    """out = w x, as of `mul_mat`, w quantized. plan: `FewShape`."""
    args = *addresses(call.w, call.x, call.out), *call.w.shape, call.x.shape[0]
    return few_launch(call, mmq_few_kernel(call.w.dtype, call.plan.n_tokens), args)


def mmq_few_bias(call: Call):
    """out = w x + bias, as of `mul_mat_bias`, w quantized. plan: `FewShape`."""
    args = *addresses(call.w, call.x, call.bias, call.out), *call.w.shape, call.x.shape[0]
    return few_launch(call, mmq_few_bias_kernel(call.w.dtype, call.plan.n_tokens), args)


def mmq_few_argmax(call: Call):
    """What `argmax_of_parts` takes of the products w x, w quantized. scratch: int32 [n, n_tiles, 2], n_tiles those of w. plan:
    `FewShape`."""
    args = *addresses(call.w, call.x, call.scratch), *call.w.shape, call.x.shape[0]
    return few_launch(call, mmq_few_argmax_kernel(call.w.dtype, call.plan.n_tokens), args)


def mmq_few_glu(call: Call):
    """out = act(gate x + its bias) * (up x + its bias), as of `mul_mat_glu`, gate and up quantized. plan: `FewShape`."""
    names, biased, matrices = gated_of(call)
    args = *matrices, *addresses(call.x, call.out), *call.gate.shape, call.x.shape[0]
    return few_launch(call, mmq_few_glu_kernel(call.act, *names, biased, call.plan.n_tokens), args)


def mmq_few_qkv(call: Call):
    """q_out, k_out, v_out = q x, k x, v x, and their biases, as of `mul_mat_qkv`, all quantized. plan: `FewShape`."""
    names, n_rows, biased, words, biases, outs = qkv_of(call)
    n, n_cols = call.x.shape
    return few_launch(call, mmq_few_qkv_kernel(*names, biased, call.plan.n_tokens),
                      (*words, call.x.data, *biases, *outs, *n_rows, n_cols, n))


def qkv_shape(names: tuple[str, ...], n_rows: tuple[int, ...], n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
              row_words: int = 0) -> FewShape:
    """`few_shape` of matrices of so many rows each, whose tiles are taken in a row."""
    all_rows = ROWS * sum(-(-rows // ROWS) for rows in n_rows)
    return few_shape(names, all_rows, n_cols, n, n_multiprocessors, shared_limit, row_words)
