"""How teams of warps share the chunks of a row (`block.Block`): each multiplies every n-th chunk, and all give each other sums,
so that each has the totals of a part of the rows and tokens, which it adds up in the order of the chunks.

The teams of a block meet in its shared memory. Those of other blocks of the cluster are sent what is theirs (`cluster.send4`),
which counts in bytes at their barrier. Nobody waits for all: a warp waits for those in its place in the other teams.

There is room for the sums of one turn or of two (`Block.sides`). With one, a warp sends when all are done with the sums of the
turn before. With two it need not ask. It sends its sums of turn t when it has added those of t - 1. All teams of the cluster sent
it these, each when it had added those of t - 2, which lay in the places that are written now. So it may be two turns ahead of
those in another place, which whoever fills slots must know (`mmq_slots.slot_filler`).
"""
from typing import NamedTuple

from . import cluster, mbarrier
from .block import Block
from .ptx import (as_f32, as_u32, device, fma, greatest, i32, lds, lds2, lds4, least, quotient, remainder, stage, sts, sts4,
                  syncwarp)


class Exchange(NamedTuple):
    """Words of shared memory by which teams give each other sums: sums [side][team of the cluster][warp][vector][lane][width], of
    those whose totals the block has, the scales of their tokens [side][team][warp][token % 4][quad], and the barriers of the
    warps in the same place of all teams [warp][side]: sums are there, and, with one side, all are done with them."""
    sums: int
    width: int     # sums that are written together
    scales: int
    barriers: int
    n_words: int   # with all that lies before


def kept_sums(block: Block) -> int:
    """Sums of a lane whose totals a block has, and places behind them that the last teams read for nothing."""
    return block.teams * block.n_own


