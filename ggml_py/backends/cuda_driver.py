"""The driver of `transfers`: CUDA, by cuda-core."""
from __future__ import annotations


def checked(result: tuple) -> tuple:
    """What a function of cuda.bindings returned behind its status; RuntimeError unless that is success."""
    from cuda.bindings import driver
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA: {status.name}")
    return tuple(values)


class CUDADriver:
    """What transfers need of CUDA: streams, events, stream-ordered and page-locked memory are cuda-core's."""

    def __init__(self, ordinal: int):
        from cuda.bindings import driver
        from cuda.core import Device, LegacyPinnedMemoryResource
        self.ordinal = ordinal
        self._context = None
        self._driver, self._device, self._pinned = driver, Device, LegacyPinnedMemoryResource()

    def enter(self) -> None:
        self._device(self.ordinal).set_current()

    def is_capturing(self, stream) -> bool:
        capturing, = checked(self._driver.cuStreamIsCapturing(stream.handle))
        return capturing != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def memory_bytes(self) -> tuple[int, int]:
        """Free, and in all."""
        self.enter()
        free, total = checked(self._driver.cuMemGetInfo())
        return free, total

    def allocate(self, n_bytes: int, stream):
        try:
            # At least a byte: memory of 0 bytes would have the address of what has been freed
            return self._device(self.ordinal).allocate(max(n_bytes, 1), stream=stream)
        except Exception as error:  # cuda-core's, whose class is not public
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise MemoryError(f"cuda:{self.ordinal}: {n_bytes} bytes are not to be had") from error

    def stream(self):
        self.enter()
        return self._device(self.ordinal).create_stream()

    def pinned(self, n_bytes: int):
        return self._pinned.allocate(n_bytes)

    def lock_pages(self, address: int, n_bytes: int) -> None:
        """For all devices."""
        checked(self._driver.cuMemHostRegister(address, n_bytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE))

    def unlock_pages(self, address: int) -> None:
        """Leaves the current context as it is."""
        before, = self._driver.cuCtxGetCurrent()[1:]
        self.enter()
        try:
            checked(self._driver.cuMemHostUnregister(address))
        finally:
            checked(self._driver.cuCtxSetCurrent(before))

    def copy(self, to: int, source: int, n_bytes: int, stream, peer: CUDADriver | None = None) -> None:
        """Between devices the contexts are named: memory of pools cannot be told by its address everywhere.
        It needs no access of one device to the other."""
        if peer is None or peer.ordinal == self.ordinal:
            checked(self._driver.cuMemcpyAsync(to, source, n_bytes, stream.handle))
        else:
            checked(self._driver.cuMemcpyPeerAsync(to, self.context(), source, peer.context(), n_bytes, stream.handle))

    def reaches(self, other: CUDADriver) -> bool:
        """Whether this device accesses memory of the other one, which is opened to it; not where both are one."""
        if self.ordinal == other.ordinal or not self._device(self.ordinal).can_access_peer(other.ordinal):
            return False
        other.enter()
        peers = self._device(other.ordinal).memory_resource.peer_accessible_by
        if self.ordinal not in {int(getattr(peer, "device_id", peer)) for peer in peers}:
            self._device(other.ordinal).memory_resource.peer_accessible_by = [*peers, self.ordinal]
        return True

    def context(self):
        """The device's primary context; leaves the current one as it is."""
        if self._context is None:
            before, = self._driver.cuCtxGetCurrent()[1:]
            self.enter()
            self._context, = checked(self._driver.cuCtxGetCurrent())
            checked(self._driver.cuCtxSetCurrent(before))
        return self._context
