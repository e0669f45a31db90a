# SPDX-License-Identifier: Apache-2.0
"""The small kernels compile for GPUs that are not here.

A fresh process without the interpreter calls every public operation on CPU tensors;
instead of a launch, the kernel is compiled for the architecture with the types,
constants and alignments that the launcher gave it. Run this file with an architecture
for the report alone: ``python test_aot_small_kernels.py 90``.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ARCHS = os.environ.get("VLLM_DFLASH_TEST_ARCHS", "80,90").split(",")
"""All of interest: 80,86,89,90,100,120."""

SMALLEST_SHARED_MEMORY_BYTES = 48 * 1024
# ptxas for sm_120 parks a few registers of the 255-node build outside its loop, and for
# sm_100 two of the scan with noise of 32 fp32 candidates.
MAX_SPILL_BYTES = 24
# Their time is the number of warp reductions: these must be one instruction each.
REDUCTION_BOUND = {"_build_tree_kernel", "_walk_tree_kernel", "_topk_merge_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_spills(arch, monkeypatch, capsys):
    import vllm_dflash_kernels

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    root = str(Path(vllm_dflash_kernels.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", root, prepend=os.pathsep)
    with tempfile.TemporaryDirectory() as cache:
        monkeypatch.setenv("TRITON_CACHE_DIR", cache)
        process = subprocess.run(
            [sys.executable, __file__, arch],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert process.returncode == 0, process.stderr
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    with capsys.disabled():
        lines = [", ".join(f"{k} {v}" for k, v in r.items()) for r in reports]
        sys.stdout.write("".join(f"\nsm_{arch} {line}" for line in lines))
    compiled = {report["kernel"] for report in reports}
    assert compiled > REDUCTION_BOUND and len(compiled) == 8
    for report in reports:
        assert report["shared_bytes"] <= SMALLEST_SHARED_MEMORY_BYTES
        assert report.get("stack_bytes", 0) <= MAX_SPILL_BYTES
        assert report.get("local_bytes", 0) == 0
        if report["most_registers"]:
            assert report.get("registers", 0) <= report["most_registers"]
        if report["kernel"] in REDUCTION_BOUND and report["warps"] == 1:
            assert report["has_redux"]


class Compiler:
    """Stands for a kernel: compiles what the launcher would have launched."""

    def __init__(self, kernel, arch: int) -> None:
        self.kernel, self.arch = kernel, arch
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, num_warps, maxnreg=None, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        names = self.kernel.arg_names
        signature = dict.fromkeys(constants, "constexpr")
        attrs = {}
        for index, arg in enumerate(args):
            # As the JIT specialises: 1 is a constant, multiples of 16 are noted.
            if isinstance(arg, int) and arg == 1:
                constants[names[index]] = 1
                signature[names[index]] = "constexpr"
                continue
            signature[names[index]] = mangle_type(arg)
            address = arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
            fixed = self.kernel.params[index].do_not_specialize_on_alignment
            if address % 16 == 0 and not fixed:
                attrs[(index,)] = [["tt.divisibility", 16]]
        compiled = triton.compile(
            ASTSource(
                fn=self.kernel,
                signature={name: signature[name] for name in names},
                constexprs={(names.index(n),): v for n, v in constants.items()},
                attrs=attrs,
            ),
            target=GPUTarget("cuda", self.arch, 32),
            options={"num_warps": num_warps, "maxnreg": maxnreg},
        )
        report = {
            "kernel": self.kernel.__name__,
            "warps": num_warps,
            "most_registers": maxnreg,
            "shared_bytes": compiled.metadata.shared,
            "has_redux": "redux.sync" in compiled.asm["ptx"],
            **resource_usage(compiled.asm["cubin"]),
            "constants": " ".join(f"{n}={v}" for n, v in constants.items()),
        }
        sys.stdout.write(json.dumps(report) + "\n")


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What ptxas used, where Triton brings its cuobjdump along."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (folder / "cuobjdump").exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [folder / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    keys = {"registers": "REG", "stack_bytes": "STACK", "local_bytes": "LOCAL"}
    return {k: int(re.search(rf"{v}:(\d+)", output)[1]) for k, v in keys.items()}


def call_topk() -> None:
    from vllm_dflash_kernels.topk_logprobs import topk_logprobs

    slots, temperature = torch.zeros(480, dtype=torch.int64), torch.ones(32)
    seeds = torch.zeros(32, dtype=torch.int64)
    for dtype, num_rows, vocab_size, candidates, is_noisy in (
        (torch.bfloat16, 15, 151936, 8, False),
        (torch.bfloat16, 15, 151936, 8, True),
        (torch.bfloat16, 480, 49152, 8, True),
        (torch.float32, 15, 49152, 32, True),
        (torch.float32, 15, 49152, 32, False),
    ):
        logits = torch.empty(num_rows, vocab_size, dtype=dtype)
        topk_logprobs(
            logits,
            candidates,
            temperature=temperature if is_noisy or candidates == 8 else None,
            row_to_slot=slots,
            is_scaled=not is_noisy,
            seed=seeds if is_noisy else None,
            position=slots if is_noisy else None,
            impl="triton",
        )


def call_tree_ops(budget: int) -> None:
    from vllm_dflash_kernels.gather_rows import gather_rows
    from vllm_dflash_kernels.kv_compaction import KVCacheTable, compact_kv
    from vllm_dflash_kernels.path_rows import path_rows
    from vllm_dflash_kernels.testing import TreeBuffers
    from vllm_dflash_kernels.tree_build import build_tree
    from vllm_dflash_kernels.tree_prepare import prepare_tree_step
    from vllm_dflash_kernels.tree_walk import walk_tree

    depth, num_reqs, width = 15, 2, budget + 1
    trees = TreeBuffers.allocate(4, budget)

    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    def longs(*shape):
        return torch.zeros(shape, dtype=torch.int64)

    build_tree(
        ints(num_reqs * depth, 8),
        torch.zeros(num_reqs * depth, 8),
        longs(num_reqs * depth),
        num_reqs=num_reqs,
        depth=depth,
        **vars(trees),
        chain_only=torch.zeros(4, dtype=torch.uint8),
        draft_tokens=longs(num_reqs, budget),
        impl="triton",
    )
    prepare_tree_step(
        longs(num_reqs),
        ints(num_reqs + 1),
        ints(num_reqs + 1),
        num_reqs=num_reqs,
        num_reqs_padded=num_reqs,
        depths=trees.depths,
        ancestors=trees.ancestors,
        num_nodes=trees.num_nodes,
        positions=longs(num_reqs * width),
        batch_ancestors=longs(num_reqs, width, trees.ancestors.shape[2]),
        tree_len=ints(num_reqs),
        prefix_len=ints(num_reqs),
        impl="triton",
    )
    for invalid in (None, torch.zeros(num_reqs * width, dtype=torch.bool)):
        walk_tree(
            longs(num_reqs * width),
            ints(num_reqs * width),
            ints(num_reqs + 1),
            longs(num_reqs),
            trees.parents,
            ints(num_reqs),
            invalid_drafts=invalid,
            sampled=longs(num_reqs, width),
            num_sampled=ints(num_reqs),
            path=ints(num_reqs, depth + 1),
            rank_counts=longs(8),
            impl="triton",
        )
    if budget != 48:
        return
    path_rows(
        ints(num_reqs + 1),
        ints(num_reqs),
        ints(num_reqs, depth + 1),
        ints(num_reqs),
        longs(num_reqs * width),
        ints(num_reqs + 1),
        num_reqs=num_reqs,
        rows=longs(num_reqs * width),
        out_positions=longs(num_reqs * width),
        num_padding=ints(num_reqs),
        impl="triton",
    )
    for num_columns in (576, 4096):
        sources = [
            torch.empty(num_reqs * width, num_columns, dtype=torch.bfloat16)
            for _ in range(5)
        ]
        gather_rows(sources, longs(num_reqs * width), impl="triton")
    for content, dtype in ((256, torch.bfloat16), (577, torch.uint8)):
        compact_kv(
            KVCacheTable([torch.empty(4, 8, 16, content, dtype=dtype)]),
            longs(num_reqs * width),
            ints(num_reqs + 1),
            ints(num_reqs),
            ints(num_reqs, depth + 1),
            ints(num_reqs),
            num_reqs=num_reqs,
            impl="triton",
        )


def main(arch: int) -> None:
    import importlib

    for op, kernels in {
        "topk_logprobs": ["_topk_scan_kernel", "_topk_merge_kernel"],
        "tree_build": ["_build_tree_kernel"],
        "tree_prepare": ["_prepare_tree_step_kernel"],
        "tree_walk": ["_walk_tree_kernel"],
        "path_rows": ["_path_rows_kernel"],
        "gather_rows": ["_gather_rows_kernel"],
        "kv_compaction": ["_compact_kv_kernel"],
    }.items():
        module = importlib.import_module(f"vllm_dflash_kernels.{op}.kernel")
        for kernel in kernels:
            compiler = Compiler(getattr(module, kernel), arch)
            setattr(module, kernel, compiler)
            if hasattr(module, "_KEPT"):
                module._KEPT.kernel = compiler
    call_topk()
    call_tree_ops(48)
    call_tree_ops(255)


if __name__ == "__main__":
    main(int(sys.argv[1]))
