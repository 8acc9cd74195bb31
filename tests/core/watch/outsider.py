"""A stranger on the same machine, who finds what the processes of a run listen on and
makes use of it.

    python -m tests.core.watch.outsider FOLDER PID ...

Ports that were open when it began (the process groups') are left alone. To each that is
opened later it makes connections, and keeps them: some say nothing, some half a line,
the others what a board or a store of torch would understand. In FOLDER it writes
``ready`` when it looks, ``met`` when it has made MANY connections, with the addresses,
and goes on until there is ``enough``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from pathlib import Path

import psutil

MANY = 300
SAID = [
    b"",
    b"half a line",
    b"\n",
    b"\x00" * 4096,
    b"[" * 4096 + b"\n",
    b'["set", "lost", "bye"]\n' * 100,
    b'["set", "beat/1", "not json"]\n["delete", ["beat/0", "beat/1"]]\n',
    # a client of torch's TCPStore: VALIDATE with its number, SET, DELETE_KEY
    b"\x00"
    + (0x3C85F7CE).to_bytes(4, "little")
    + b"\x01"
    + (4).to_bytes(8, "little")
    + b"lost",
]


def listening(pids: list[int]) -> set[tuple[str, int]]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found |= {
                each.laddr
                for each in psutil.Process(pid).net_connections("tcp")
                if each.status == "LISTEN"
            }
    return {(address.ip, address.port) for address in found}


def main() -> None:
    folder, pids = Path(sys.argv[1]), [int(pid) for pid in sys.argv[2:]]
    before = listening(pids)
    held: list[socket.socket] = []
    met: set[tuple[str, int]] = set()
    (folder / "ready").touch()
    while not (folder / "enough").exists():
        for address, port in listening(pids) - before:
            met.add((address, port))
            for number in range(100):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(
                        ("127.0.0.1", port), timeout=1
                    )
                    connection.settimeout(0.0)
                    held = [*held, connection][-500:]
                    connection.sendall(SAID[number % len(SAID)])
        if len(held) >= MANY and not (folder / "met").exists():
            (folder / "met.new").write_text(json.dumps(sorted(met)))
            (folder / "met.new").rename(folder / "met")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
