#!/usr/bin/env python3
"""A cluster of N nodes with a slow network between them, on one Linux machine.

    netlab.py run [--nodes 2] [--ranks 2] [--rate 200mbit] [--delay 0ms] [--torchrun]
                  [--json FILE] [--timeout S] [--log-dir DIR] -- python script.py ARGS...
    netlab.py clean          # remove what a killed netlab left behind

Every node is a network namespace with one NIC (`eth0`, a veth pair into a bridge that
lives in a namespace of its own, so nothing is reachable from or to the machine's real
network). Each NIC is limited to --rate in both directions (tc tbf at both ends of the
veth pair). Processes of one node talk through that namespace's `lo`, which is not
limited, even when they use the address of eth0: the kernel routes local addresses
through lo. --delay adds a one-way latency to every frame (a delay line in user space,
see delayline.c: works on kernels without sch_netem).

The command is started --ranks times in every node with RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, NODE_RANK, NNODES, MASTER_ADDR, MASTER_PORT and
GLOO_SOCKET_IFNAME=eth0 set (or once per node under torchrun with --torchrun). Nodes
share the machine's hostname and boot id, so SMP_RANKS_PER_NODE is set too and says
which ranks form a node. When a rank fails, or at the timeout, all are killed. The lab
is always removed. Exit status: the first failing rank's, 124 at the timeout.

What crossed node boundaries is read from the NIC's counters; `counters()` gives the
same numbers from inside a rank. Needs root, iproute2, and gcc for --delay. Python
standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX = "netlab"  # every namespace of ours is called netlab-<pid>-<node>
SUBNET = "10.233.0"
LOG_TAIL = 25


def counters(device: str = "eth0") -> dict[str, int]:
    """Read byte and packet counters of a device in the calling process's network
    namespace.

    Raises:
        LookupError: there is no such device here.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == device:
            values = [int(word) for word in rest.split()]
            columns = {
                "rx_bytes": 0,
                "rx_packets": 1,
                "rx_drop": 3,
                "tx_bytes": 8,
                "tx_packets": 9,
                "tx_drop": 11,
            }
            return {counter: values[column] for counter, column in columns.items()}
    raise LookupError(f"no device {device}")


def parse_rate(text: str) -> int:
    """Turn ``"200mbit"`` into bits per second; ``"0"`` means no limit."""
    match = re.fullmatch(r"([\d.]+)\s*([kmg]?)(bit|bps)?", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(
            f"rate {text!r}: write e.g. 200mbit, 1gbit, 0 for no limit"
        )
    return int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2]])


def parse_delay(text: str) -> int:
    """Turn ``"1ms"`` into microseconds; a bare number is in milliseconds."""
    match = re.fullmatch(r"([\d.]+)\s*(us|ms|s)?", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"delay {text!r}: write e.g. 500us, 1ms")
    return int(
        float(match[1]) * {"us": 1, "ms": 1000, "s": 10**6, None: 1000}[match[2]]
    )


