"""What another user of this machine gets from a worker: what a file has that only the worker's user may read.

Usage: another_user.py USER ADDRESS FILE, by root, as the user with this number. Prints the file, or why it does not.
"""

from __future__ import annotations

import codecs
import os
import sys

import tensorflow as tf

from pipetrain.cluster.connection import connect


def main() -> None:
    """The program: Python may lie in a folder that only root may enter, so it becomes the user when it has started."""
    user, address, path = sys.argv[1:]
    codecs.lookup("ascii")  # while its module may be loaded
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    try:
        with open(path, encoding="ascii"):
            pass
    except PermissionError:
        print("may not read it itself")
    try:
        (device,) = connect([address], timeout_s=2.0)
    except ConnectionError as error:
        print(error)
        return
    with tf.device(device):
        print("read:", tf.io.read_file(path).numpy().decode())
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's own end would wait


if __name__ == "__main__":
    main()
