"""One rank of the test harness: a process that runs case after case and leaves no trace
of one in the next.

Owns the worker's side of `tests.harness`: the messages over the pipe, the process group
of a case, and the list of process-wide state that is put back after it. A case goes
through three stages, each started by the parent once *all* ranks have reported the one
before:

    case -> loaded     the function's module is imported
    go -> connected    process group
    run -> returned    the function; only this counts in the case's time limit
    clean -> ready     process group destroyed, global state put back

A rank that raises says so and waits for the parent's word to leave; a failed pool is
never used again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import logging
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
import torch.distributed as dist
import torch.nn.modules.module as module_hooks
from torch._guards import detect_fake_mode
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

# SIGUSR1 is taken: Lightning requeues SLURM jobs with it.
STACK_SIGNAL = signal.SIGUSR2

STORE_HOST = "127.0.0.1"
# Objects that are made before young garbage is looked for: tests make many that live,
# and Python's 700 cost 15 %.
YOUNG_OBJECTS = 200_000
# Seconds for the connections of a case, which no case can be blamed for.
CONNECT_LIMIT = 300.0


@dataclass(frozen=True)
class Case:
    """What a rank needs to run one case.

    Args:
        call: pickled ``(fn, args, kwargs)``.
        environ: the whole environment of the case.
        cwd: working directory.
        store_port: port of the parent's TCPStore.
        collective_timeout: seconds after which a collective of the default group gives
            up.
    """

    call: bytes
    environ: dict[str, str]
    cwd: str
    store_port: int
    collective_timeout: float


class ProcessState:
    """Process-wide state as it was before the first case, to be put back after each."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._cwd = os.getcwd()
        self._sys_path = list(sys.path)
        self._argv = list(sys.argv)
        self._excepthook = sys.excepthook
        self._warning_filters = list(warnings.filters)
        self._signals = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        }
        self._matmul_precision = torch.get_float32_matmul_precision()
        self._root_logger = (logging.root.level, list(logging.root.handlers))
        self._hook_tables = [
            table
            for name, table in vars(module_hooks).items()
            if name.startswith("_global_")
            and isinstance(table, dict)
            and "hook" in name
        ]
        self._mesh_caches: list[Any] = []

    def before_case(self) -> None:
        """Numbers drawn without a seed are the same whatever ran before. And what is
        alive now is set aside, so that collecting a case's garbage does not walk over
        all of torch."""
        seed_all()
        self._mesh_caches += [
            obj
            for obj in gc.get_objects()
            if type(obj) is functools._lru_cache_wrapper
            and (getattr(obj, "__module__", None) or "").startswith("torch.distributed")
        ]
        gc.freeze()

    def restore(self) -> None:
        """Put everything back. Raises what `destroy_process_group` raises."""
        # It goes on until its process ends.
        if "smp_core.watch.rank_watch" in sys.modules:
            sys.modules["smp_core.watch.rank_watch"].stop_watching()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._forget_meshes()
        os.environ.clear()
        os.environ.update(self._environ)
        os.chdir(self._cwd)
        sys.path[:] = self._sys_path
        sys.argv[:] = self._argv
        sys.excepthook = self._excepthook
        warnings.filters[:] = self._warning_filters  # type: ignore[index]
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        self._restore_logging()
        self._restore_torch()
        gc.collect()

    def _forget_meshes(self) -> None:
        # DTensor remembers its plans by mesh, and meshes of the same shape are equal
        # across cases, while the process groups inside the remembered ones are gone or
        # mean other ranks now (errors and hangs, seen with torch 2.13).
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor._redistribute import (
                clear_redistribute_planner_cache,
            )
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()
            # Its planners hold meshes, and these their groups with all of gloo's
            # threads.
            clear_redistribute_planner_cache()
        for cache in self._mesh_caches:
            cache.cache_clear()

    def _restore_logging(self) -> None:
        level, handlers = self._root_logger
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers
        smp = logging.getLogger("smp")
        smp.setLevel(logging.NOTSET)
        smp.handlers.clear()
        smp.filters.clear()
        smp.propagate = True
        logging.disable(logging.NOTSET)

    def _restore_torch(self) -> None:
        for table in self._hook_tables:
            table.clear()
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(self._matmul_precision)
        torch.autograd.set_detect_anomaly(False)
        torch.set_num_threads(1)
        torch.clear_autocast_cache()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def seed_all() -> None:
    """Give every generator that tests draw from a seed: 0 on all ranks."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the parent dies; elsewhere than on Linux
    the closed pipe has to do."""
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def explain_asserts() -> None:
    """Let `assert` in test modules print the values it compared, as it does in the
    pytest process itself.

    Pytest offers no public way to install its import hook in a process of one's own.
    """
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def remember_shapes() -> None:
    """Let DTensor find out once in a process what shape an operator returns.

    It runs each operator without values for that, anew for each mesh and case, which
    is a third of what a small case with an optimizer takes; shapes depend on neither.
    """
    # torch remembers them by mesh alone, and has no public way to do it otherwise.
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    find = propagator._propagate_tensor_meta_non_cached
    found: dict[Any, Any] = {}

    def remembered(schema: Any) -> Any:
        # Under a trace sizes may be symbols.
        if detect_fake_mode() is not None:
            return find(schema)
        named = tuple(sorted(schema.kwargs_schema.items()))
        shapes = _shapes_in((schema.args_schema, named))
        key = (schema.op, shapes, torch.get_default_dtype())
        try:
            known = key in found
        except TypeError:  # a value without a hash
            return find(schema)
        if not known:
            found[key] = find(schema)
        return found[key]

    propagator._propagate_tensor_meta_non_cached = remembered


