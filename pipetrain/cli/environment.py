"""TensorFlow, started without its messages; ``pipetrain env``: what a bug report says of a machine and its software."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pipetrain.cli.arguments import Folded
from pipetrain.logs import quiet_stderr

PACKAGES = ("pipetrain", "tensorflow", "keras", "numpy", "keras-hub", "tensorflow-datasets", "matplotlib")
ABOUT = """Print versions, the processor, the devices that TensorFlow finds, and the cache of profiles.

Nothing in it is secret but what a folder's name may tell. Paste it into a bug report.
"""


def start_tensorflow(cpu_devices: int) -> None:
    """Import and start TensorFlow on its GPUs, or on this many logical CPU devices where it has none.

    TensorFlow greets on standard error before its log level counts (about oneDNN, about missing GPU drivers).
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_stderr():
        import tensorflow as tf

        from pipetrain.devices import set_cpu_devices

        if not tf.config.list_physical_devices("GPU"):
            set_cpu_devices(cpu_devices)
        tf.config.list_logical_devices()
    tf.get_logger().setLevel("ERROR")


def add(commands: Any) -> None:
    """Add the command to those there are."""
    command = commands.add_parser(
        "env", help="versions and devices, for bug reports", description=ABOUT, formatter_class=Folded
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print it."""
    rows = _rows()
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:{width}}  {value}" for name, value in rows))


def version() -> str:
    """That of the installed package; of sources that are not installed, ``unknown``."""
    try:
        return metadata.version("pipetrain")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _rows() -> list[tuple[str, str]]:
    start_tensorflow(1)
    import tensorflow as tf

    from pipetrain.compute.cores import cores
    from pipetrain.compute.processor import left_out
    from pipetrain.compute.profiling.limits import folder

    found = [("Python", f"{platform.python_version()} on {platform.platform()}")]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, version() if name == "pipetrain" else "not installed"))
    found.append(("processor", _processor()))
    found.append(("cores", f"{len(cores())} of {os.cpu_count()} for this process"))
    found.append(("oneDNN", left_out().replace("\n", " ") or "every kernel that this processor has is used"))
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(each).get("device_name", each.name) for each in gpus]
    found.append(("GPUs", ", ".join(map(str, details)) or "none"))
    cuda, cudnn = (tf.sysconfig.get_build_info().get(f"{name}_version", "none") for name in ("cuda", "cudnn"))
    found.append(("CUDA, cuDNN", f"built for {cuda}, {cudnn}"))
    found.append(("cache", str(folder())))
    return found


def _processor() -> str:
    """Its name, and the vector instructions that matter to TensorFlow's kernels."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    known = {key.strip(): value.strip() for key, value in fields.items()}
    flags = known.get("flags", "").split()
    vectors = [name for name in ("avx2", "fma", "avx512f", "avx512_vnni", "amx_bf16") if name in flags]
    return f"{known.get('model name', platform.machine())} ({', '.join(vectors) or 'no AVX2'})"
