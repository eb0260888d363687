"""Models with experts on the CPU: the same bits on every axis, equal to dense models where they must be, and their errors."""
from collections import Counter
from itertools import combinations

import gguf
import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.cli.info import memory_bytes
from ggml_py.files.gguf import GGUFFile
from ggml_py.engine.model import Model
from ggml_py.models.deepseek2 import Deepseek2
from ggml_py.models.glm4moe import Glm4MoE
from ggml_py.base.placement import PlacementOptions
from ggml_py.graph.fuse import PASSES
from ggml_py.graph.program import Arenas, Program
from ggml_py.testing import assert_bitwise_equal
from tiny_models import run
from tiny_moe_models import ARCHITECTURES, SIGMOID, write_moe_model

MIXED = ("Q8_0", "Q4_1", "F16", "Q4_0", "Q5_0", "F32", "Q5_1")


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(2).integers(0, 70, 90).astype(np.int32)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_same_bits_on_every_axis(kind, tokens, tmp_path):
    with Model.load(write_moe_model(tmp_path / "m.gguf", kind, MIXED), device="cpu") as model:
        expected = run(model, tokens)
        assert np.isfinite(expected).all() and expected.std() > 0.1
        for n_ubatch in 1, 7, 64:
            assert_bitwise_equal(run(model, tokens, n_ubatch=n_ubatch), expected, f"{kind} n_ubatch={n_ubatch}")
        for settings in dict(no_fuse="all"), *(dict(no_fuse=name) for name in PASSES), dict(kv_write="cpy"):
            assert_bitwise_equal(run(model, tokens, **settings), expected, f"{kind} {settings}")
        assert_bitwise_equal(run(model, tokens, logits="last"), expected[-1:], f"{kind} last")
        with model.new_context(n_ctx=256) as context:
            pieces = [context.decode(tokens[i:i + 40], logits="all") for i in range(0, 90, 40)]
            assert_bitwise_equal(np.concatenate(pieces), expected, f"{kind} pieces of 40")
        for order in ({2: 30, 0: 90, 3: 1, 1: 89}, {1: 89, 3: 1, 0: 90, 2: 30}):
            with model.new_context(n_ctx=4 * 100, n_seq_max=4, n_ubatch=64) as context:
                together = context.decode_batch([(seq, tokens[:n]) for seq, n in order.items()], logits="all")
                for (seq, n), got in zip(order.items(), together):
                    assert_bitwise_equal(got, expected[:n], f"{kind} sequence {seq} of {order}")


@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss"])
def test_every_mix_of_fused_and_unfused(kind, tokens, tmp_path):
    """Gate and up fused or not, with what is before and after them fused or not."""
    names = "rms_norm_act", "mul_mat_id_glu", "swiglu_act", "topk_moe"
    with Model.load(write_moe_model(tmp_path / "m.gguf", kind, ("Q8_0", "Q4_1")), device="cpu") as model:
        expected = run(model, tokens[:20])
        for some in (some for n in range(1, 5) for some in combinations(names, n)):
            assert_bitwise_equal(run(model, tokens[:20], no_fuse=some), expected, f"{kind} without {some}")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_routing_is_one_node_and_gated_products_are(kind, tmp_path):
    """In the layers with experts, on prompts and on single tokens."""
    with Model.load(write_moe_model(tmp_path / "m.gguf", kind, ("Q8_0", "Q4_1")),
                    device="cpu") as model, model.new_context(n_ctx=64) as context:
        n = sum(il >= model.architecture.experts.n_dense for il in range(model.architecture.hp.n_layer))
        for n_tokens in 5, 1:
            ops = [node.op for node in context.program(n_tokens, 1).nodes]
            assert ops.count("topk_moe") == ops.count("weighted_sum") == n > 0
            # of down
            assert ops.count("mul_mat_id_glu") == ops.count("mul_mat_id") == n and ops.count("add_id") == n * (kind == "gpt-oss")
            assert ops.count("add_rms_norm_and_act") == n  # the router reads floats, experts activations
            assert not {"top_k", "take_columns", "normalize", "mask_groups", "sigmoid", "soft_max"} & set(ops)


