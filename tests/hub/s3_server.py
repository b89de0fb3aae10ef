"""An S3 server on the loopback, in a process of its own: `s3_server.py` prints its port, and ends with its standard input."""

from __future__ import annotations

import sys

from moto.server import ThreadedMotoServer


def main() -> None:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
