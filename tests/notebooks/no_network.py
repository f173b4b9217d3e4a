"""As sitecustomize of a bare runtime: what would leave the machine is refused, and noted down."""

import os
import socket
import sys
from pathlib import Path

HERE = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", b"localhost", b"127.0.0.1", socket.gethostname()}
POSITION = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}


def refuse(event, arguments):
    if event in POSITION:
        address = arguments[POSITION[event]]
        host = address[0] if isinstance(address, tuple) else address
        # a socket of the machine itself is addressed by a path
        if host not in HERE and not str(host).startswith("/"):
            with Path(os.environ["REFUSED_LOG"]).open("a") as log:
                log.write(f"{event} {address}\n")
            raise OSError(f"no network in this runtime: {event} {address}")


sys.addaudithook(refuse)
