"""Standard error without the lines about compilation: they depend on what the disk cache has, and on the machine's speed."""


def without_notice(err: str) -> str:
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("compiling kernels for ", "compiled: ")))