def _shapes_in(value: Any) -> Any:
    """What operators' results have their shapes from."""
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_shapes_in, value))
    if isinstance(value, DTensorSpec):
        return value.tensor_meta
    return type(value), value  # 1, 1.0 and True are equal


class GlooOnOneDevice(dist.ProcessGroupGloo):
    """A gloo group on the one device of its process.

    By default each group has a device of its own, whose thread wakes up a hundred times
    a second: with a mesh of ten groups on each of a dozen ranks that is a tenth of a
    core for nothing.
    """

    _devices: ClassVar[list[Any]] = []

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any
    ) -> None:
        # torch >= 2.14 also says enable_reconfigure, False in every group of ours.
        if not self._devices:
            self._devices.append(self.create_default_device())
        options = self._Options()  # type: ignore[attr-defined]
        options._devices = self._devices
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def _start_group(case: Case) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=CONNECT_LIMIT)
    store = dist.TCPStore(STORE_HOST, case.store_port, None, False, timeout)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=case.collective_timeout))


def _run_case(conn: Connection, case: Case, state: ProcessState) -> None:
    fn: Callable[..., Any]
    fn, args, kwargs = pickle.loads(case.call)
    conn.send(("loaded", None))
    _expect(conn, "go")
    state.before_case()
    os.environ.clear()
    os.environ.update(case.environ)
    os.chdir(case.cwd)
    _start_group(case)
    # A rank that raises or dies at once must not take its peers down while they still
    # connect: what they say then is about the harness and not about the case.
    conn.send(("connected", None))
    _expect(conn, "run")
    # Plain pickle puts tensors into the message; the pickler of multiprocessing would
    # pass file descriptors.
    result = pickle.dumps(fn(*args, **kwargs))
    _flush()
    conn.send(("returned", result))
    _expect(conn, "clean")


def _expect(conn: Connection, word: str) -> None:
    said = conn.recv()
    if said != (word, None):
        raise RuntimeError(f"the harness said {said!r} where {word!r} was due")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def serve(descriptor: int, stack_file: str) -> None:
    """Run cases that arrive over the pipe until it closes.

    Args:
        descriptor: file descriptor of this rank's end of the pipe.
        stack_file: where every thread's stack is written when the parent sends
            `STACK_SIGNAL`.
    """
    die_with_parent()
    conn = Connection(descriptor)
    stacks = Path(stack_file).open("w")  # noqa: SIM115 - faulthandler keeps the descriptor for good
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    gc.set_threshold(YOUNG_OBJECTS)
    # torch offers no option for it
    distributed_c10d.ProcessGroupGloo = GlooOnOneDevice  # type: ignore[misc]
    state = ProcessState()
    conn.send(("ready", None))
    while True:
        try:
            word, case = conn.recv()
        except EOFError:
            return
        assert word == "case"
        try:
            # A call of its own, so that nothing of the case is alive in a local
            # variable when the garbage is collected.
            _run_case(conn, case, state)
            state.restore()
        except (EOFError, BrokenPipeError):
            os._exit(1)
        except BaseException:
            _flush()
            conn.send(("raised", traceback.format_exc()))
            # The other ranks may be about to report something better than "connection
            # closed by peer": hold the sockets open until the parent has heard them.
            # Whatever comes, the word or the end of the pipe, leave.
            conn.poll(None)
            os._exit(1)
        conn.send(("ready", None))
