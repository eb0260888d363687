"""What a record in bench/results says of its run, and how it is written."""
import json
import subprocess
import time

import checkout  # noqa: F401


def conditions(backend) -> dict:
    """Device, driver, versions and date."""
    from ggml_py.backends.cuda import driver_release
    from record_golden import numba_cuda, versions
    on_gpu = ({"driver": driver_release(), "cuda": backend.driver_version(), "numba.cuda": numba_cuda()}
              if backend.device.startswith("cuda") else {})
    return {"device": backend.name, **on_gpu, "versions": versions(), "date": time.strftime("%Y-%m-%d")}


def json_of(command: list[str], **given):
    """What a command prints, which is JSON; given: as of subprocess.run. RuntimeError with its messages if it fails."""
    done = subprocess.run(command, **given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def dump(record: dict, name: str, rows: list[dict]) -> str:
    """JSON of a record and, under `name`, its rows, a line for each."""
    lines = ",\n  ".join(map(json.dumps, rows))
    return f'{json.dumps(record, indent=1)[:-2]},\n "{name}": [\n  {lines}\n ]\n}}\n'
