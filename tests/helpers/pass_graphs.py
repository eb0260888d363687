"""Graphs that passes look at: those that they rewrite, and those just outside their conditions."""
import numpy as np

from ggml_py.backends.cpu import CPUBackend
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.quant import tile
from ggml_py.quant.quantize import quantize

N, K, M = 3, 288, 64
CPU = CPUBackend()


def leaf(name, dtype, array, shape=None):
    return Tensor(name, dtype, shape or array.shape, buffer=CPU.upload(array))


def matrix(name, type_="Q8_0", n_cols=K, n_rows=M):
    w = np.random.default_rng(len(name)).standard_normal((n_rows, n_cols)).astype(np.float32)
    raw = w.view(np.uint8) if type_ == "F32" else quantize(w, type_).reshape(n_rows, -1)
    return leaf(name, type_, tile.pack(raw, type_, n_rows, n_cols), (n_rows, n_cols))


def vector(name, n=K):
    return leaf(name, "f32", np.linspace(-2, 2, n, dtype=np.float32))


def start(n=N):
    g = Graph()
    return g, g.input("x", "f32", (n, K)), g.input("y", "f32", (n, K))


def norm(g, x):
    return g.rms_norm(x, vector("norm.weight"), eps=1e-5, name="norm")


def normed():
    g, x, _ = start()
    h = norm(g, x)
    g.outputs = [g.mul_mat(matrix("a"), h, name="a"), g.mul_mat(matrix("bb", "Q4_1"), h, name="b")]
    return g


def gated():
    g, x, y = start()
    g.outputs = [g.mul_mat(matrix("down"), g.swiglu(x, y, name="swiglu"), name="down")]
    return g


def gated_heads():
    g, x, y = start()
    h = g.rms_norm(y, vector("norm.weight", 32), eps=1e-5, name="norm")
    g.outputs = [g.mul_mat(matrix("down"), g.swiglu(x, h, name="swiglu"), name="down")]
    return g


def squared():
    g, x, _ = start()
    g.outputs = [g.mul_mat(matrix("down"), g.relu_sqr(x, name="squared"), name="down")]
    return g


def gated_rows():
    g, x, y = start()
    g.outputs = [g.mul_mat(matrix("down"), g.mul(x, g.sigmoid(y, name="gate"), name="gated"), name="down")]
    return g


def shared_expert():
    g, x, y = start(2)
    routed = g.weighted_sum(x, vector("weights", 2).view((1, 2)), name="routed")
    gate = g.sigmoid(vector("gate", 2).view((1, 1)), name="gate-sigmoid")
    g.outputs = [g.add(routed, g.weighted_sum(y.view((1, K)), gate, name="shared"), name="sum")]
    return g


def biased_rows():
    g, x, _ = start()
    y = g.add(g.mul_mat(matrix("a"), norm(g, x), name="a"), vector("a bias", M), name="sum")
    g.outputs = [g.add(g.mul_mat(matrix("bb", "F32"), x, name="b"), vector("b bias", M), name="b sum"), y]
    return g


def biased_experts():
    g, x, y = start(2)
    ids = leaf("ids", "i32", np.array([[2, 0]], np.int32))
    biased = g.add_id(x, leaf("biases", "f32", np.arange(3 * K, dtype=np.float32).reshape(3, K)), ids, name="biased")
    g.outputs = [g.weighted_sum(biased, vector("weights", 2).view((1, 2)), name="sum"), g.add(x, y, name="others")]
    return g


def both():
    """Two gated products of a norm, the second one of sums."""
    g, x, y = start()
    h = norm(g, x)
    gate, up = (g.mul_mat(matrix(name), h, name=name) for name in ("gate", "up"))
    g.outputs = [g.mul_mat(matrix("down", n_cols=M), g.swiglu(gate, g.add(up, up), name="swiglu"), name="down"), g.add(x, y)]
    return g