def _sh(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Lab:
    """The namespaces, links and limits; a context manager that removes them whatever
    happens.

    Args:
        nodes: number of nodes.
        rate: bits per second of each NIC in each direction; 0: no limit.
        delay: one-way latency in microseconds.
        congestion_control: TCP's, inside the lab.

    Raises:
        RuntimeError: a command failed (not root, no iproute2, namespaces not allowed
            here); what was made is removed.
    """

    def __init__(
        self, nodes: int, rate: int, delay: int = 0, congestion_control: str = "cubic"
    ) -> None:
        self.nodes, self.rate, self.delay, self.congestion_control = (
            nodes,
            rate,
            delay,
            congestion_control,
        )
        self.tag = f"{PREFIX}-{os.getpid()}"
        self.switch = f"{self.tag}-sw"
        self._delay_line: subprocess.Popen[str] | None = None
        self._build = tempfile.TemporaryDirectory(prefix="netlab-")

    def namespace(self, node: int) -> str:
        return f"{self.tag}-{node}"

    @staticmethod
    def address(node: int) -> str:
        return f"{SUBNET}.{node + 1}"

    @staticmethod
    def mac(node: int) -> str:
        return f"02:00:00:00:00:{node + 1:02x}"

    def __enter__(self) -> Lab:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    def _up(self) -> None:
        switch = self.switch
        no_ipv6 = (
            "net.ipv6.conf.all.disable_ipv6=1",
            "net.ipv6.conf.default.disable_ipv6=1",
        )
        _sh("ip", "netns", "add", switch)
        _sh("ip", "netns", "exec", switch, "sysctl", "-qw", *no_ipv6)
        bridge = (
            "type",
            "bridge",
            "stp_state",
            "0",
            "forward_delay",
            "0",
            "mcast_snooping",
            "0",
        )
        _sh("ip", "-n", switch, "link", "add", "br0", *bridge)
        _sh("ip", "-n", switch, "link", "set", "br0", "up")
        if self.delay:
            self._delay_up()
        tcp = ("net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_no_metrics_save=1")
        for node in range(self.nodes):
            _sh("ip", "netns", "add", self.namespace(node))
            _sh(
                "ip",
                "netns",
                "exec",
                self.namespace(node),
                "sysctl",
                "-qw",
                *no_ipv6,
                *tcp,
            )
            self._connect(node)
            if self.rate:
                self._limit(node)
            if self.delay:
                self._redirect(node)

    def _connect(self, node: int) -> None:
        """Connect a node's network card to the bridge, with fixed tables: no learning
        and no ARP, so that no broadcast is counted."""
        switch, namespace, port = self.switch, self.namespace(node), f"p{node}"
        pair = ("type", "veth", "peer", "name", port, "netns", switch)
        _sh(
            "ip",
            "link",
            "add",
            "eth0",
            "netns",
            namespace,
            "address",
            self.mac(node),
            *pair,
        )
        _sh("ip", "-n", switch, "link", "set", port, "master", "br0")
        _sh("ip", "-n", switch, "link", "set", port, "up")
        _sh("ip", "-n", namespace, "link", "set", "lo", "up")
        _sh(
            "ip",
            "-n",
            namespace,
            "addr",
            "add",
            f"{self.address(node)}/24",
            "dev",
            "eth0",
        )
        _sh("ip", "-n", namespace, "link", "set", "eth0", "up")
        # By route: the sysctl refuses algorithms that the machine does not "allow".
        route = (
            f"{SUBNET}.0/24",
            "dev",
            "eth0",
            "src",
            self.address(node),
            "congctl",
            self.congestion_control,
        )
        _sh("ip", "-n", namespace, "route", "replace", *route)
        _sh(
            "bridge",
            "-n",
            switch,
            "link",
            "set",
            "dev",
            port,
            "learning",
            "off",
            "flood",
            "off",
        )
        _sh(
            "bridge",
            "-n",
            switch,
            "fdb",
            "replace",
            self.mac(node),
            "dev",
            port,
            "master",
            "static",
        )
        for other in range(self.nodes):
            if other != node:
                neighbour = (
                    self.address(other),
                    "lladdr",
                    self.mac(other),
                    "dev",
                    "eth0",
                    "nud",
                    "permanent",
                )
                _sh("ip", "-n", namespace, "neigh", "add", *neighbour)

    def _limit(self, node: int) -> None:
        # 128 KiB: room for a whole 64 KiB GSO frame, so that tbf does not have to cut
        # frames; also 1 ms of a 1 Gbit/s link. The queue never fills: TCP keeps little
        # in it.
        burst = str(max(131072, self.rate // 8000))
        tbf = (
            "root",
            "tbf",
            "rate",
            f"{self.rate}bit",
            "burst",
            burst,
            "limit",
            str(8 << 20),
        )
        _sh("tc", "-n", self.namespace(node), "qdisc", "add", "dev", "eth0", *tbf)
        _sh("tc", "-n", self.switch, "qdisc", "add", "dev", f"p{node}", *tbf)

    def _redirect(self, node: int) -> None:
        """Send what leaves the node through the delay line before it reaches the
        bridge."""
        port = f"p{node}"
        everything = ("protocol", "all", "u32", "match", "u32", "0", "0")
        action = ("action", "mirred", "egress", "redirect", "dev", "dly")
        _sh(
            "tc",
            "-n",
            self.switch,
            "qdisc",
            "add",
            "dev",
            port,
            "handle",
            "ffff:",
            "ingress",
        )
        _sh(
            "tc",
            "-n",
            self.switch,
            "filter",
            "add",
            "dev",
            port,
            "parent",
            "ffff:",
            *everything,
            *action,
        )

    def _delay_up(self) -> None:
        program = Path(self._build.name, "delayline")
        _sh(
            "gcc",
            "-O2",
            "-o",
            str(program),
            str(Path(__file__).resolve().with_name("delayline.c")),
        )
        command = [
            "ip",
            "netns",
            "exec",
            self.switch,
            str(program),
            "dly",
            str(self.delay),
        ]
        self._delay_line = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._delay_line.stdout is not None
        if self._delay_line.stdout.readline().strip() != "ready":
            raise RuntimeError("the delay line did not start")
        _sh(
            "ip",
            "-n",
            self.switch,
            "link",
            "set",
            "dly",
            "txqueuelen",
            "10000",
            "master",
            "br0",
        )
        _sh("ip", "-n", self.switch, "link", "set", "dly", "up")
        _sh(
            "bridge",
            "-n",
            self.switch,
            "link",
            "set",
            "dev",
            "dly",
            "learning",
            "off",
            "flood",
            "off",
        )

    def _down(self) -> None:
        if self._delay_line:
            self._delay_line.kill()
            self._delay_line.wait()
        remove(self.tag)
        self._build.cleanup()

    def node_counters(self) -> list[dict[str, int]]:
        """Read for each node: eth0 bytes out and in, lo bytes, and the frames that the
        limiters dropped."""
        found = []
        for node in range(self.nodes):
            links = json.loads(
                _sh("ip", "-n", self.namespace(node), "-s", "-j", "link")
            )
            stats = {link["ifname"]: link["stats64"] for link in links}
            dropped = 0
            for namespace, device in (
                (self.namespace(node), "eth0"),
                (self.switch, f"p{node}"),
            ):
                for qdisc in json.loads(
                    _sh(
                        "tc",
                        "-n",
                        namespace,
                        "-s",
                        "-j",
                        "qdisc",
                        "show",
                        "dev",
                        device,
                    )
                ):
                    dropped += qdisc.get("drops", 0) if qdisc["kind"] == "tbf" else 0
            sent, received = (
                stats["eth0"][direction]["bytes"] for direction in ("tx", "rx")
            )
            inside = stats["lo"]["tx"]["bytes"]
            found.append(
                {
                    "tx_bytes": sent,
                    "rx_bytes": received,
                    "lo_bytes": inside,
                    "tbf_drops": dropped,
                }
            )
        return found


def remove(tag: str) -> None:
    """Kill what still runs inside the namespaces of one lab, and delete them."""
    listed = [
        line.split()[0]
        for line in _sh("ip", "netns", "list", check=False).splitlines()
        if line.strip()
    ]
    namespaces = [name for name in listed if name.startswith(f"{tag}-")]
    for namespace in namespaces:
        for pid in _sh("ip", "netns", "pids", namespace, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for namespace in namespaces:
        _sh("ip", "netns", "del", namespace, check=False)


def clean() -> None:
    """Remove the labs whose netlab process is gone."""
    for line in _sh("ip", "netns", "list").splitlines():
        match = re.fullmatch(rf"({PREFIX}-(\d+))-\w+", line.split()[0])
        if match and not Path(f"/proc/{match[2]}").exists():
            print("removing", line.split()[0], file=sys.stderr)
            remove(match[1])


@dataclass
class _Job:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None


class _Launch:
    """The command on every node. The first process writes to our stdout and stderr; the
    others write to ``log_dir`` (or nowhere), and the end of what they wrote is shown
    when they fail."""

    def __init__(
        self, lab: Lab, ranks: int, command: list[str], log_dir: Path | None, port: int
    ) -> None:
        self.lab, self.ranks, self.command, self.log_dir, self.port = (
            lab,
            ranks,
            command,
            log_dir,
            port,
        )
        self.jobs: list[_Job] = []
        if log_dir:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._base = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONUNBUFFERED": "1",
            "NNODES": str(lab.nodes),
            "MASTER_ADDR": lab.address(0),
            "MASTER_PORT": str(port),
            "SMP_RANKS_PER_NODE": str(ranks),
        }
        self._base.setdefault("OMP_NUM_THREADS", "1")

    def start_rank(self, node: int, local: int) -> None:
        rank = node * self.ranks + local
        environ = {
            **self._base,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.lab.nodes * self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "NODE_RANK": str(node),
        }
        self._start(node, f"rank{rank}", environ, self.command)

    def start_torchrun(self, node: int) -> None:
        is_python = Path(self.command[0]).name.startswith("python")
        launcher = [
            self.command[0] if is_python else sys.executable,
            "-m",
            "torch.distributed.run",
        ]
        layout = [
            f"--nnodes={self.lab.nodes}",
            f"--nproc-per-node={self.ranks}",
            f"--node-rank={node}",
        ]
        meeting = [f"--master-addr={self.lab.address(0)}", f"--master-port={self.port}"]
        arguments = self.command[1:] if is_python else self.command
        self._start(
            node, f"node{node}", self._base, [*launcher, *layout, *meeting, *arguments]
        )

    def _start(
        self, node: int, name: str, environ: dict[str, str], command: list[str]
    ) -> None:
        enter = ["ip", "netns", "exec", self.lab.namespace(node)]
        streams: dict[str, Any] = {}
        log = None
        with contextlib.ExitStack() as files:
            if self.jobs:
                log = self.log_dir / f"{name}.log" if self.log_dir else None
                out = files.enter_context(log.open("wb")) if log else subprocess.DEVNULL
                streams = {"stdout": out, "stderr": out}
            process = subprocess.Popen(
                [*enter, *command], env=environ, start_new_session=True, **streams
            )
        self.jobs.append(_Job(name, process, log))

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout if timeout else float("inf")
        waiting = list(self.jobs)
        while waiting:
            for job in list(waiting):
                status = job.process.poll()
                if status is None:
                    continue
                waiting.remove(job)
                if status:
                    print(
                        f"netlab: {job.name} ended with status {status}; stopping the others",
                        file=sys.stderr,
                    )
                    if job.log:
                        sys.stderr.write(
                            "\n".join(
                                job.log.read_text(errors="replace").splitlines()[
                                    -LOG_TAIL:
                                ]
                            )
                            + "\n"
                        )
                    return status
            if time.monotonic() > end:
                print(f"netlab: timeout after {timeout:g} s", file=sys.stderr)
                return 124
            time.sleep(0.02)
        return 0

    def kill(self) -> None:
        for job in self.jobs:
            if job.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGKILL)
        for job in self.jobs:
            job.process.wait()


def launch(
    lab: Lab,
    ranks: int,
    command: list[str],
    *,
    torchrun: bool = False,
    timeout: float = 0,
    log_dir: Path | None = None,
    port: int = 29500,
) -> int:
    """Run ``command`` with ``ranks`` processes on every node of ``lab`` and wait; kill
    the rest when one fails.

    Returns:
        0, the status of the first process that failed, or 124 after ``timeout`` seconds
            (0: no limit).
    """
    running = _Launch(lab, ranks, command, log_dir, port)
    try:
        for node in range(lab.nodes):
            if torchrun:
                running.start_torchrun(node)
            else:
                for local in range(ranks):
                    running.start_rank(node, local)
        return running.wait(timeout)
    finally:
        running.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="do", required=True)
    run = verbs.add_parser("run", help="run a command on every node")
    run.add_argument("--nodes", type=int, default=2)
    run.add_argument("--ranks", type=int, default=2, help="per node")
    run.add_argument(
        "--rate",
        type=parse_rate,
        default="200mbit",
        help="per node and direction; 0: no limit",
    )
    run.add_argument(
        "--delay", type=parse_delay, default="0ms", help="one way, e.g. 1ms"
    )
    run.add_argument(
        "--congestion-control", default="cubic", help="TCP's, inside the lab"
    )
    run.add_argument(
        "--torchrun",
        action="store_true",
        help="launch by torchrun instead of environment variables",
    )
    run.add_argument("--timeout", type=float, default=600, help="seconds; 0: none")
    run.add_argument("--log-dir", type=Path)
    run.add_argument(
        "--json", type=Path, help="write the counters of the whole run here"
    )
    run.add_argument("--quiet", action="store_true")
    run.add_argument("command", nargs=argparse.REMAINDER)
    verbs.add_parser("clean", help="remove what killed labs left behind")
    asked = parser.parse_args()
    if os.geteuid():
        parser.error("needs root")
    if asked.do == "clean":
        clean()
        return 0
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    if not command:
        parser.error("no command: write it behind --")
    command[0] = shutil.which(command[0]) or command[0]

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    # Two labs at a time would spoil each other's timings.
    with Path(tempfile.gettempdir(), "netlab.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clean()
        with Lab(asked.nodes, asked.rate, asked.delay, asked.congestion_control) as lab:
            before, began = lab.node_counters(), time.monotonic()
            status = launch(
                lab,
                asked.ranks,
                command,
                torchrun=asked.torchrun,
                timeout=asked.timeout,
                log_dir=asked.log_dir,
            )
            wall, after = time.monotonic() - began, lab.node_counters()
    nodes = [
        {key: end[key] - start[key] for key in start}
        for start, end in zip(before, after, strict=True)
    ]
    if asked.json:
        asked.json.write_text(
            json.dumps(
                {"status": status, "wall_s": wall, "nodes": nodes, "command": command}
            )
        )
    if not asked.quiet:
        for number, node in enumerate(nodes):
            print(
                f"netlab: node {number}: out {node['tx_bytes'] / 1e6:.2f} MB, in {node['rx_bytes'] / 1e6:.2f} MB, "
                f"inside (lo) {node['lo_bytes'] / 1e6:.2f} MB, tbf drops {node['tbf_drops']}",
                file=sys.stderr,
            )
        print(f"netlab: {wall:.2f} s, status {status}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