@pytest.mark.parametrize("types", [("F32",), MIXED], ids=["F32", "mixed"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_cpu_is_the_reference(kind, types, tokens, tmp_path):
    path = write_moe_model(tmp_path / "m.gguf", kind, types)
    found = []
    for room in "cpu", "reference":
        with Model(GGUFFile.open(path), CPUBackend(room)) as model:
            found.append([run(model, tokens[:25], type_k=type_, type_v=type_) for type_ in ("f32", "q8_0")])
    for a, b in zip(*found):
        assert_bitwise_equal(a, b, kind)


def test_one_expert_is_a_dense_layer(tokens, tmp_path):
    """A softmax over one logit is 1."""
    tensors = {}
    experts = write_moe_model(tmp_path / "experts.gguf", "qwen3moe", n_expert=1, n_used=1, tensors=tensors)
    reader = gguf.GGUFReader(experts)
    w = gguf.GGUFWriter(tmp_path / "dense.gguf", "qwen3")
    for field in reader.fields.values():
        if field.name.startswith("qwen3moe.") and "expert" not in field.name and "feed_forward" not in field.name:
            w.add_key_value(field.name.replace("qwen3moe", "qwen3"), field.parts[field.data[0]][0].item(), field.types[0])
    w.add_tokenizer_model("no_vocab")
    for name, x in tensors.items():
        if "gate_inp" not in name:
            w.add_tensor(name.replace("_exps", ""), x[0] if "_exps" in name else x)
    w.add_feed_forward_length(64)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    with Model.load(experts, device="cpu") as a, Model.load(tmp_path / "dense.gguf", device="cpu") as b:
        assert_bitwise_equal(run(a, tokens), run(b, tokens), "one expert")


@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss"])
def test_gate_and_up_in_one_tensor(kind, tokens, tmp_path):
    """ffn_gate_up_exps: the rows of gate, then those of up; of gpt-oss their biases as well."""
    tensors = {}
    apart = write_moe_model(tmp_path / "apart.gguf", kind, tensors=tensors)
    reader, w = gguf.GGUFReader(apart), gguf.GGUFWriter(tmp_path / "fused.gguf", kind)
    for field in reader.fields.values():
        if field.name.startswith(f"{kind}."):
            w.add_key_value(field.name, field.parts[field.data[0]][0].item(), field.types[0])
    w.add_tokenizer_model("no_vocab")
    for name, x in tensors.items():
        if "up_exps" in name:
            continue
        fused = "gate_exps" in name
        w.add_tensor(name.replace("gate_exps", "gate_up_exps"), np.concatenate([x, tensors[name.replace("gate", "up")]], axis=1)
                     if fused else x)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    with Model.load(apart, device="cpu") as a, Model.load(tmp_path / "fused.gguf", device="cpu") as b:
        for no_fuse in (), "all":
            assert_bitwise_equal(run(b, tokens, no_fuse=no_fuse), run(a, tokens), f"fused gate and up of {kind}")


@pytest.mark.parametrize("types", [("F32",), ("Q8_0", "Q4_1")], ids="-".join)
@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss"])
def test_scales_of_experts(kind, types, tokens, tmp_path):
    """A factor for each matrix, before the bias: by powers of two, weights that are so much smaller give the same bits."""
    tensors, scaled, scales = {}, {}, np.exp2([0, -3, 2, -1, 1, -2]).astype(np.float32)
    plain = write_moe_model(tmp_path / "plain.gguf", kind, types, tensors=tensors)
    for name, x in tensors.items():
        if name.endswith("_exps.weight"):
            tensors[name], scaled[name.replace("weight", "scale")] = x / scales[:, None, None], scales
    with_scales = write_moe_model(tmp_path / "scaled.gguf", kind, types, tensors=tensors, more=scaled)
    without = write_moe_model(tmp_path / "without.gguf", kind, types, tensors=tensors)
    with Model.load(plain, device="cpu") as a, Model.load(with_scales, device="cpu") as b, Model.load(without, device="cpu") as c:
        expected = run(a, tokens)
        assert not np.array_equal(run(c, tokens), expected)
        for settings in {}, dict(no_fuse="all"), dict(n_ubatch=1):
            assert_bitwise_equal(run(b, tokens, **settings), expected, f"{kind} with scales, {settings}")
        with b.new_context(n_ctx=64) as context:
            assert [node.op for node in context.program(5, 1).nodes].count("scale_id") == len(scaled)
    scaled["blk.1.ffn_up_exps.scale"] = scales[:5]
    with pytest.raises(UserError,
                       match=r"tensor blk.1.ffn_up_exps.scale has shape \[5\], expected \[6\]: \S+.expert_count is 6$"):
        Model.load(write_moe_model(tmp_path / "short.gguf", kind, types, tensors=tensors, more=scaled), device="cpu")


def test_scales_of_heads(tokens, tmp_path):
    """One for all heads of k_b and v_b."""
    tensors, names = {}, ("blk.0.attn_k_b", "blk.1.attn_v_b")
    plain = write_moe_model(tmp_path / "plain.gguf", "deepseek2-mla", tensors=tensors)
    tensors |= {f"{name}.weight": tensors[f"{name}.weight"] * 4 for name in names}
    scaled = write_moe_model(tmp_path / "scaled.gguf", "deepseek2-mla", tensors=tensors,
                             more={f"{name}.scale": np.float32([0.25]) for name in names})
    with Model.load(plain, device="cpu") as a, Model.load(scaled, device="cpu") as b:
        assert_bitwise_equal(run(b, tokens), run(a, tokens), "scales of heads")


@pytest.mark.parametrize("yarn", [None, (40.0, 64, 0.0707), (4.0, 64, 0)], ids=["plain", "yarn", "yarn without log_mul"])
def test_absorbed_attention_is_that_of_heads(yarn, tokens, tmp_path):
    """k_b and v_b are kv_b apart, k_b transposed; in float32 the logits are close."""
    tensors = {}
    heads = write_moe_model(tmp_path / "heads.gguf", "deepseek2", tensors=tensors, yarn=yarn, q_lora=48)
    for i in range(2):
        kv = tensors[f"blk.{i}.attn_kv_b.weight"].reshape(4, 64, 64)
        tensors[f"blk.{i}.attn_k_b.weight"] = np.ascontiguousarray(kv[:, :32].transpose(0, 2, 1))
        tensors[f"blk.{i}.attn_v_b.weight"] = np.ascontiguousarray(kv[:, 32:])
    latent = write_moe_model(tmp_path / "latent.gguf", "deepseek2", tensors=tensors, yarn=yarn, q_lora=48, absorbed=True)
    with Model.load(heads, device="cpu") as a, Model.load(latent, device="cpu") as b:
        x, y = (run(model, tokens, type_k="f32", type_v="f32") for model in (a, b))
        assert a.architecture.scale == b.architecture.scale and not b.architecture.new_memory(8, 1, "f16", "f16").v[0].shape[1]
    assert x.std() > 0.1 and np.abs(x - y).max() < 2e-5


@pytest.mark.parametrize("yarn, magnitude, scale", [
    (None, 1, 1), ((40.0, 64, 0.0707), 1, (1 + 0.0707 / 0.1 * 0.1 * np.log(40))**2),
    ((40.0, 64, 0.1), 1, (1 + 0.1 * np.log(40))**2),
    ((4.0, 64, 0), 1 + 0.1 * np.log(4), (1 + 0.1 * np.log(4))**2)])
def test_yarn_of_deepseek2(yarn, magnitude, scale, tmp_path):
    """With a log multiplier rotated channels keep their magnitude and the attention's scale takes it up;
    without one both have it."""
    path = write_moe_model(tmp_path / "m.gguf", "deepseek2-mla", yarn=yarn)
    model = Deepseek2(GGUFFile.open(path), PlacementOptions(("cpu",)), {"cpu": CPUBackend()})
    table = model.new_rope_tables(4)["full", "cpu"]
    cos, sin = np.moveaxis(model.backends["cpu"].data(table), 2, 0)
    assert np.allclose(np.hypot(cos, sin), magnitude, rtol=1e-6)
    assert model.scale == pytest.approx(scale / 64**0.5, rel=1e-6)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_cuda_launches_them(kind, tmp_path):
    """Every node is bound, to addresses in memory that is there; the routing is one kernel, or several."""
    pytest.importorskip("numba_cuda")
    from recording_target import RecordingBackend
    path, routing = write_moe_model(tmp_path / "m.gguf", kind, ("Q8_0", "F16")), {}
    with Model(GGUFFile.open(path), RecordingBackend()) as model:
        for no_fuse in ("add_rms_norm_topk_moe",), ("all",):
            with model.new_context(n_ctx=32, no_fuse=no_fuse) as context:
                context.decode([1, 2, 3])
                launched = {launch.name.split("[")[0] for launch in model.backend.stream.take()}
                routing[no_fuse] = launched & {"topk_moe", "top_k", "take_columns", "weighted_sum", "weighted_sum_biased"}
    summed = "weighted_sum_biased" if kind == "gpt-oss" else "weighted_sum"
    assert routing == {("add_rms_norm_topk_moe",): {"topk_moe", summed}, ("all",): {"top_k", "take_columns", "weighted_sum"}}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_cuda_routes_a_token_in_one_launch(kind, tmp_path):
    """With the norm before it and the router's product, but for experts in groups."""
    pytest.importorskip("numba_cuda")
    from recording_target import RecordingBackend
    with Model(GGUFFile.open(write_moe_model(tmp_path / "m.gguf", kind, ("Q8_0", "F16"))),
               RecordingBackend()) as model, model.new_context(n_ctx=32) as context:
        context.decode([1])
        names = Counter(launch.name.split("[")[0] for launch in model.backend.stream.take())
        experts = model.architecture.experts
        n = sum(il >= experts.n_dense for il in range(model.architecture.hp.n_layer))
        assert (names["add_rms_norm_topk_moe"], names["topk_moe"]) == ((0, n) if experts.n_group > 1 else (n, 0))


@pytest.mark.parametrize("n_expert, n_used", [(513, 8), (64, 33), (512, 32)])
def test_cuda_takes_so_many_experts(n_expert, n_used, tmp_path):
    """Of more columns the model is refused when it is loaded, of more used experts routing is not fused; the CPU takes both."""
    pytest.importorskip("numba_cuda")
    from recording_target import RecordingBackend
    path = write_moe_model(tmp_path / "m.gguf", "qwen3moe", ("Q8_0",), n_expert=n_expert, n_used=n_used, n_ff_exp=32)
    if n_expert <= 512:
        with Model(GGUFFile.open(path), RecordingBackend()) as model, model.new_context(n_ctx=32) as context:
            context.decode([1, 2, 3])
            assert any(node.op == "topk_moe" for node in context.program(3, 1).nodes) is (n_used <= 32)
    else:
        with pytest.raises(UserError,
                           match="^ffn_moe_probs-0: cuda:0: soft_max: n_cols is 513, allowed: 1..512; the device cpu takes "
                                 "more$"):
            Model(GGUFFile.open(path), RecordingBackend())
    with Model.load(path, device="cpu") as model, model.new_context(n_ctx=32) as context:
        assert np.isfinite(context.decode([1, 2, 3])).all()


@pytest.mark.parametrize("kind, settings", [("deepseek2", {}), ("deepseek2-mla", {}), ("gpt-oss", {}),
                                            ("glm4moe", dict(n_layer=3, keys={"nextn_predict_layers": ("uint32", 1)}))])
def test_info_knows_the_cache(kind, settings, tmp_path):
    file = GGUFFile.open(write_moe_model(tmp_path / "m.gguf", kind, **settings))
    with Model(file, CPUBackend()) as model, model.new_context(n_ctx=64, type_k="f16", type_v="q8_0") as context:
        assert memory_bytes(file, 64, "f16", "q8_0") == ({"KV cache, 64 positions, f16 and q8_0": context.memory.n_bytes}, None)


def test_sections_of_glm4moe(tmp_path):
    """Pairs of the fourth section do not turn; without one all do."""
    for sections, turning in (([2, 2, 2, 2], [1] * 6 + [0] * 2), ([1, 1, 1, 1], [1, 1, 1, 0] * 2), ([4, 2, 2, 0], [1] * 8),
                              ([0, 0, 0, 0], [1] * 8)):
        path = write_moe_model(tmp_path / "m.gguf", "glm4moe", keys={"rope.dimension_sections": ("array", sections)})
        model = Glm4MoE(GGUFFile.open(path), PlacementOptions(("cpu",)), {"cpu": CPUBackend()})
        sin = model.backends["cpu"].data(model.new_rope_tables(3)["full", "cpu"])[2, :, 1]
        assert ((sin != 0) == turning).all()


def test_nextn_blocks_are_left_alone(tokens, tmp_path):
    """They count as blocks, their tensors are neither asked for nor loaded."""
    tensors = {}
    plain = write_moe_model(tmp_path / "plain.gguf", "glm4moe", tensors=tensors)
    with_nextn = write_moe_model(tmp_path / "nextn.gguf", "glm4moe", tensors=tensors, n_layer=3,
                                 keys={"nextn_predict_layers": ("uint32", 1)})
    with Model.load(plain, device="cpu") as a, Model.load(with_nextn, device="cpu") as b:
        assert_bitwise_equal(run(b, tokens), run(a, tokens), "nextn")
        assert not [key for key in b.architecture.w.loaded if key[0].startswith("blk.2.")]


def write_nextn(path, without=(), **shapes):
    """glm4moe of two layers and a NextN block of own tensors, which have the given shapes.
    eh_proj ignores the half behind the embedding's."""
    shapes = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "embed_tokens": (70, 64), "shared_head_norm": (64,),
              "shared_head_head": (70, 64), **shapes}
    rng = np.random.default_rng(5)
    more = {f"blk.2.nextn.{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
            if name not in without}
    more.get("blk.2.nextn.eh_proj.weight", np.empty((0, 0)))[:, 64:] = 0
    return write_moe_model(path, "glm4moe", ("Q8_0", "F16"), n_layer=3, keys={"nextn_predict_layers": ("uint32", 1)}, more=more)


OPTIONAL = "embed_tokens", "shared_head_norm", "shared_head_head"


@pytest.mark.parametrize("without", [(), OPTIONAL], ids=["all", "optional ones missing"])
def test_nextn_blocks_on_request(without, tokens, tmp_path):
    """Their tensors are on the device, and make a graph; the model computes what it does without them."""
    path = write_nextn(tmp_path / "m.gguf", without)
    with Model.load(path, device="cpu") as plain, Model.load(path, device="cpu", nextn=True) as model:
        assert_bitwise_equal(run(model, tokens), run(plain, tokens), "nextn")
        more = {key[0] for key in model.architecture.w.loaded} - {key[0] for key in plain.architecture.w.loaded}
        assert more == {name for name in model.file.tensors if "blk.2." in name}
        assert len(model.architecture.new_memory(8, 1, "f16", "f16").k) == 2
        memory, pos = model.architecture.new_memory(8, 1, "f16", "f16", n_block=3), np.arange(3, dtype=np.int32)
        program = Program(model.architecture.build_nextn(memory, model.architecture.new_rope_tables(8), 3, 2),
                          Arenas({"cpu": model.backend}))
        logits = lambda ids, hidden: program.run({"tokens": ids, "hidden": np.full((3, 64), hidden, np.float32), "pos": pos,
                                                  "out_ids": pos,
                                                  **memory.values(np.zeros(3, np.int32), pos, 3)})[0]
        found = logits(tokens[:3], 1)
        assert found.shape == (3, 70) and np.isfinite(found).all() and found.std() > 0
        assert_bitwise_equal(logits(tokens[:3], 2), found, "the half that is ignored")
        assert (logits(tokens[3:6], 1) != found).any(axis=1).all()


@pytest.mark.parametrize("wrong, message", [
    *((dict(without=(name,)), f"tensor blk.2.nextn.{name}.weight is missing$") for name in ("eh_proj", "enorm", "hnorm")),
    (dict(eh_proj=(64, 64)),
     r"tensor blk.2.nextn.eh_proj.weight has shape \[64, 64\], expected \[64, 128\]: glm4moe.embedding_length is 64$"),
    (dict(hnorm=(65,)), r"tensor blk.2.nextn.hnorm.weight has shape \[65\], expected \[64\]: glm4moe.embedding_length is 64$"),
    *(({name: (64, 64)},
       rf"tensor blk.2.nextn.{name}.weight has shape \[64, 64\], expected \[70, 64\]: glm4moe.embedding_length is 64$")
      for name in ("embed_tokens", "shared_head_head"))],
    ids=str)
def test_nextn_blocks_that_cannot_be_used(wrong, message, tmp_path):
    path = write_nextn(tmp_path / "m.gguf", **wrong)
    with Model.load(path, device="cpu"), pytest.raises(UserError, match=message):
        Model.load(path, device="cpu", nextn=True)


@pytest.mark.parametrize("kind, settings, message", [
    ("glm4moe", {}, r"nextn: the model has no block that predicts tokens further on \(mtp\): glm4moe.nextn_predict_layers is 0 "
                    r"or missing$"),
    ("bailingmoe2", dict(n_layer=3, keys={"nextn_predict_layers": ("uint32", 1)}),
     "nextn: bailingmoe2 is not supported, allowed: qwen3next, qwen35, qwen35moe, deepseek2, glm4moe$")])
def test_models_without_nextn_blocks(kind, settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Model.load(write_moe_model(tmp_path / "m.gguf", kind, **settings), device="cpu", nextn=True)


def test_a_router_of_nan_chooses_experts_all_the_same(tokens, tmp_path):
    tensors = {}
    write_moe_model(tmp_path / "m.gguf", "qwen3moe", tensors=tensors)
    tensors["blk.0.ffn_gate_inp.weight"][:] = np.nan
    with Model.load(write_moe_model(tmp_path / "nan.gguf", "qwen3moe", tensors=tensors), device="cpu") as model:
        assert np.isnan(run(model, tokens[:5])).all()


@pytest.mark.parametrize("kind, settings, message", [
    ("qwen3moe", dict(n_expert=4, n_used=5), "qwen3moe.expert_used_count is 5, must be 1 to 4: qwen3moe.expert_count is 4$"),
    ("qwen3moe", dict(n_used=0), "qwen3moe.expert_used_count is 0, must be 1 to 6: qwen3moe.expert_count is 6$"),
    ("bailingmoe2", dict(groups=(3, 1)),
     "bailingmoe2.expert_group_count is 3, must be a number of equal groups of two or more of the 8 experts$"),
    ("bailingmoe2", dict(groups=(4, 4)), "bailingmoe2.expert_group_used_count is 4, must be 1 to 3, fewer than the 4 groups$"),
    ("bailingmoe2", dict(groups=(8, 1)),
     "bailingmoe2.expert_group_count is 8, must be a number of equal groups of two or more of the 8 experts$"),
    ("deepseek2", dict(gating=4),
     r"deepseek2.expert_gating_func is 4, must be one of 1 \(softmax\), 2 \(sigmoid\), 3 \(softmax of the chosen\)$"),
    ("glm4moe", dict(gating=1), "tensor blk.1.exp_probs_b.bias is missing"),
    ("gpt-oss", dict(window=0), "gpt-oss.attention.sliding_window is 0, must be 1 to 2147483647$"),
    ("glm4moe", dict(n_layer=3, keys={"nextn_predict_layers": ("uint32", 3)}),
     "glm4moe.nextn_predict_layers is 3, must be 0 to 2: glm4moe.block_count is 3$"),
    ("glm4moe", dict(n_layer=3, keys={"nextn_predict_layers": ("uint32", 4)}),
     "glm4moe.nextn_predict_layers is 4, must be 0 to 2: glm4moe.block_count is 3$"),
])
def test_models_that_cannot_be_used(kind, settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Model.load(write_moe_model(tmp_path / "m.gguf", kind, **settings), device="cpu")


@pytest.mark.parametrize("kind, n_ff, layer, message", [
    ("qwen3moe", 0, 0, "qwen3moe.feed_forward_length, 0, at least the 2 experts used"),
    ("glm4moe", 1, 1, "glm4moe.feed_forward_length, 1, at least the 2 experts used")])
def test_experts_of_width_0(kind, n_ff, layer, message, tmp_path):
    """In the first layer that has experts."""
    tensors = {}
    write_moe_model(tmp_path / "m.gguf", kind, tensors=tensors)
    message = f"m.gguf: layer {layer} has experts of width 0: {kind}.expert_feed_forward_length must be positive, or {message}$"
    with pytest.raises(UserError, match=message):
        Model.load(write_moe_model(tmp_path / "m.gguf", kind, tensors=tensors, n_ff=n_ff, n_ff_exp=0), device="cpu")


@pytest.mark.parametrize("n_expert, n_used, groups", [
    (8, 1, (0, 0)), (12, 12, (0, 0)), (60, 4, (0, 0)), (160, 6, (8, 3)), (257, 8, (0, 0)), (512, 32, (16, 4))])
def test_counts_of_experts(n_expert, n_used, groups, tokens, tmp_path):
    path = write_moe_model(tmp_path / "m.gguf", "bailingmoe2", ("Q8_0",), n_expert=n_expert, n_used=n_used, groups=groups,
                           n_ff_exp=32, gating=SIGMOID)
    with Model.load(path, device="cpu") as model:
        expected = run(model, tokens[:40])
        assert np.isfinite(expected).all()
        for n_ubatch in 1, 9:
            assert_bitwise_equal(run(model, tokens[:40], n_ubatch=n_ubatch), expected, f"{n_expert} experts, n_ubatch={n_ubatch}")
