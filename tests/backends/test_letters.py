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
from ggml_py.graph.letters import MOST_BYTES, Post, Take
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


@pytest.mark.parametrize("split_mode", ["layer", "column"])
def test_what_a_step_that_failed_has_posted_is_taken_by_none(paths, monkeypatch, split_mode):
    """Wherever it fails: the next step takes its own letters."""
    with Model.load(paths["wide"], device="cpu") as model, model.new_context(n_ctx=64) as context:
        expected = [context.decode([token]) for token in (1, 2, 3)][-1]
    with on_several(paths["wide"], split_mode, 2) as model:
        run, ran = CPUBackend.run, []

        def fails(backend, steps):
            ran.append(backend)
            if len(ran) == n:
                raise KeyboardInterrupt
            return run(backend, steps)
        monkeypatch.setattr(CPUBackend, "run", fails)
        n = 0
        with model.new_context(n_ctx=64) as context:
            for token in 1, 2:
                ran.clear()
                context.decode([token])
            n_nodes = len(ran)
        assert n_nodes > 20
        for fail_at in range(1, n_nodes, 3):
            with model.new_context(n_ctx=64) as context:
                n = 0
                for token in 1, 2:
                    context.decode([token])
                step, n = context.office.step, fail_at
                ran.clear()
                with pytest.raises(KeyboardInterrupt):
                    context.decode([9])
                assert_bitwise_equal(context.decode([3]), expected, f"failed at {fail_at}")
                assert context.office.step == step + 2


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
from ggml_py.kernels.cuda import letters
from ggml_py.kernels.cuda.letters import ROW, SEALED
from recorded_gpus import recorded_gpus


def launched(context, gpus, *tokens):
    for gpu in gpus:
        gpu.stream.take()
    context.decode(list(tokens), logits="argmax")
    return [gpu.stream.take() for gpu in gpus]


@pytest.mark.parametrize("kind, split_mode, n", [("wide", "layer", 2), ("wide", "column", 2), ("wide", "column", 4),
                                                 ("qwen3moe", "column", 2)])
def test_what_is_launched(paths, kind, split_mode, n):
    """The first step goes by copies; from the second on there is a graph a device, no copy, and one launch a gather, with the
    weighted sum before it or with `quantize` behind it."""
    gpus = recorded_gpus(n)
    options = PlacementOptions(tuple(gpu.device for gpu in gpus), split_mode=split_mode)
    with Model(GGUFFile.open(paths[kind]), *gpus, placement=options) as model, model.new_context(n_ctx=64) as context:
        launched(context, gpus, 1)
        n_copied = [len(gpu.peers) for gpu in gpus]
        assert sum(n_copied) > 0 and context.office.step == 1
        meetings = 0
        for step in range(2, 5):
            for gpu, launches in zip(gpus, launched(context, gpus, step)):
                names = [launch.name.partition("[")[0] for launch in launches]
                assert names[-1] == "turn" and "concat_heads" not in names
                mail = context.program(1, 1, "argmax").mail
                letters = [launch for launch in launches if launch.name.startswith("letter")]
                items = [item for _, item in mail.queues()[gpu.device]]
                of_columns = split_mode == "column"
                joined = [isinstance(a, Post) and isinstance(b, Take) for a, b in pairwise(items)]
                assert len(letters) == sum(isinstance(item, (Post, Take)) for item in items) - sum(joined)
                for op, pairs in ("quantize", zip(joined, items[2:])), ("weighted_sum", zip(joined[1:], items)):
                    n_joined = sum(is_joined and isinstance(node, Node) and node.op == op for is_joined, node in pairs)
                    assert (n_joined > 0) == (of_columns and (op == "quantize" or kind == "qwen3moe"))
                    assert names.count(f"letter_{op}") == n_joined
                    n_nodes = sum(isinstance(item, Node) and item.op == op for item in items)
                    assert names.count(op) == n_nodes - n_joined
            assert [len(gpu.peers) for gpu in gpus] == n_copied and context.office.step == step
            assert meetings in (0, gpus[0].n_meetings)
            meetings = gpus[0].n_meetings
        assert meetings > 0
        context.decode([1, 2, 3], logits="argmax")  # another shape goes by copies first
        assert sum(len(gpu.peers) for gpu in gpus) > sum(n_copied)
        for _ in range(2):  # the program is new where the arena grew
            launched(context, gpus, 1)
        assert gpus[0].n_meetings == 2 * meetings


def test_sealed_words_lie_in_the_receivers_mailbox(paths):
    """Those of a box twice as far in it as the box lies in the arena; the number tells it from all others of its device."""
    gpus, tables = recorded_gpus(4), []
    for gpu in gpus:
        def remember(array, upload=gpu.upload):
            if array.dtype == np.int64 and array.ndim == 2 and array.shape[1] == ROW:
                tables.append(array[1:])
            return upload(array)
        gpu.upload = remember
    options = PlacementOptions(tuple(gpu.device for gpu in gpus), split_mode="column")
    with Model(GGUFFile.open(paths["wide"]), *gpus, placement=options) as model, model.new_context(n_ctx=64) as context:
        for step in range(2):
            launched(context, gpus, step)
        office, mail = context.office, context.program(1, 1, "argmax").mail
        rows = np.concatenate(tables[-4:]).tolist()
        posts = [post for gpu in gpus for _, post in mail.queues()[gpu.device] if isinstance(post, Post)]
        expected = [(office.mailbox(box.device) + SEALED + 2 * (box.offset + post.place(box, column)[0]), box)
                    for post in posts for box, column in post.to]
        assert [address for address, *_ in rows] == [address for address, _ in expected]
        numbers = {(box, number) for (_, box), (_, _, number, _) in zip(expected, rows)}
        assert len(numbers) == len({(box.device, number) for box, number in numbers}) == len(mail.boxes) > 30
        assert min(number for _, number in numbers) == 1


def test_steps_are_numbered_anew_before_seals_come_again(paths, monkeypatch):
    """What is sealed is wiped out then."""
    monkeypatch.setattr(letters, "MOST_STEPS", 5)
    gpus = recorded_gpus(2)
    options = PlacementOptions(tuple(gpu.device for gpu in gpus), split_mode="column")
    with Model(GGUFFile.open(paths["wide"]), *gpus, placement=options) as model, model.new_context(n_ctx=64) as context:
        launched(context, gpus, 1)
        steps, wiped = [], []
        for gpu in gpus:
            def remember(buffer, offset, array, write=gpu.write):
                if offset == SEALED and array.nbytes == 2 * MOST_BYTES and not array.any():
                    wiped.append(context.office.step)
                return write(buffer, offset, array)
            gpu.write = remember
        for step in range(8):
            launched(context, gpus, step)
            steps.append(context.office.step)
        assert steps == [2, 3, 4, 5, 6, 2, 3, 4] and wiped == [6, 6]


def test_a_visit_that_fails_has_its_number(paths):
    """On GPUs, too, nobody takes what was posted in it: all are told another step then."""
    gpus = recorded_gpus(2)
    options = PlacementOptions(tuple(gpu.device for gpu in gpus), split_mode="column")
    with Model(GGUFFile.open(paths["wide"]), *gpus, placement=options) as model, model.new_context(n_ctx=64) as context:
        for step in range(3):
            launched(context, gpus, step)
        program, office = context.program(1, 1, "argmax"), context.office
        assert office.step == 3 and office.last is program

        def fail(i, node, step):
            raise KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            office.visit(program, fail, lambda item: None)
        assert office.step == 4 and office.last is None


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
