"""The op table's mechanism: what is declared of an op, and how. The ops themselves are in `primitive` and `compose`.

Shapes are numpy's (rows outside): n = tokens, k and m = columns. dtypes: f32, i32, i64, u8; "act" = activations quantized in
chunks of 256 columns (docs/numerics.md section 3); the name of a GGUF type for weights and caches.
"""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ROLES = ("rows", "weight", "state", "slots", "whole")


class ShapeError(ValueError):
    """Operands that an op does not take. The graph adds the node and the op."""


class Shape(NamedTuple):
    """What a rule says of a result; also stands for a tensor as an operand of another rule."""
    dtype: str
    shape: tuple[int, ...]
    maker: None = None  # as of a tensor that no node makes


@dataclass(frozen=True)
class Op:
    """rule: (params, *operands) -> Shape, or one for each result, or ShapeError. Of a fused op: its template.

    operands: their names. roles: what each is.
        rows     has rows of tokens: row i of the results depends on no other row of it
        weight   never changes while a model is loaded
        state    what sequences remember of each token: a cache
        slots    what they remember of all tokens together: rows that are chosen anew for each step (`state.recurrent`)
        whole    read as a whole for every token
    results: their names. A result with an operand's name *is* that operand, which the op writes into.
    scatters: result -> optional operand: where that is given, it names the rows of a state, by number or (parameter slot) by
    address, to which the kernels write the result (`graph.elide`).
    overwrites: result -> operand over which the kernels may write it.
    addresses: operand -> the state whose rows it names by address, in its row number params["slot"].
    step_params: parameters that change from step to step, so that a CUDA graph of the node would be stale.
    module: of kernels/reference, kernels/cpu and kernels/cuda. template: of a fused op (`compose`), else None."""
    name: str
    operands: tuple[str, ...]
    roles: dict[str, str]
    rule: Callable
    params: tuple[str, ...] = ()
    results: tuple[str, ...] = ("out",)
    module: str = ""
    n_optional: int = 0  # the last operands, of which there are all or none
    defaults: dict[str, Any] = field(default_factory=dict)  # values of parameters that need not be given
    scatters: dict[str, str] = field(default_factory=dict)
    overwrites: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    step_params: tuple[str, ...] = ()
    template: Any = None


OPS: dict[str, Op] = {}


def declare(name: str, operands: str, rule: Callable, params: str = "", results: str = "out", module: str = "", **kwargs) -> Op:
    """Enters an op into the table. operands: names, each with ":role" behind it where that is not rows."""
    roles = {name: role or "rows" for name, _, role in (each.partition(":") for each in operands.split())}
    op = Op(name, tuple(roles), roles, rule, tuple(params.split()), tuple(results.split()), module or name, **kwargs)
    names = [*op.operands, *(r for r in op.results if r not in op.operands), *op.params]
    assert name not in OPS and len(set(names)) == len(names) and set(op.roles.values()) <= set(ROLES), name
    OPS[name] = op
    return op


def op(operands: str, params: str = "", **kwargs):
    """Declares the decorated shape rule as the op of its name."""
    def decorate(rule):
        declare(rule.__name__, operands, rule, params, **kwargs)
        return rule
    return decorate


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)