def layer(n=N):
    """As in a model: the second sum is of the first one."""
    g, x, y = start(n)
    x = g.add(x, y, name="inp")
    h = norm(g, x)
    gate, up = (g.mul_mat(matrix(name), h, name=name) for name in ("gate", "up"))
    h = g.mul_mat(matrix("down", n_cols=M, n_rows=K), g.swiglu(gate, up, name="swiglu"), name="down")
    x = g.add(x, h, name="out")
    g.outputs = [g.mul_mat(matrix("head"), norm(g, x), name="head")]
    return g


def residual(*readers):
    """The norm of a sum, read by products with weights of the given types; the sum is read later."""
    g, x, y = start()
    total = g.add(x, y, name="total")
    h = norm(g, total)
    g.outputs = [*(g.mul_mat(matrix(f"w{i}", type_), h) for i, type_ in enumerate(readers)), g.mul(total, x)]
    return g


def residual_of_heads():
    """Runs shorter than the row: only floats are normed so."""
    g, x, y = start()
    h = g.rms_norm(g.add(x, y), vector("norm.weight", 32), eps=1e-5)
    g.outputs = [g.mul_mat(matrix("a"), h)]
    return g


def product_of_later(g, x, name="a"):
    """Of activations that are quantized where the product stands."""
    return g.apply("mul_mat", matrix(name), g.quantize(x))


def norm_read_before_it_is_quantized(*readers):
    """readers: (graph, sum, norm) -> what reads either one before."""
    g, x, y = start()
    total = g.add(x, y, name="total")
    h = norm(g, total)
    g.outputs = [*(read(g, total, h) for read in readers), product_of_later(g, h), product_of_later(g, h, "bb"), g.mul(h, total)]
    return g


def norm_and_sum_are_outputs():
    g = residual("Q8_0")
    g.outputs += [node.results[0] for node in g.nodes[:2]]
    return g


def norm_of_a_made_weight():
    """Kernels that quantize read the weight before those ahead of them have ended."""
    g, x, y = start()
    w = norm(g, vector("weight"))
    h = g.rms_norm(g.add(x, y), w, eps=1e-5)
    g.outputs = [g.mul_mat(matrix("a", "F32"), h), g.mul_mat(matrix("a"), h)]
    return g


def norm_quantized_on_another_device():
    g, x, y = start()
    h = norm(g, g.add(x, y))
    g.device = "other"
    w = matrix("a")
    w.device = "other"
    g.outputs = [g.mul_mat(w, h), h]
    return g


def sum_is_an_output():
    g = residual("Q8_0")
    g.outputs.insert(0, g.nodes[0].results[0])
    return g


def sum_has_two_norms():
    """The second norm reads what the first one gives."""
    g = residual("Q8_0")
    g.outputs.append(g.mul_mat(matrix("a"), norm(g, g.nodes[0].results[0])))
    return g


def products(g, x, types=("Q8_0", "Q4_1"), biased=(False, False)):
    """Of one x, with a weight of each type."""
    made = [g.mul_mat(matrix(f"{'ab'[i]}{type_}", type_), x, name="gu"[i]) for i, type_ in enumerate(types)]
    return [g.add(y, vector(f"{y.name} bias", M)) if bias else y for y, bias in zip(made, biased)]


def glu(op="swiglu", types=("Q8_0", "Q4_1"), biased=(False, False)):
    g, x, _ = start()
    g.outputs = [g.apply(op, *products(g, x, types, biased), name="glu")]
    return g


def sum_read_before_the_products():
    """Behind the norm, but before the last of the products that it would be made with."""
    g, x, y = start(1)
    total = g.add(x, y)
    h = norm(g, total)
    gate = g.mul_mat(matrix("gate"), h)
    doubled = g.scale(total, factor=2.0)
    g.outputs = [g.geglu(gate, g.mul_mat(matrix("up"), h)), g.add(doubled, doubled)]
    return g


def likeliest(type_="Q8_0", read=lambda g, logits: []):
    """The largest of the logits of a norm. read: (graph, logits) -> further outputs."""
    g, x, y = start()
    logits = g.mul_mat(matrix("output", type_), norm(g, g.add(x, y, name="total")), name="logits")
    g.outputs = [g.argmax(logits, name="likeliest"), *read(g, logits)]
    return g