def held_scales(block: Block) -> int:
    """Scales of a chunk's tokens that a lane sends, and holds until then: those of token l, l + 32, .."""
    return -(-block.tokens // 32)


def barrier_words(block: Block) -> int:
    """Of a warp and side."""
    return mbarrier.WORDS * (2 if block.sides == 1 else 1)


def exchange(block: Block, first: int) -> Exchange:
    """From word `first` on, on 16 bytes."""
    n_warps = block.sides * block.n_teams * block.n_warps
    scales = first + n_warps * 32 * kept_sums(block)
    barriers = scales + n_warps * block.tokens
    return Exchange(first, 2 if block.n_own % 4 else 4, scales, barriers,
                    barriers + block.n_warps * block.sides * barrier_words(block))


class Exchanger(NamedTuple):
    """Device functions by which a warp of a team and those in its place in the other teams of the cluster give each other sums,
    by turns. team: of the block; rank: of the block in its cluster; turn: the number of it, from 0. The number of a team is
    team * blocks + rank; in a turn it has chunk turn * n_teams + number, if there is one."""
    begin: object  # (tid, team, shared): makes the barriers. A barrier of the cluster goes between it and all else,
    end: object    # and between all else and this, which ends them
    hold: object   # (lane, shared, scales, held): what the lane sends of the chunk's scales, from word `scales` on; held: u32
                   # [held_scales], in registers
    send: object   # (tid, team, rank, shared, held, turn, n_chunks, acc): a lane's acc of its chunk, and what it holds of the
                   # scales, behind the `fold` of the turn before
    fold: object   # (tid, team, rank, shared, turn, n_chunks, total): total = fma(acc, d, total) over the chunks of the turn,
                   # which are in the order of the teams, when they are there; total: the lane's own, which are sums
                   # number of its team * n_own .. of all
    finish: object  # (tid, team, rank, shared, turn, n_chunks, total): the rest, of a team whose next turn is `turn`


def places(block: Block, at: Exchange):
    """(there, done, parity, place). there, done: (warp, turn) -> word of the barrier: all sums of a turn are there; all are done
    with them, where there is one side. parity: (turn) -> that of the phase. place: (number of a team, warp, turn) -> that of what
    a warp sends."""
    barriers, words = at.barriers, barrier_words(block)
    sides, n_teams, n_warps = block.sides, block.n_teams, block.n_warps

    @device
    def there(warp, turn):
        return i32(barriers + (warp * sides + (turn & 1) if sides > 1 else warp) * words)

    @device
    def done(warp, turn):
        return i32(there(warp, turn) + mbarrier.WORDS)

    @device
    def parity(turn):
        return i32((turn >> 1 if sides > 1 else turn) & 1)

    @device
    def place(number, warp, turn):
        return i32((number + (turn & 1) * n_teams if sides > 1 else number) * n_warps + warp)
    return there, done, parity, place


def senders(block: Block, at: Exchange):
    """(tid, team, rank, shared, held, turn, acc): what a lane gives to all blocks of the cluster, of a chunk of whose tokens'
    scales it holds some."""
    (sums, width, scales, *_), (there, _, _, place) = at, places(block, at)
    blocks, tokens, kept = block.blocks, block.tokens, kept_sums(block)
    n_vectors, own_vectors, n_held = block.n_sums // width, block.n_own // width, held_scales(block)

    @device
    def keep(shared, to, acc, o):
        if width == 4:
            sts4(shared, to, as_u32(acc[o]), as_u32(acc[o + 1]), as_u32(acc[o + 2]), as_u32(acc[o + 3]))
        else:
            sts(shared, to, as_u32(acc[o]))
            sts(shared, to + 1, as_u32(acc[o + 1]))

    @device
    def give(far, barrier, acc, o):
        if width == 4:
            cluster.send4(far, barrier, as_u32(acc[o]), as_u32(acc[o + 1]), as_u32(acc[o + 2]), as_u32(acc[o + 3]))
        else:
            cluster.send2(far, barrier, as_u32(acc[o]), as_u32(acc[o + 1]))

    @device
    def vector_of(v):
        """Where, among the vectors of the block that has its totals, vector v of all lies."""
        return v // own_vectors // blocks * own_vectors + v % own_vectors

    def sender(to):
        @stage
        def send(tid, team, rank, shared, held, turn, acc):
            lane, warp = i32(tid & 31), i32(tid >> 5)
            words = place(i32(team * blocks + rank), warp, turn)
            sums_at, scales_at = i32(sums + words * (32 * kept) + lane * width), i32(scales + words * tokens + lane)
            if blocks == 1 or rank == to:
                for v in range(n_vectors):
                    if v // own_vectors % blocks == to:
                        keep(shared, i32(sums_at + vector_of(v) * 32 * width), acc, v * width)
                for i in range(n_held):
                    if lane + 32 * i < tokens:
                        sts(shared, scales_at + 32 * i, held[i])
            else:
                far, far_scales = cluster.address(shared, sums_at, i32(to)), cluster.address(shared, scales_at, i32(to))
                barrier = cluster.address(shared, there(warp, turn), i32(to))
                for v in range(n_vectors):
                    if v // own_vectors % blocks == to:
                        give(i32(far + vector_of(v) * 128 * width), barrier, acc, v * width)
                for i in range(n_held):
                    if lane + 32 * i < tokens:
                        cluster.send1(i32(far_scales + 128 * i), barrier, held[i])
        return send

    def to_blocks(n):
        last, before = sender(n - 1), to_blocks(n - 1) if n > 1 else None

        @device
        def both(tid, team, rank, shared, held, turn, acc):
            before(tid, team, rank, shared, held, turn, acc)
            last(tid, team, rank, shared, held, turn, acc)
        return both if n > 1 else last
    return to_blocks(blocks)


def arrivals(block: Block, at: Exchange):
    """(begin, end, await_others, arrive_there, arrive_done). await_others: (tid, shared, turn): until all are done with what lies
    in the places of the turn. arrive_there: (tid, team, rank, shared, turn, n_chunks): the warp has written its sums of the turn;
    arrive_done: (lane, warp, rank, shared, turn): it is done with all of that turn."""
    (there, done, parity, _), sides, tokens = places(block, at), block.sides, block.tokens
    teams, blocks, n_teams, n_own, n_sums = block.teams, block.blocks, block.n_teams, block.n_own, block.n_sums

    @device
    def begin(tid, team, shared):
        if team == 0 and tid & 31 == 0:
            for side in range(sides):
                mbarrier.begin(shared, there(tid >> 5, side), teams)
                if sides == 1:
                    mbarrier.begin(shared, done(tid >> 5, side), n_teams)

    @device
    def end(tid, team, shared):
        if team == 0 and tid & 31 == 0:
            for side in range(sides):
                mbarrier.end(shared, there(tid >> 5, side))
                if sides == 1:
                    mbarrier.end(shared, done(tid >> 5, side))

    @device
    def await_others(tid, shared, turn):
        if sides == 1 and turn > 0:
            mbarrier.wait(shared, done(tid >> 5, turn), i32(parity(turn) ^ 1))

    @device
    def bytes_from(rank):
        """What a block gets from a team of another one: scales, and the sums whose totals it has."""
        n = i32(0)
        for team in range(teams):
            n = i32(n + least(i32(n_own), greatest(i32(n_sums - (team * blocks + rank) * n_own), i32(0))))
        return i32(4 * tokens + 128 * n)

    @device
    def arrive_there(tid, team, rank, shared, turn, n_chunks):
        """All lanes have written. The teams in the same place of the other blocks send as well, if they have a chunk."""
        syncwarp()
        if tid & 31 == 0:
            if blocks > 1:
                n_there = i32(n_chunks - (turn * n_teams + team * blocks))  # blocks that send, of all
                n_others = i32(greatest(least(n_there, i32(blocks)), i32(0)) - (1 if rank < n_there else 0))
                mbarrier.expect(shared, there(tid >> 5, turn), i32(n_others * bytes_from(rank)))
            else:
                mbarrier.arrive(shared, there(tid >> 5, turn))

    @device
    def arrive_done(lane, warp, rank, shared, turn):
        syncwarp()  # all lanes have read
        if sides == 1 and lane == 0:
            mbarrier.arrive(shared, done(warp, turn))
            for i in range(1, blocks):
                cluster.arrive_at(cluster.address(shared, done(warp, turn), remainder(i32(rank + i), blocks)))
    return begin, end, await_others, arrive_there, arrive_done


def exchanger(block: Block, at: Exchange) -> Exchanger:
    """Of a block with several teams in its cluster."""
    (sums, width, scales, *_), (there, _, parity, place) = at, places(block, at)
    blocks, n_teams, n_warps, n_own, quads, tokens = (block.blocks, block.n_teams, block.n_warps, block.n_own, block.quads,
                                                      block.tokens)
    (begin, end, await_others, arrive_there, arrive_done), send_all = arrivals(block, at), senders(block, at)
    kept, n_held = kept_sums(block), held_scales(block)

    @device
    def hold(lane, shared, scales, held):
        for i in range(n_held):
            held[i] = lds(shared, scales + least(i32(lane + 32 * i), i32(tokens - 1)))

    @stage
    def send(tid, team, rank, shared, held, turn, n_chunks, acc):
        await_others(tid, shared, turn)
        send_all(tid, team, rank, shared, held, turn, acc)
        arrive_there(tid, team, rank, shared, turn, n_chunks)

    @device
    def add_sums(shared, at, d_of, total):
        for v in range(n_own // width):
            o = v * width
            if width == 4:
                (a, b, c, e), (d0, d1) = lds4(shared, at + v * 128), lds2(shared, d_of + 2 * v)
                total[o], total[o + 1] = fma(as_f32(a), as_f32(d0), total[o]), fma(as_f32(b), as_f32(d0), total[o + 1])
                total[o + 2], total[o + 3] = fma(as_f32(c), as_f32(d1), total[o + 2]), fma(as_f32(e), as_f32(d1), total[o + 3])
            else:
                (a, b), d0 = lds2(shared, at + v * 64), lds(shared, d_of + v)
                total[o], total[o + 1] = fma(as_f32(a), as_f32(d0), total[o]), fma(as_f32(b), as_f32(d0), total[o + 1])

    @stage
    def fold(tid, team, rank, shared, turn, n_chunks, total):
        lane, warp, n = i32(tid & 31), i32(tid >> 5), i32(n_chunks - turn * n_teams)
        mbarrier.wait(shared, there(warp, turn), parity(turn))
        words = place(i32(0), warp, turn)
        at = i32(sums + words * (32 * kept) + team * (32 * n_own) + lane * width)
        d_of = i32(scales + words * tokens + (lane & 3) * quads + (team * blocks + rank) * (n_own // 2))
        if n >= n_teams:  # without branches, so that all loads are under way together
            for source in range(n_teams):
                add_sums(shared, i32(at + source * (n_warps * 32 * kept)), i32(d_of + source * (n_warps * tokens)), total)
        else:
            for source in range(n_teams - 1):
                if source < n:
                    add_sums(shared, i32(at + source * (n_warps * 32 * kept)), i32(d_of + source * (n_warps * tokens)), total)
        arrive_done(lane, warp, rank, shared, turn)

    @stage
    def finish(tid, team, rank, shared, turn, n_chunks, total):
        n_turns = quotient(i32(n_chunks + (n_teams - 1)), n_teams)
        if turn < n_turns:  # there are no chunks for all in the last turn, and none for this team
            if turn > 0:
                fold(tid, team, rank, shared, turn - 1, n_chunks, total)
            await_others(tid, shared, turn)
            arrive_there(tid, team, rank, shared, turn, n_chunks)
        fold(tid, team, rank, shared, n_turns - 1, n_chunks, total)
    return Exchanger(begin, end, hold, send, fold, finish)
