"""Memory and threads of hosts with several nodes. Policies are the process's, so they are set in processes of their own."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_py.kernels import numa, threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are known on Linux alone")


def two_nodes(folder: Path) -> Path:
    """A system whose CPUs are dealt out to two nodes, a third one has none that is ours."""
    mine = sorted(os.sched_getaffinity(0))
    for node, cpus in enumerate([mine[::2], mine[1::2], [4000]]):
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}" / "cpulist").write_text(",".join(map(str, cpus)) + "\n")
    return folder


def test_lists_of_cpus():
    assert numa.numbers("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11] and numa.numbers("\n") == []


def test_nodes_are_those_whose_cpus_the_process_may_use(tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    found = numa.nodes(two_nodes(tmp_path))
    assert found == {node: cpus for node, cpus in enumerate([mine[::2], mine[1::2]]) if cpus}
    assert sorted(cpu for cpus in numa.nodes().values() for cpu in cpus) == mine


def test_cpus_of_all_nodes_in_turns():
    assert numa.in_turns({0: [0, 1, 2], 1: [8, 9], 4: [16]}) == [0, 8, 16, 1, 9, 2]


def run(code: str, *args) -> str:
    found = subprocess.run([sys.executable, "-c", f"import ctypes, os\nfrom pathlib import Path\n{code}", *map(str, args)],
                           text=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert not found.returncode, found.stderr
    return found.stdout.strip()


def test_distribute_pins_threads_and_interleaves_memory(tmp_path):
    """The policy is that of the process's first touches (get_mempolicy); each worker has one CPU, of the nodes in turns."""
    number = {238: 239, 237: 236}[numa.SET_MEMPOLICY[os.uname().machine]]
    out = run(f"""
from ggml_py.kernels import numa, threads
numa.use("distribute", Path("/sys/devices/system/node"))
policy = ctypes.c_int(-1)
assert ctypes.CDLL(None).syscall({number}, ctypes.byref(policy), None, 0, None, 0) == 0
threads.workers.start()
print(policy.value, [sorted(os.sched_getaffinity(t)) for t in (0, *(each.native_id for each in threads.workers.started))])
""")
    order = numa.in_turns(numa.nodes())
    assert out == f"{numa.INTERLEAVE} {[[cpu] for cpu in order[:threads.MOST]]}"


def test_isolate_stays_on_one_node(tmp_path):
    out = run("""
import sys
from ggml_py.kernels import numa, threads
of_nodes = numa.nodes(Path(sys.argv[1])).values()
numa.use("isolate", Path(sys.argv[1]))
node = threads.workers.cpus
print(node in of_nodes, threads.get_num_threads() == len(node), os.sched_getaffinity(0) == {node[0]})
""", two_nodes(tmp_path))
    assert out == "True True True"


def test_what_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="^numa: must be distribute, isolate, numactl, got 'both'$"):
        numa.use("both")
    with pytest.raises(RuntimeError, match="^numa: distribute needs Linux, and its folder "):
        numa.use("distribute", tmp_path / "none")
    numa.use("numactl", tmp_path / "none")  # nothing to do