def likeliest_of_biased_logits():
    g, x, _ = start()
    g.outputs = [g.argmax(g.add(g.mul_mat(matrix("output"), x), vector("bias", M)))]
    return g


def likeliest_on_another_device():
    g = likeliest("F32")
    g.outputs[0].node.device = "other"
    return g


def logits_of_a_cache_written_before_the_likeliest():
    g, x, _ = start()
    cache, rows = leaf("cache", "f32", np.ones((N, K), np.float32)), leaf("rows", "i64", np.arange(N))
    logits = g.mul_mat(matrix("output", "F32"), cache)
    g.set_rows(cache, x, rows)
    g.outputs = [g.argmax(logits)]
    return g


def product_with_itself():
    g, x, _ = start()
    gate, _ = products(g, x, ("F32", "F32"))
    g.outputs = [g.swiglu(gate, gate, name="square")]
    return g


CELLS = np.array([0, 3, 5])


def q_as_it_is(g, x, y):
    return x, *(g.mul_mat(matrix(name, "F32", n_rows=96), y, name=name) for name in "kv")


def attention(types=("f16", "f16"), neox=(True, True), rows_of_v="rows", v_first=False, norms=(None, None), indirect=False,
              between=lambda g, q, k, cache: [], qkv=q_as_it_is, cells=CELLS, window=0, made_rows=False):
    """Nine heads of Q and three of K and V, put into some of eight cells. norms: eps of those of Q and K. between: (graph,
    rotated Q and K, cache of K) -> outputs, made after K is written and before V is. qkv: (graph, x, y) -> Q, K, V. made_rows: a
    node writes the numbers of the cells."""
    g, x, y = start(len(cells))
    rows = {name: leaf(name, "i64", cells) for name in ("rows", "other rows")}
    if made_rows:
        rows["rows"] = g.cpy(rows["rows"], leaf("no rows", "i64", cells), name="made rows")
    x, k, v = qkv(g, x, y)
    pos, seq = leaf("pos", "i32", cells.astype(np.int32)), leaf("seq", "i32", np.zeros(len(cells), np.int32))
    present = np.isin(np.arange(8), cells).astype(np.uint8)[None]
    table = leaf("table", "f32", np.random.default_rng(2).uniform(-1, 1, (8, 12, 2)).astype(np.float32))
    cache_k, cache_v = (leaf(f"cache {type_}", type_, np.zeros((8, {"f32": 384, "f16": 192, "q8_0": 102}[type_]), np.uint8),
                             (8, 96)) for type_ in types)
    x, k = (h if eps is None else g.rms_norm(h, vector(f"{name}_norm", 32), eps=eps, name=f"{name}_normed")
            for name, h, eps in zip("qk", (x, k), norms))
    q = g.rope(x, pos, table, n_head=9, neox=neox[0], name="q")
    rotated = g.rope(k, pos, table, n_head=3, neox=neox[1], name="rotated k")
    if indirect:
        dst = leaf("dst", "i64",
                   np.array([[CPU.address(cache) + cell * cache.buffer.nbytes // 8 for cell in cells]
                             for cache in (cache_v, cache_k)]))
    write_v = lambda: (g.cpy_rows_indirect(cache_v, v, dst, slot=0, name="cached v") if indirect else
                       g.set_rows(cache_v, v, rows[rows_of_v], name="cached v"))
    if v_first:
        cached_v = write_v()
    cached_k = (g.cpy_rows_indirect(cache_k, rotated, dst, slot=1, name="cached k") if indirect else
                g.set_rows(cache_k, rotated, rows["rows"], name="cached k"))
    others = between(g, q, rotated, cache_k)
    if not v_first:
        cached_v = write_v()
    a = g.flash_attn_ext(q, cached_k, cached_v, seq, pos, leaf("present", "u8", present), n_head=9, n_head_kv=3, scale=0.2,
                         window=window, name="attention")
    g.outputs = [a, *others]
    return g


def three_products(weights=("Q8_0", "Q4_1", "Q5_0"), biased=(False, False, False)):
    """Q, K and V as an attention begins with them, by weights of the given types."""
    def qkv(g, x, y):
        sizes = {"q": K, "kk": 96, "vvv": 96}
        made = [g.mul_mat(matrix(name, type_, n_rows=n), y, name=f"{name} product")
                for type_, (name, n) in zip(weights, sizes.items())]
        return [g.add(z, vector(f"{name} bias", n), name=f"{name} sum") if bias else z
                for z, (name, n), bias in zip(made, sizes.items(), biased)]
    return qkv


def all_of_k_is_read():
    """K's product may have other readers, behind V's."""
    def qkv(g, x, y):
        q, k, v = three_products()(g, x, y)
        return q, k, g.add(v, k)
    return attention(qkv=qkv)


def attention_of_a_norm(norms=norm, read=lambda g, total: g.scale(total, factor=2.0), cells=CELLS[:1], **given):
    """Q, K and V of the norm of a sum, of one token; the sum is read later. norms: (graph, sum) -> norm."""
    def qkv(g, x, y):
        return three_products(**given)(g, x, norms(g, g.add(x, y, name="total")))
    g = attention(qkv=qkv, cells=cells)
    g.outputs.append(read(g, g.nodes[0].results[0]))
    return g


def routed(n=1, router="F32", grouped=False, product_first=False, bias_of=None, gating="soft_max"):
    """A sum and its norm, by which a token is routed and which a product reads. bias_of: None, "choice" or "logits"."""
    g, x, y = start(n)
    total = g.add(x, y, name="total")
    h = norm(g, total)
    first = [g.mul_mat(matrix("a"), h)] if product_first else []
    logits, bias = g.mul_mat(matrix("router", router), h), vector("bias", M)
    if bias_of == "logits":
        logits = g.add(logits, bias)
    probs = getattr(g, gating)(logits)
    chosen_by = g.add(probs, bias) if bias_of == "choice" else probs
    ids = g.top_k(g.mask_groups(chosen_by, n_group=8, n_group_used=3) if grouped else chosen_by, k=5)
    weights = g.scale(g.normalize(g.take_columns(probs, ids)), factor=2.5)
    g.outputs = [*(first or [g.mul_mat(matrix("a"), h)]), weights, ids, g.mul(total, h)]
    return g


def whole_layer(n_tokens=1, act="swiglu", window=0, o_bias=False, types=("f16", "f16"), eps=1e-5, read_first=False, n_ff=M,
                **given):
    """A layer of a dense model and the add of the next one; the sum of the second residual is read there, of the first one by a
    scale, if read_first. given: of `attention`."""
    totals = []

    def qkv(g, x, y):
        totals.append(g.add(x, y, name="total"))
        return three_products()(g, x, norm(g, totals[0]))
    g = attention(types, qkv=qkv, cells=CELLS[:n_tokens], window=window, **given)
    o = g.mul_mat(matrix("o", "Q4_1", n_rows=K), g.outputs.pop(), name="o")
    if o_bias:
        o = g.add(o, vector("o bias"), name="biased")
    total = g.add(totals[0], o, name="second total")
    h = g.rms_norm(total, vector("second norm.weight"), eps=eps, name="second norm")
    gate, up = (g.mul_mat(matrix(name, n_rows=n_ff), h, name=name) for name in ("gate", "upward"))
    down = g.mul_mat(matrix("downward", n_cols=n_ff, n_rows=K), g.apply(act, gate, up, name="glu"), name="down")
    g.outputs += [g.add(total, down, name="out"), *[g.scale(totals[0], factor=2.0)] * read_first]
    return g


def one_gate(n_cols=K, types=("Q8_0", "Q4_1"), biased=(False, False)):
    """A gated product of the norm of a sum, of one token."""
    g = Graph()
    total = g.add(*(g.input(name, "f32", (1, n_cols)) for name in "xy"), name="total")
    h = g.rms_norm(total, vector("norm.weight", n_cols), eps=1e-5, name="norm")
    gate, up = (g.mul_mat(matrix(f"{name}{n_cols}", type_, n_cols), h, name=name) for name, type_ in zip(("gate", "up"), types))
    gate, up = (g.add(each, vector(f"{each.name} bias", M)) if bias else each for each, bias in zip((gate, up), biased))
    g.outputs = [g.geglu(gate, up, name="glu"), g.scale(total, factor=2.0)]
    return g


def q_is_read_after():
    g = attention()
    g.outputs.append(g.scale(g.nodes[2].results[0], factor=2.0))
    return g


def q_is_read_before_v_is_written():
    return attention(between=lambda g, q, k, cache: [g.scale(q, factor=2.0)])


def normed_heads():
    return attention(norms=(1e-5, 1e-5))


def only_q_is_normed():
    return attention(norms=(1e-5, None))


def norms_differ():
    return attention(norms=(1e-5, 1e-6))


def rotated_k_is_read():
    return attention(between=lambda g, q, k, cache: [g.scale(k, factor=2.0)])


def the_cache_is_read_between():
    return attention(("f32", "f16"), between=lambda g, q, k, cache: [g.scale(cache, factor=2.0)])


def attention_and_product(**given):
    g = attention(**given)
    g.outputs = [g.mul_mat(matrix("output"), g.outputs[0], name="output")]
    return g


def attention_is_read_elsewhere():
    g = attention_and_product(rows_of_v="other rows")
    g.outputs.append(g.scale(g.outputs[0].node.src[1].node.src[0], factor=2.0))
    return g


def the_cache_is_written_before_attention_is_quantized():
    g = attention(rows_of_v="other rows")
    a, = g.outputs
    g.set_rows(a.node.src[1].root, g.nodes[0].results[0], leaf("rows again", "i64", CELLS), name="written")
    g.outputs = [product_of_later(g, a)]
    return g


def also_a_float_product():
    g = normed()
    g.outputs.append(g.mul_mat(matrix("float", "F32"), g.nodes[0].results[0]))
    return g


def also_an_output():
    g = gated()
    g.outputs.append(g.nodes[0].results[0])
    return g


def norm_is_an_output():
    g = normed()
    g.outputs.append(g.nodes[0].results[0])
    return g


def float_weights():
    g, x, y = start()
    g.outputs = [g.mul_mat(matrix("a", "F32"), norm(g, x)), g.mul_mat(matrix("b", "F32"), g.swiglu(x, y))]
    return g


def norm_of_heads():
    """A weight shorter than the row: the fused op takes whole rows."""
    g, x, _ = start()
    g.outputs = [g.mul_mat(matrix("a"), g.rms_norm(x, vector("norm.weight", 32), eps=1e-5))]
    return g


def two_devices():
    g, x, y = start()
    h = g.swiglu(x, y)
    g.device = "other"
    w = matrix("a")
    w.device = "other"
    g.outputs = [g.mul_mat(w, h)]
    return g


def operand_written_between():
    """The cache that the norm read is written before the norm is quantized; where it is written first, fusing is right."""
    g, x, y = start()
    cache = leaf("cache", "f32", np.ones((N, K), np.float32))
    rows = leaf("rows", "i64", np.arange(N))
    h = norm(g, cache)
    written = g.set_rows(cache, x, rows, name="written")
    g.outputs = [product_of_later(g, h), g.add(written, y)]
    return g


def sum_read_before_its_norm():
    """What reads the sum runs before the node that would make it."""
    g, x, y = start()
    total = g.add(x, y)
    doubled = g.add(total, total)
    g.outputs = [g.mul_mat(matrix("a", "F32"), norm(g, total)), doubled]
    return g


def sum_with_one_row():
    g, x, _ = start()
    g.outputs = [g.mul_mat(matrix("a", "F32"), norm(g, g.add(x, vector("bias"))))]
    return g


def sum_on_another_device():
    g, x, y = start()
    total = g.add(x, y)
    g.device = "other"
    w = vector("norm.weight")
    w.device = "other"
    g.outputs = [g.rms_norm(total, w, eps=1e-5)]
    return g


def term_written_between():
    """The cache that the sum read is written before the sum is normed."""
    g, x, y = start()
    cache, rows = leaf("cache", "f32", np.ones((N, K), np.float32)), leaf("rows", "i64", np.arange(N))
    total = g.add(cache, y)
    g.set_rows(cache, x, rows)
    g.outputs = [norm(g, total)]
    return g


def a_bias_in_one_product():
    return glu(biased=(False, True))


def a_bias_of_rows():
    """What is added to the products is no row: the fused op adds rows only."""
    g, x, y = start()
    gate, up = products(g, x)
    other = g.mul_mat(matrix("other"), y)
    g.outputs = [g.swiglu(g.add(gate, other), g.add(up, other))]
    return g


def float_and_quantized_products():
    return glu(types=("F32", "Q8_0"))


def products_of_two_inputs():
    g, x, y = start()
    g.outputs = [g.swiglu(g.mul_mat(matrix("a"), x), g.mul_mat(matrix("b"), y))]
    return g


def a_product_is_read_elsewhere():
    g = glu()
    g.outputs.append(g.scale(g.nodes[2].results[0], factor=2.0))
    return g


def a_product_is_an_output():
    g = glu()
    g.outputs.append(g.nodes[1].results[0])
    return g


def a_product_is_read_without_its_bias():
    g = glu(biased=(True, True))
    g.outputs.append(g.scale(g.nodes[1].results[0], factor=2.0))
    return g


def a_product_is_scaled():
    g, x, _ = start()
    gate, up = products(g, x)
    g.outputs = [g.swiglu(gate, g.scale(up, factor=0.5))]
    return g


def one_side_is_no_product():
    g = Graph()
    x, y = g.input("x", "f32", (N, K)), g.input("y", "f32", (N, K))
    g.outputs = [g.swiglu(g.mul_mat(matrix("square", "F32", n_rows=K), x), y)]
    return g


def products_on_two_devices():
    g, x, _ = start()
    gate = g.mul_mat(matrix("a", "F32"), x)
    g.device = "other"
    w = matrix("b", "F32")
    w.device = "other"
    g.outputs = [g.swiglu(gate, g.mul_mat(w, x))]
    return g


def product_operand_written_between():
    g, x, _ = start()
    cache, rows = leaf("cache", "f32", np.ones((N, K), np.float32)), leaf("rows", "i64", np.arange(N))
    gate, up = products(g, cache, ("F32", "F32"))
    g.set_rows(cache, x, rows)
    g.outputs = [g.swiglu(gate, up)]
    return g


def q_is_biased_before_k_is_made():
    """The bias is not in the op, and what it reads is made too late."""
    def qkv(g, x, y):
        q = g.add(g.mul_mat(matrix("q", n_rows=K), y), vector("bias"))
        return q, *(g.mul_mat(matrix(name, n_rows=96), y) for name in ("kk", "vvv"))
    return attention(neox=(True, False), qkv=qkv)


def float_and_quantized_q():
    return attention(neox=(True, False), qkv=three_products(("F32", "Q8_0", "Q8_0")))


def v_of_another_input():
    def qkv(g, x, y):
        return *three_products(("F32",) * 2)(g, x, y), g.mul_mat(matrix("vvv", "F32", n_rows=96), x)
    return attention(neox=(True, False), qkv=qkv)


def k_and_v_are_one_product():
    def qkv(g, x, y):
        q, k = three_products(("F32",) * 2)(g, x, y)
        return q, k, k
    return attention(neox=(True, False), qkv=qkv)


def v_is_made_first():
    def qkv(g, x, y):
        v = g.mul_mat(matrix("vvv", "F32", n_rows=96), y)
        return *three_products(("F32",) * 2)(g, x, y), v
    return attention(neox=(True, False), qkv=qkv)


def v_on_another_device():
    def qkv(g, x, y):
        w = matrix("vvv", "F32", n_rows=96)
        q, k = three_products(("F32",) * 2)(g, x, y)
        g.device = w.device = "other"
        v = g.mul_mat(w, y)
        g.device = "cpu"
        return q, k, v
    return attention(neox=(True, False), qkv=qkv)
