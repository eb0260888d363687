"""Letters without a GPU: the order of posts and takes, where boxes lie, what GPUs launch, and the same bits in any order of
devices."""
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.letters import HostOffice
from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph import columns
from ggml_py.graph.graph import Node
from ggml_py.graph.letters import Post, Take
from ggml_py.testing import assert_bitwise_equal
from tiny_models import write_model
from tiny_moe_models import write_moe_model

TOKENS = [[3, 1, 4, 1, 5], [6], [5], [3, 5, 3, 5, 8], [8], [9]]
WRITERS = {"wide": lambda path: write_model(path, "qwen2", ("Q8_0", "Q4_1", "F32"), n_embd=128, n_head=8, n_head_kv=4, n_ff=288,
                                            n_vocab=160, qkv_bias=True),
           "qwen3moe": lambda path: write_moe_model(path, "qwen3moe", ("Q8_0",))}
PLACEMENTS = [("wide", "layer", 2), ("wide", "layer", 3), ("wide", "column", 2), ("wide", "column", 4), ("qwen3moe", "column", 2),
              ("qwen3moe", "layer", 3)]


@pytest.fixture(autouse=True)
def all_is_cut(monkeypatch):
    """Small matrices, too."""
    monkeypatch.setattr(columns, "WORTH_A_GATHER", 0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: write(folder / f"{kind}.gguf") for kind, write in WRITERS.items()}


def on_several(path, split_mode: str, n: int) -> Model:
    devices = tuple(f"cpu:{i}" if i else "cpu" for i in range(n))
    return Model(GGUFFile.open(path), *(CPUBackend(device=device) for device in devices),
                 placement=PlacementOptions(devices, split_mode=split_mode))


def decoded(context) -> np.ndarray:
    return np.concatenate([context.decode(tokens, logits="all") for tokens in TOKENS])


@pytest.mark.parametrize("kind, split_mode, n", PLACEMENTS)
def test_any_order_of_devices_gives_the_bits_of_one(paths, monkeypatch, kind, split_mode, n):
    """Whichever device runs on, item by item, as far as it can."""
    random = Random(n)

    def visit(office, program, run_node, see):
        steps = office.bound(program).steps
        office.enter(program)
        queues = {device: list(reversed(queue)) for device, queue in program.mail.queues().items()}
        while any(queues.values()):
            queue = random.choice([queue for queue in queues.values() if queue])
            i, item = queue[-1]
            if isinstance(item, Node):
                run_node(i, item, steps[item])
            elif not steps[item]():
                continue
            queue.pop()
        office.ended = dict.fromkeys(office.devices, office.step)
        office.step += 1
    with Model.load(paths[kind], device="cpu") as model, model.new_context(n_ctx=64) as context:
        expected = decoded(context)
    with on_several(paths[kind], split_mode, n) as model:
        monkeypatch.setattr(HostOffice, "visit", visit)
        for _ in range(3):
            with model.new_context(n_ctx=64) as context:
                assert_bitwise_equal(decoded(context), expected, f"{kind} {split_mode} {n}")
                assert context.office.step > 4


@pytest.mark.parametrize("kind, split_mode, n", PLACEMENTS)
def test_boxes_share_memory_only_behind_the_last_reader(paths, kind, split_mode, n):
    """By the edges of what happens before what, followed one by one; and each box is taken once, behind its posts."""
    with on_several(paths[kind], split_mode, n) as model, model.new_context(n_ctx=64) as context:
        mail = context.program(1, 1).mail
        order = [item for *_, item in mail.order]
        behind = {item: set() for item in order}  # what happens behind an item, at once
        for queue in mail.queues().values():
            items = [item for _, item in queue]
            for item, following in pairwise(items):
                behind[item].add(following)
        for item in order:
            if isinstance(item, Take):
                assert all(order.index(post) < order.index(item) for post in item.box.posts)
                for post in item.box.posts:
                    behind[post].add(item)

        def reached(item) -> set:
            found, todo = set(), [item]
            while todo:
                for each in behind[todo.pop()] - found:
                    found.add(each)
                    todo.append(each)
            return found
        boxes = [*mail.boxes.values()]
        assert sorted(map(id, boxes)) == sorted(id(item.box) for item in order if isinstance(item, Take))
        n_shared = 0
        for a, b in combinations(boxes, 2):
            if a.device == b.device and a.offset < b.offset + b.size and b.offset < a.offset + a.size:
                first, second = sorted((a, b), key=lambda box: min(order.index(post) for post in box.posts))
                readers = [item for item in order if first.tensor in {x.root for x in _read(item)}]
                assert all(post in reached(reader) for reader in readers for post in second.posts), (first.tensor, second.tensor)
                n_shared += 1
        assert (n_shared > 4) == (split_mode == "column")


