"""Prints a host's open ports, and whether a worker behind the last of them answers through TLS.

Usage: tls_client.py HOST [CERTIFICATE], a file with a key and its certificate, without which it has none.
"""

from __future__ import annotations

import socket
import ssl
import sys

from pipetrain.cluster.sockets import PREFACE


def main() -> None:
    """The program."""
    host, *certificate = sys.argv[1:]
    found = []
    for port in range(1024, 2**16):
        with socket.socket() as each:
            if not each.connect_ex((host, port)):
                found.append(port)
    print(*found)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(*certificate)
    try:
        with context.wrap_socket(socket.create_connection((host, found[-1]), 10.0)) as each:
            each.sendall(PREFACE)
            print("answered" if each.recv(9) else "refused")
    except (ssl.SSLError, ConnectionError):
        print("refused")


if __name__ == "__main__":
    main()
