"""Letters: what GPUs hand to each other from within their kernels, without the host (docs/streams.md).

A GPU has a *mailbox* in its own memory, that the others write to over NVLink: int32 words,

    SEQ                the number of the step that it is in, one more with each
    FAULT .. + 2       `name` of the post or take that waited in vain, or 0; the word that it waited for, of the box or, where a
                       receiver had not ended its step, of the mailbox; the seal or the step that stood there
    ENDED + device     the last step that another device has ended

and from byte SEALED on *sealed* words, int64 each: a word of a letter in the lower half, its *seal* in the upper one. The seal of
letter n (from 1) of step s is s * LETTERS + n.

`post` writes each word of a result, sealed, to its receivers, the sender's own mailbox among them. `take` reads sealed words of
its own mailbox, 64 bits at a time, until each has the seal of this step and letter, and puts them into the *box*, where the
receiver's kernels read them. A word and its seal are one store, so they come together, and a letter needs neither a fence nor a
flag: it takes one way over NVLink. A post and the take behind it are one launch: either with a `quantize` of what is taken, where
each thread takes the four columns that it quantizes, or with the `weighted_sum` that makes what is posted, or alone.

A sealed word is written again only when it has been taken. In the next step: the first letter of a step to a receiver waits until
that one has ended the step before (`turn` tells the others). In the same step: by the order of letters (`graph.letters`).

Nobody waits for longer than LIMIT_NS: what is awaited then is left in FAULT, and after that nobody polls more than POLLS times.
"""
from numba import cuda, types

from ...quant.formats import CHUNK
from .experts import RANKS, rank_sum, value_of_rank
from .launch import F32, I32, I64, N, U32, Kernel, factory
from .ptx import (as_f32, as_u32, device, f32, i32, i64, ld, ld_acquire, ld_relaxed, pointer_at, st, st_relaxed, st_release, u32,
                  wait_for_previous)
from .quantize import N_THREADS, chunk_quantizer
from .spin import globaltimer

SEQ, FAULT, ENDED = 0, 1, 4
SEALED = 128                # bytes
MOST_DEVICES = SEALED // 4 - ENDED
LETTERS = 2048              # of a step to a device
MOST_STEPS = 2**31 // LETTERS - 1  # whose seals differ
THREADS, MOST_BLOCKS = 256, 128
POLLS = 1024                # of words, between looks at the time
MOST_QUANTIZING = 512       # blocks, of N_THREADS. All must run at one time: each waits for what all blocks of the others post
ROW = 4                     # int64 of a receiver: address of its sealed words, words from row to row there, number of the letter,
                            # and the word that tells which step the receiver has ended, or 0: not asked
LIMIT_NS = 20_000_000_000


@device
def fault(mailbox, letter, i, found):
    if ld(mailbox, FAULT) == 0:
        st(mailbox, FAULT + 1, i)
        st(mailbox, FAULT + 2, found)
        st(mailbox, FAULT, letter)


@device
def await_end(mailbox, i, step, letter, limit):
    """Until word i of the mailbox says that a device has ended a step."""
    found = ld_acquire(mailbox, i)
    if found != step and ld(mailbox, FAULT) == 0:
        start = globaltimer()
        while found != step and globaltimer() - start < limit:
            found = ld_acquire(mailbox, i)
        if found != step:
            fault(mailbox, letter, i, found)


@device
def sealed_word(word, seal):
    return i64(seal) << 32 | i64(word)


def awaiter(width):
    """The function that waits for `width` words of a letter from `first` on, and leaves them in `found` with their seals; past
    `last` it has that one again. All are asked for at once. The time is looked at seldom, since a look takes longer than a
    poll."""
    @device
    def read(found, sealed, first, last):
        for j in range(width):
            found[j] = ld_relaxed(sealed, min(first + j, last))

    @device
    def missing(found, seal):
        """The first that has not come, or `width`."""
        n = i32(width)
        for j in range(width - 1, -1, -1):
            n = n if i32(found[j] >> 32) == seal else i32(j)
        return n

    @device
    def await_words(found, mailbox, sealed, first, last, seal, letter, limit):
        read(found, sealed, first, last)
        n, start, waits = i32(0), i64(0), True
        while waits and missing(found, seal) < width:
            read(found, sealed, first, last)
            n = i32(n + 1)
            if n % POLLS == 0:
                start = globaltimer() if n == POLLS else start
                waits = globaltimer() - start < limit and ld(mailbox, FAULT) == 0
        if not waits:
            for j in range(width):
                if missing(found, seal) == j:
                    fault(mailbox, letter, i32(min(first + j, last)), i32(found[j] >> 32))
    return await_words


