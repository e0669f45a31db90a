# SPDX-License-Identifier: Apache-2.0
"""The servers of a serving benchmark: started together, measured in turn."""

import contextlib
import os
import re
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from vllm_dflash.config import parse_ddtree_option
from vllm_dflash.demo.fetch import Log
from vllm_dflash.demo.pair import ModelPair
from vllm_dflash.demo.serve import ServerSpec, VLLMServer, free_port
from vllm_dflash.errors import option_error

# Engine, front end and what they start; and the load generator.
MIN_SERVER_CORES, CLIENT_CORES = 3, 2
# What `support.py` logs at start-up, without what depends on where it runs.
_TREES = re.compile(r"depth \d+, budget \d+ nodes.*?candidates a depth")
SERVERS = ("none", "chain", "tree-fixed", "tree-auto")


@dataclass(frozen=True)
class ServingOptions:
    """What all servers of a run have in common."""

    pair: ModelPair
    is_cpu: bool
    depth: int
    budget: int | None
    max_model_len: int
    max_num_seqs: int
    kv_cache_gib: float
    extra_args: tuple[str, ...] = ()


def fixed_nodes(name: str) -> int | None:
    """Return N of a server ``tree-N``, None for any other name."""
    match = re.fullmatch(r"tree-([1-9]\d*)", name)
    return None if match is None else int(match[1])


def is_fixed_tree(name: str) -> bool:
    """Whether a server's tree has as many nodes under every load."""
    return name == "tree-fixed" or fixed_nodes(name) is not None


def table_order(name: str) -> tuple[int, int, str]:
    """Return what servers are sorted by: none, chain, tree-N by N, the other trees."""
    nodes = fixed_nodes(name)
    if nodes is not None:
        return SERVERS.index("tree-fixed"), nodes, name
    if name in SERVERS:
        place = SERVERS.index(name)
        # After the trees of a given size, which share its place.
        return (place, sys.maxsize, name) if name == "tree-fixed" else (place, 0, name)
    return len(SERVERS), 0, name


def speculative_config(name: str, options: ServingOptions) -> dict[str, Any] | None:
    """Return the ``--speculative-config`` of a server.

    Raises:
        ValueError: there is no such server, or its tree can't have that size.
    """
    nodes = fixed_nodes(name)
    if name not in SERVERS and nodes is None:
        raise option_error(
            f"there is no server {name!r}",
            f"Allowed are {', '.join(SERVERS)}, and tree-N, a fixed tree of N nodes",
            f"--servers {','.join(SERVERS)}",
        )
    if name == "none":
        return None
    config: dict[str, Any] = {
        "method": "dflash",
        "model": options.pair.draft,
        "num_speculative_tokens": options.depth,
    }
    if name == "chain":
        return {**config, "ddtree": False}
    if nodes is not None:
        tree: dict[str, Any] = {"budget": nodes, "budget_per_batch_size": "fixed"}
    else:
        tree = {"budget_per_batch_size": name.removeprefix("tree-")}
        if options.budget is not None:
            tree["budget"] = options.budget
    # A wrong size is named before any server starts.
    parse_ddtree_option(
        tree,
        num_speculative_tokens=options.depth,
        block_size=None,
        is_cpu=options.is_cpu,
    )
    return {**config, "ddtree": tree}


def server_spec(name: str, port: int, options: ServingOptions) -> ServerSpec:
    """Return how a server of ``SERVERS``, or ``tree-N``, is started."""
    # Repeats ask the same prompts again; a cached prefix would make them cheaper.
    args = ["--no-enable-prefix-caching", "--max-num-seqs", str(options.max_num_seqs)]
    if not options.is_cpu:
        # Servers that share a GPU can't each take most of its memory, nor find out by
        # profiling what is free while the others start.
        args += ["--gpu-memory-utilization", "0.1"]
        args += ["--kv-cache-memory-bytes", str(int(options.kv_cache_gib * 2**30))]
        args += ["--max-num-batched-tokens", "8192"]
    return ServerSpec(
        label=name,
        pair=options.pair,
        is_cpu=options.is_cpu,
        port=port,
        speculative_config=speculative_config(name, options),
        max_model_len=options.max_model_len,
        extra_args=[*args, *options.extra_args],
    )


def core_sets(num_servers: int, cores: Collection[int]) -> list[set[int]] | None:
    """Return cores of their own for each server; None if they are too few.

    A small model waits for its host. Which cores a process happens to share, and with
    whom, then decides between servers, and for as long as they run.
    """
    share = (len(cores) - CLIENT_CORES) // num_servers
    if share < MIN_SERVER_CORES:
        return None
    # In turn, so that no server is nearer to the GPU, or to the client, than another.
    ordered = sorted(cores, reverse=True)[: share * num_servers]
    return [set(ordered[i::num_servers]) for i in range(num_servers)]


def move_to(process: psutil.Process, cores: set[int]) -> None:
    """Let all threads of a process run on these cores only, and those they start."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            # One may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


class ServerWave:
    """Servers by name, all running; a context manager that ends them."""

    def __init__(
        self, names: list[str], options: ServingOptions, log_dir: Path, log: Log
    ):
        ports: set[int] = set()
        while len(ports) < len(names):
            ports.add(free_port())
        self.servers = {
            name: VLLMServer(
                server_spec(name, port, options),
                log_dir / f"{name}.log",
                lambda text, name=name: log(f"{name}: {text}"),
            )
            for name, port in zip(names, sorted(ports), strict=True)
        }
        self._stack = ExitStack()
        self._log = log
        self._cores: list[set[int]] | None = None

    def __enter__(self) -> Self:
        servers = list(self.servers.values())
        for server in servers:
            self._stack.callback(server.stop)
        available = os.sched_getaffinity(0)
        cores = self._cores = core_sets(len(servers), available)
        self._log(
            f"cores: {len(available)}, shared by all"
            if cores is None
            else f"cores: {len(cores[0])} of {len(available)} for each server"
        )

        def start(index: int) -> None:
            # Of this thread; the server inherits it.
            os.sched_setaffinity(0, available if cores is None else cores[index])
            servers[index].__enter__()

        # Starting is CPU work that the servers do side by side.
        with ThreadPoolExecutor(len(servers)) as pool:
            try:
                list(pool.map(start, range(len(servers))))
            except BaseException:
                # Ends the waiting of the other threads too, which the pool waits for.
                self._stack.close()
                raise
        return self

    def rotate(self, turn: int) -> None:
        """Move every server on to the cores of its `turn`-th neighbour.

        Cores are not equally fast: some share a physical core, or a cache, with another
        customer's. After as many turns as there are servers each has been everywhere.
        """
        if self._cores is None:
            return
        for index, server in enumerate(self.servers.values()):
            cores = self._cores[(index + turn) % len(self._cores)]
            for process in server.processes():
                move_to(process, cores)

    def trees(self) -> dict[str, str]:
        """Return the line in which each server with trees describes them."""
        found = {}
        for name, server in self.servers.items():
            text = server.log_path.read_text(encoding="utf-8", errors="replace")
            match = _TREES.search(text)
            if match is not None:
                found[name] = match[0]
        return found

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