def _read(item):
    return [item.source] if isinstance(item, Post) else item.src if isinstance(item, Node) else []


# What GPUs would launch

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from ggml_py.kernels.cuda.letters import ENDED, FLAGS
from recorded_gpus import recorded_gpus


def launched(context, gpus, *tokens):
    for gpu in gpus:
        gpu.stream.take()
    context.decode(list(tokens), logits="argmax")
    return [gpu.stream.take() for gpu in gpus]


@pytest.mark.parametrize("split_mode, n", [("layer", 2), ("column", 2), ("column", 4)])
def test_what_is_launched(paths, split_mode, n):
    """The first step goes by copies; from the second on there is a graph a device, no copy, and one launch a gather."""
    gpus = recorded_gpus(n)
    options = PlacementOptions(tuple(gpu.device for gpu in gpus), split_mode=split_mode)
    with Model(GGUFFile.open(paths["wide"]), *gpus, placement=options) as model, model.new_context(n_ctx=64) as context:
        launched(context, gpus, 1)
        n_copied = [len(gpu.peers) for gpu in gpus]
        assert sum(n_copied) > 0 and context.office.step == 1
        meetings = 0
        for step in range(2, 5):
            for gpu, launches in zip(gpus, launched(context, gpus, step)):
                names = [launch.name for launch in launches]
                assert names[-1] == "turn" and "concat_heads" not in names
                mail = context.program(1, 1, "argmax").mail
                letters = [launch for launch in launches if launch.name.startswith("letter")]
                items = [item for _, item in mail.queues()[gpu.device]]
                joined = sum(isinstance(a, Post) and isinstance(b, Take) for a, b in pairwise(items))
                assert len(letters) == sum(isinstance(item, (Post, Take)) for item in items) - joined
            assert [len(gpu.peers) for gpu in gpus] == n_copied and context.office.step == step
            assert meetings in (0, gpus[0].n_meetings)
            meetings = gpus[0].n_meetings
        assert meetings > 0
        context.decode([1, 2, 3], logits="argmax")  # another shape goes by copies first
        assert sum(len(gpu.peers) for gpu in gpus) > sum(n_copied)
        for _ in range(2):  # the program is new where the arena grew
            launched(context, gpus, 1)
        assert gpus[0].n_meetings == 2 * meetings


def test_flags_are_nobody_elses(paths):
    """Of all letters to a device each part has a flag of its own, behind the header."""
    gpus = recorded_gpus(4)
    written = {gpu.device: [] for gpu in gpus}
    for gpu in gpus:
        upload = gpu.upload

        def remember(array, upload=upload):
            if array.dtype == np.int64 and array.ndim == 2 and array.shape[1] == 4:
                tables.append(array)
            return upload(array)
        gpu.upload = remember
    tables: list[np.ndarray] = []
    options = PlacementOptions(tuple(gpu.device for gpu in gpus), split_mode="column")
    with Model(GGUFFile.open(paths["wide"]), *gpus, placement=options) as model, model.new_context(n_ctx=64) as context:
        for step in range(2):
            launched(context, gpus, step)
        starts = {gpu.device: context.office.mailbox(gpu.device) for gpu in gpus}
        for table in tables:
            for flag in table[:, 2][table[:, 2] > 0].tolist():
                device = max((start, device) for device, start in starts.items() if start <= flag)[1]
                written[device].append((flag - starts[device]) // 4)
    for flags in written.values():
        assert len(flags) > 10 and len(set(flags)) == len(flags) and min(flags) >= FLAGS > ENDED


@pytest.mark.parametrize("kind", WRITERS)
def test_both_devices_gather_at_one_time(paths, kind):
    """By copies: what one gives and what the other gives cross together, so neither computes while the other waits for what it
    gives later. But for the embedding, which one has, and the logits, which one wants."""
    options = PlacementOptions(("cuda:0", "cuda:1"), split_mode="column")
    with (Model(GGUFFile.open(paths[kind]), *recorded_gpus(2), placement=options) as model,
          model.new_context(n_ctx=64) as context):
        program = context.program(4, 4)
        crossing = [[copy for copy in run.copies if copy.results[0] not in program.mirrors] for run in program.runs]
        ways = [{copy.device for copy in copies} for copies in crossing if copies]
        assert len(ways) > 6 and all(each == {"cuda:0", "cuda:1"} for each in ways[1:-1]), ways