@device
def word_in(found):
    return u32(found & 0xffffffff)


@device
def receiver_of(receivers):
    """(address, words from row to row, number of the letter, word that tells of its steps or 0) of the receiver of a block: of
    column blockIdx.y of the grid. Nobody writes the table."""
    i = ROW * i32(cuda.blockIdx.y)
    return ld(receivers, i), ld(receivers, i + 1), i32(ld(receivers, i + 2)), i32(ld(receivers, i + 3))


def poster(word):
    """The function by which the blocks of a receiver post rows to it. word: (source, row, column, n_cols) -> the word there."""
    @device
    def post(source, receiver, sealed, mailbox, n_rows, n_cols, seq, letter, limit):
        address, stride, number, ended = receiver
        tid, seal = i32(cuda.threadIdx.x), i32(seq * LETTERS + number)
        if ended != 0:
            if tid == 0:
                await_end(mailbox, ended, i32(seq - 1), letter, limit)
            cuda.syncthreads()
        place, n = pointer_at(sealed, address), i32(n_rows * n_cols)
        i, step = i32(cuda.blockIdx.x * cuda.blockDim.x + tid), i32(cuda.gridDim.x * cuda.blockDim.x)
        while i < n:
            row = i32(i // n_cols)
            column = i32(i - row * n_cols)
            st_relaxed(place, row * stride + column, sealed_word(word(source, i64(row), column, n_cols), seal))
            i = i32(i + step)
    return post


@device
def word_of(x, row, column, n_cols):
    return ld(x, row * n_cols + column)


@device
def block_of_all():
    """(number of the block, how many blocks there are)."""
    return i32(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x), i32(cuda.gridDim.x * cuda.gridDim.y)


def taker(width):
    """The function by which all blocks take n words of a letter, `width` of them a thread at a time."""
    await_words = awaiter(width)

    @device
    def take(box, sealed, mailbox, n, seal, letter, limit):
        found = cuda.local.array(width, i64)
        i, n_blocks = block_of_all()
        i = i64(i * cuda.blockDim.x + cuda.threadIdx.x) * width
        while i < n:
            await_words(found, mailbox, sealed, i, i64(n) - 1, seal, letter, limit)
            for j in range(width):
                if i + j < n:
                    st(box, i + j, word_in(found[j]))
            i += i64(n_blocks) * cuda.blockDim.x * width
    return take


@factory([(1,), (4,)])
def letter_kernel(width):
    post, take = poster(word_of), taker(width)

    def kernel(x, receivers, box, sealed, mailbox, n_to, n_rows, n_cols, n, number, letter, limit):
        receiver = receiver_of(receivers)
        wait_for_previous()
        seq = ld(mailbox, SEQ)
        if n_to > 0:
            post(x, receiver, sealed, mailbox, n_rows, n_cols, seq, letter, limit)
        take(box, sealed, mailbox, n, i32(seq * LETTERS + number), letter, limit)
    return Kernel(kernel, (U32, I64, U32, I64, I32, *[N] * 6, types.int64), THREADS)


@factory([(1,), (4,)])
def letter_weighted_sum_kernel(width):
    total_of, take = rank_sum(RANKS, value_of_rank), taker(width)

    @device
    def sum_of(source, row, column, n_cols):
        x, w, out, n_used = source
        total = total_of(x, w, row, column, n_used, n_cols)
        st(out, row * n_cols + column, total)
        return as_u32(total)
    post = poster(sum_of)

    def kernel(x, w, out, receivers, box, sealed, mailbox, n_used, n_rows, n_cols, n, number, letter, limit):
        receiver = receiver_of(receivers)
        wait_for_previous()
        seq = ld(mailbox, SEQ)
        post((x, w, out, n_used), receiver, sealed, mailbox, n_rows, n_cols, seq, letter, limit)
        take(box, sealed, mailbox, n, i32(seq * LETTERS + number), letter, limit)
    return Kernel(kernel, (F32, F32, F32, I64, U32, I64, I32, *[N] * 6, types.int64), THREADS)


@factory([()])
def letter_quantize_kernel():
    post, await_words, quantize_chunk = poster(word_of), awaiter(4), chunk_quantizer(1)

    def kernel(x, receivers, box, sealed, act, mailbox, n_rows, n_cols, n, k, number, letter, limit):
        receiver = receiver_of(receivers)
        wait_for_previous()
        seq = ld(mailbox, SEQ)
        post(x, receiver, sealed, mailbox, n_rows, n_cols, seq, letter, limit)
        seal, n_chunks, (i, n_blocks) = i32(seq * LETTERS + number), i32((k + CHUNK - 1) // CHUNK), block_of_all()
        found, values = cuda.local.array(4, i64), cuda.local.array(4, f32)
        while i < n * n_chunks:
            row = i32(i // n_chunks)
            chunk = i32(i - row * n_chunks)
            column, end = i32(chunk * CHUNK + 4 * cuda.threadIdx.x), i64(row + 1) * k
            first = end - k + column
            if column < k:
                await_words(found, mailbox, sealed, first, end - 1, seal, letter, limit)
            for j in range(4):
                values[j] = f32(0)
                if column + j < k:
                    st(box, first + j, word_in(found[j]))
                    values[j] = as_f32(i32(word_in(found[j])))
            quantize_chunk(values[0], values[1], values[2], values[3], act, n, row, chunk, n_chunks)
            cuda.syncthreads()
            i = i32(i + n_blocks)
    return Kernel(kernel, (U32, I64, U32, I64, U32, I32, *[N] * 6, types.int64), N_THREADS)


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


def letter(target, mailbox, post=None, take=None, name: int = 1, limit_ns: int = LIMIT_NS,
           weighted_sum=None, quantize=None):
    """A post, a take, or a post and the take behind it; `weighted_sum` before both, or `quantize` of what is taken.

    post: (address of a result, of int64 [n receivers, ROW], n receivers, rows, words of a row). Rows lie one behind the other
    in the result, and as far apart as the receiver says in its sealed words. take: (address of the box, of its sealed words, how
    many they are, number of the letter). mailbox: its address. name: number of the post or take, from 1, that FAULT has where
    something does not come in limit_ns. weighted_sum: (address of f32 [rows n_used, words of a row], of weights, n_used): the
    result is made of them. quantize: (address of activations of the box, rows, columns); they do not lie where the
    result lies, which other blocks may still read."""
    x, to, n_to, n_rows, n_cols = post or (mailbox, mailbox, 0, 0, 1)
    box, sealed, n, number = take or (mailbox, mailbox, 0, 0)
    width = 1 if n <= MOST_BLOCKS * THREADS else 4
    kernel, operands, shape = letter_kernel(width), (x, to, box, sealed), (n_to, n_rows, n_cols, n)
    most, n_takers = MOST_BLOCKS, -(-n // width)
    if weighted_sum is not None:
        rows, w, n_used = weighted_sum
        kernel, operands = letter_weighted_sum_kernel(width), (rows, w, x, to, box, sealed)
        shape = n_used, n_rows, n_cols, n
    if quantize is not None:
        act, n, k = quantize
        kernel, operands, shape = letter_quantize_kernel(), (x, to, box, sealed, act), (n_rows, n_cols, n, k)
        most, n_takers = MOST_QUANTIZING, n * -(-k // CHUNK) * N_THREADS
    n_columns, n_threads = max(n_to, 1), kernel.n_threads
    n_blocks = max(-(-n_rows * n_cols // n_threads), -(-n_takers // (n_threads * n_columns)))
    grid = max(1, min(most // n_columns, n_blocks)), n_columns
    return target.launch(kernel, grid, n_threads, (*operands, mailbox, *shape, number, name, limit_ns))


def turn(target, mailbox, to, n_to: int):
    """The end of a step of a device: the others are told, and SEQ is one more. to: address of int64 [n_to], the addresses of the
    words of theirs that tell it."""
    return target.launch(turn_kernel(), 1, 32, (to, mailbox, n_to))
