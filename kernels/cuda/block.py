"""The shape of a block of products with many tokens (`mmq`, `mmq_half`)."""
from dataclasses import dataclass

from ...quant.tile import ROWS
from .group_product import MOST_QUADS
from .tile_form import QUAD


@dataclass(frozen=True)
class Block:
    """A block's row tiles, groups of tokens, and quads of a group: 32 row_tiles rows x 4 groups quads tokens, a warp for each
    tile and group. With warpgroups, for compute capability 9.0 alone: two warps, quads by fours. slots: chunks in
    shared memory. teams: so many times as many warps share the chunks of the rows and tokens, by turns, and all else is of one
    team. blocks: of a cluster, whose teams share them. sides: turns of teams for whose sums there is room, one or two
    (`exchange`). copiers: warps beside all these that copy chunks; where there are none, those that multiply do."""
    row_tiles: int
    groups: int
    quads: int
    warpgroups: bool = False
    slots: int = 2
    teams: int = 1
    blocks: int = 1
    sides: int = 1
    copiers: int = 0

    @property
    def n_teams(self) -> int:
        """Of a cluster."""
        return self.teams * self.blocks

    @property
    def n_warps(self) -> int:
        return self.row_tiles * self.groups * (2 if self.warpgroups else 1)

    @property
    def copying_warps(self) -> int:
        """Those by which the pieces of a chunk are copied."""
        return self.copiers or self.n_warps

    @property
    def prepared_quads(self) -> int:
        """Quads for which a warp prepares scales and minima."""
        return MOST_QUADS if self.warpgroups else self.quads

    @property
    def n_rows_lane(self) -> int:
        """Of a lane, eight rows apart."""
        return 2 if self.warpgroups else 4

    @property
    def rows(self) -> int:
        return ROWS * self.row_tiles

    @property
    def tokens(self) -> int:
        return QUAD * self.groups * self.quads

    @property
    def n_sums(self) -> int:
        """Of a lane."""
        return self.n_rows_lane * self.quads

    @property
    def n_own(self) -> int:
        """Of them, those whose totals it has: the teams each have a part, but for the last ones."""
        return self.n_sums if self.n_teams == 1 else 2 * -(-self.n_sums // (2 * self.n_teams))

    @property
    def n_threads(self) -> int:
        return self.n_multiplying + 32 * self.copiers

    @property
    def n_multiplying(self) -> int:
        """Threads of all teams of a block."""
        return 32 * self.n_warps * self.teams

    def __str__(self) -> str:
        teams = f", {self.teams} teams" if self.teams > 1 else ""
        blocks = f", {self.blocks} blocks" if self.blocks > 1 else ""
        return f"{self.rows} x {self.tokens}{' warpgroups' if self.warpgroups else ''}{teams}{blocks}"
