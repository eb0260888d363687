"""Letters: what GPUs hand to each other from within their kernels, without the host (docs/streams.md).

A GPU has a *mailbox*, int32 words in its own memory, that the others write to over NVLink:

    SEQ                the number of the step that it is in, one more with each
    FAULT .. + 2       number of the letter that did not come in time or 0, the word that it waited for, what stood there
    ENDED + device     the last step that another device has ended
    FLAGS ..           of each part of a letter (what a block writes) the step that it was written in

`post` writes a result to its *boxes*, memory of the receivers that their kernels then read in place: a block writes its part, and
when all of its threads have, one of them the step's number into the part's flag, by a store that releases what was written before
it to all of the machine. `take` waits, by loads that acquire, until all flags of a box have that number. A post and the take
behind it are one launch: block (0, 0) waits when it has written.

A box is written to again only when its last reader has ended. In the next step: the first letter of a step to a receiver waits
until that one has ended the step before (`turn` tells the others). In the same step: by the order of letters (`graph.letters`).

Nobody waits for longer than LIMIT_NS: what is awaited then is left in FAULT, and after that nobody waits at all.
"""
from numba import cuda, types

from .launch import I32, I64, N, U32, Kernel, factory
from .ptx import device, i32, i64, ld, ld4, ld_acquire, pointer_at, st, st4, st_release, wait_for_previous
from .spin import globaltimer

SEQ, FAULT, ENDED, FLAGS = 0, 1, 4, 32
MOST_DEVICES = FLAGS - ENDED
THREADS, MOST_BLOCKS = 256, 64
ROW = 4                     # int64 of a receiver: address of the box, words from row to row, address of the first flag or 0 of
                            # the sender's own box, and the word that tells which step the receiver has ended, or 0: not asked
LIMIT_NS = 20_000_000_000


@device
def await_word(mailbox, i, wanted, letter, limit):
    """Until word i of the mailbox is `wanted`."""
    found = ld_acquire(mailbox, i)
    if found != wanted and ld(mailbox, FAULT) == 0:
        start = globaltimer()
        while found != wanted and globaltimer() - start < limit:
            found = ld_acquire(mailbox, i)
        if found != wanted and ld(mailbox, FAULT) == 0:
            st(mailbox, FAULT + 1, i)
            st(mailbox, FAULT + 2, found)
            st(mailbox, FAULT, letter)


@factory([(4,), (1,)])
def letter_kernel(width):
    """width: words of an access."""
    def kernel(x, receivers, mailbox, n_to, n_rows, n_cols, first, n_awaited, letter, limit):
        tid, part, receiver = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        address, stride, flag, ended = i64(0), i64(0), i64(0), i64(0)
        if receiver < n_to:  # which nobody writes
            address, stride = ld(receivers, ROW * receiver), ld(receivers, ROW * receiver + 1)
            flag, ended = ld(receivers, ROW * receiver + 2), ld(receivers, ROW * receiver + 3)
        wait_for_previous()
        seq = ld(mailbox, SEQ)
        if receiver < n_to:
            if ended != 0:
                if tid == 0:
                    await_word(mailbox, i32(ended), i32(seq - 1), letter, limit)
                cuda.syncthreads()
            box = pointer_at(x, address)
            i, n, step = i32(part * THREADS + tid), i32(n_rows * n_cols), i32(cuda.gridDim.x * THREADS)
            while i < n:
                row = i32(i // n_cols)
                at = row * stride + width * i64(i - row * n_cols)
                if width == 4:
                    a, b, c, d = ld4(x, 4 * i64(i))
                    st4(box, at, a, b, c, d)
                else:
                    st(box, at, ld(x, i))
                i = i32(i + step)
            cuda.syncthreads()
            if flag != 0 and tid == 0:
                st_release(pointer_at(mailbox, flag), part, seq)
        if part == 0 and receiver == 0:
            i = tid
            while i < n_awaited:
                await_word(mailbox, i32(first + i), seq, letter, limit)
                i = i32(i + THREADS)
    return Kernel(kernel, (U32, I64, I32, *[N] * 6, types.int64), THREADS)


@factory([()])
def turn_kernel():
    def kernel(to, mailbox, n_to):
        wait_for_previous()
        tid, seq = i32(cuda.threadIdx.x), ld(mailbox, SEQ)
        cuda.syncthreads()
        if tid < n_to:
            st_release(pointer_at(mailbox, ld(to, tid)), 0, seq)
        if tid == 0:
            st(mailbox, SEQ, i32(seq + 1))
    return Kernel(kernel, (I64, I32, N), 32)


def n_parts(n_bytes: int) -> int:
    """Blocks that write a letter, each of which has a flag."""
    return min(MOST_BLOCKS, -(-n_bytes // (16 * THREADS)))


def letter(target, mailbox, post=None, take=(0, 0), name: int = 1, limit_ns: int = LIMIT_NS):
    """A post, a take, or a post and the take behind it.

    post: (address of a result, of int64 [n receivers, ROW], n receivers, rows, bytes of a row). Rows lie one behind the other
    in the result, and as far apart as the receiver says in its box. take: the first of the flags that are awaited, and how many.
    mailbox: its address. name: number of the letter, from 1, that FAULT has where something does not come in limit_ns."""
    x, to, n_to, n_rows, row_bytes = post or (mailbox, mailbox, 0, 0, 16)
    width = 4 if row_bytes % 16 == 0 == x % 16 else 1
    grid = (n_parts(n_rows * row_bytes), n_to) if post else 1
    args = x, to, mailbox, n_to, n_rows, row_bytes // (4 * width), *take, name, limit_ns
    return target.launch(letter_kernel(width), grid, THREADS, args)


def turn(target, mailbox, to, n_to: int):
    """The end of a step of a device: the others are told, and SEQ is one more. to: address of int64 [n_to], the addresses of the
    words of theirs that tell it."""
    return target.launch(turn_kernel(), 1, 32, (to, mailbox, n_to))
