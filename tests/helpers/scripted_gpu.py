"""A GPU whose clock is scripted, for the timing of bench/: kernels do nothing, and take the microseconds that a test says.
As a plugin of pytest (`-p scripted_gpu`, with bench/ on the path) it stands in the place of this machine's GPU."""
from types import SimpleNamespace

import pytest
from gpu_timing import GPU, DryRun


class Driver:
    """Graphs as lists of what was launched while capturing; a replay takes 5 us, and each of its launches what it says."""
    CUresult, CUstreamCaptureMode = SimpleNamespace(CUDA_SUCCESS=0), SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=0)

    def __init__(self):
        self.now_us, self.capture, self.graphs = 0.0, None, []

    def cuStreamBeginCapture(self, stream, mode):
        self.capture = []
        return (0,)

    def cuStreamEndCapture(self, stream):
        self.graphs.append(self.capture)
        self.capture = None
        return 0, self.graphs[-1]

    def cuGraphLaunch(self, graph, stream):
        self.now_us += 5 + sum(graph)
        return (0,)

    def cuEventRecord(self, event, stream):
        event.append(self.now_us)
        return (0,)

    cuGraphInstantiate = staticmethod(lambda graph, flags: (0, graph))
    cuEventCreate = staticmethod(lambda flags: (0, []))
    cuEventElapsedTime = staticmethod(lambda start, end: (0, (end[0] - start[0]) / 1e3))
    cuGraphDestroy = cuGraphExecDestroy = cuEventDestroy = cuEventSynchronize = staticmethod(lambda handle: (0,))


class Target:
    """Checks arguments of launches, as a GPU's target would before it compiles. A kernel takes `us` in a graph; those launched
    outside of a capture are in `loaded`."""
    cc, warpgroups, halves, n_multiprocessors, shared_limit = (9, 0), True, True, 132, 227 << 10
    device = SimpleNamespace(name="scripted")

    def __init__(self, driver: Driver, us: float):
        self.driver, self.us, self.loaded = driver, us, []

    def launch(self, kernel, grid, block, args, shared=0):
        from ggml_py.kernels.cuda.launch import arguments
        assert arguments(kernel, args) is not None
        return lambda stream: (self.loaded.append(kernel.name) if self.driver.capture is None
                               else self.driver.capture.append(self.us))


class ScriptedGPU(DryRun, GPU):
    """A GPU but for its memory, which is all at the address 0."""

    def __init__(self, us: float = 7.0):
        self.driver, self.stream = Driver(), SimpleNamespace(handle=1, sync=lambda: None)
        super().__init__(Target(self.driver, us), l2_bytes=1 << 24)
        self.buffers, self.outputs = [], []

    def run(self, launch) -> None:
        launch(self.stream)


# The plugin

def pytest_addoption(parser):
    parser.addoption("--scripted-us", type=float, default=7.0, help="what a kernel takes")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    import cuda_cases
    import gpu_timing
    from cuda import bindings
    from ggml_py.backends import cuda
    from ggml_py.kernels.cuda import launch
    gpu = ScriptedGPU(config.getoption("scripted_us"))
    bindings.driver, gpu_timing.GPU, launch.Target = gpu.driver, lambda: gpu, lambda: gpu.target
    cuda.unavailable, cuda.driver_release, cuda_cases.compile_all = lambda ordinal: None, lambda: "580.1", lambda cases: None
