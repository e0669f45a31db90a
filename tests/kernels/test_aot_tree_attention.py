# SPDX-License-Identifier: Apache-2.0
"""Compiles the tile table for six architectures, without a GPU.

As a script it prints the whole table as markdown::

    python tests/kernels/test_aot_tree_attention.py [arch ...]
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
# Compute capability -> shared memory of one program in KB.
ARCHITECTURES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
FEATURES = dict(window=1024, softcap=True, sinks=True, words=4, launch_pdl=True)


def entry(arch, head_size, rows, *, q="bf16", kv=None, **features):
    return dict(arch=arch, head_size=head_size, rows=rows, q=q, kv=kv or q, **features)


def some_entries():
    """The tiles that serve an 8B model, and each feature and head size somewhere."""
    entries = [entry(arch, 128, 3 * 64 + 4) for arch in ARCHITECTURES]
    entries += [entry(arch, 64, 128 + 16) for arch in (80, 89, 90)]
    entries += [entry(arch, 256, 64 + 32) for arch in (80, 120, 90)]
    entries += [entry(90, 80, 16), entry(86, 192, 32)]
    entries += [entry(90, 128, rows, from_prefix=True) for rows in (64, 132)]
    entries += [entry(90, 128, 132, kv="u8"), entry(80, 128, 60, kv="u8")]
    entries += [entry(90, 128, 132, **FEATURES), entry(86, 64, 68, q="fp16", words=2)]
    entries += [entry(90, 128, 16, q="fp32"), entry(90, 128, 1, reduce=True)]
    return entries


def all_entries():
    """Every tile of the table with two tails, and the fp8 and reduction kernels."""
    from vllm_dflash_kernels.tree_attention.tiles import HEAD_SIZES, TILE_TABLE

    entries = []
    for (arch, kb), head_size in itertools.product(ARCHITECTURES.items(), HEAD_SIZES):
        head_pad = 1 << (head_size - 1).bit_length()
        tiles = [tile.block_m for _, tile in TILE_TABLE[head_pad, kb]]
        largest = tiles[-1]
        if head_size != head_pad:
            # The same tiles with masked columns: one is enough.
            entries.append(entry(arch, head_size, largest + 16))
            continue
        entries += [entry(arch, head_size, rows) for rows in tiles]
        tails = (t for t in (16, 64) if t < largest)
        entries += [entry(arch, head_size, 2 * largest + tail) for tail in tails]
        entries.append(entry(arch, head_size, largest + 16, kv="u8"))
        entries.append(entry(arch, head_size, 1, reduce=True, launch_pdl=arch >= 90))
    return entries


def compile_entry(spec):
    """Compile one entry; returns what the compiler says about it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_dflash_kernels.tree_attention.kernel import tree_attention_kernel
    from vllm_dflash_kernels.tree_attention.reduce import reduce_splits_kernel
    from vllm_dflash_kernels.tree_attention.tiles import (
        estimate_shared_bytes,
        select_tile,
    )

    spec = dict(spec)
    arch, head_size, rows = spec["arch"], spec["head_size"], spec["rows"]
    q, kv, reduce = spec["q"], spec["kv"], spec.get("reduce", False)
    full = q == "fp32"
    tile = select_tile(rows, head_size, ARCHITECTURES[arch], full_precision=full)
    kernel = reduce_splits_kernel if reduce else tree_attention_kernel
    constants = dict(
        FROM_PREFIX=spec.get("from_prefix", False),
        NUM_KV_HEADS=8,
        GROUP=4,
        HEAD_SIZE=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size),
        BLOCK_SIZE=16,
        WORDS=spec.get("words", 1),
        WINDOW=spec.get("window", 0),
        USE_SOFTCAP=spec.get("softcap", False),
        USE_SINKS=spec.get("sinks", False),
        KV_FP8=kv == "u8",
        USE_SCALES=kv == "u8",
        PRECISION="ieee" if full else "tf32",
        LAUNCH_PDL=spec.get("launch_pdl", False),
        BLOCK_M=tile.block_m,
        TAIL_M=tile.tail_m,
        BLOCK_N=tile.block_n,
        BLOCK_R=4,
        SPLITS_PAD=8,
    )
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    pointers = dict(out=q, query=q, sinks=q, key=kv, ancestors="i64")
    pointers |= dict.fromkeys(
        ("partial", "lse", "k_scale", "v_scale", "prefix_lse"), "fp32"
    )
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        aligned = name.endswith("_ptr")
        if name in constants:
            signature[name] = "constexpr"
        elif aligned:
            signature[name] = "*" + pointers.get(name.removesuffix("_ptr"), "i32")
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            aligned = name.startswith(("stride_", "value_offset"))
            aligned = aligned and name not in ("stride_table", "stride_an")
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = dict(num_warps=4 if reduce else tile.num_warps)
    if not reduce:
        options["num_stages"] = tile.num_stages
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "-res-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout).groups()
    q_bytes, kv_bytes = {"fp32": 4}.get(q, 2), {"fp32": 4, "u8": 1}.get(kv, 2)
    return dict(
        spec,
        tile=[tile.block_m, tile.tail_m, tile.block_n, tile.num_warps, tile.num_stages],
        shared=compiled.metadata.shared,
        estimate=estimate_shared_bytes(tile, head_size, q_bytes, kv_bytes),
        registers=int(registers),
        spilled=int(stack),
        tensor_cores=bool(re.search(r"mma", compiled.asm["ptx"])),
        async_copies=len(re.findall(r"cp\.async\.c[ag]", compiled.asm["ptx"])),
    )


def compile_in_subprocess(entries):
    """Fresh processes: with TRITON_INTERPRET set, nothing can be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(KERNELS), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    workers = []
    count = min(max(os.cpu_count() or 1, 1), 8, len(entries))
    for part in (entries[i::count] for i in range(count)):
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(part)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        workers.append(worker)
    results = []
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode == 0, err[-4000:]
        results += json.loads(out.splitlines()[-1])
    return sorted(results, key=lambda r: (r["arch"], r["head_size"], r["tile"]))


def as_markdown(results):
    lines = [
        "| arch | head size | rows | Q / KV | M + tail x N | warps, stages | shared KB "
        "| estimate KB | limit KB | registers | spilled bytes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        m, tail, n, warps, stages = r["tile"]
        tile, estimate = f"{m} + {tail} x {n}", f"{r['estimate'] / 1024:.0f}"
        if r.get("reduce"):
            tile, estimate = "reduce", "-"
        lines.append(
            f"| sm_{r['arch']} | {r['head_size']} | {r['rows']} | {r['q']} / {r['kv']} "
            f"| {tile} | {warps}, {stages} | {r['shared'] / 1024:.0f} "
            f"| {estimate} | {ARCHITECTURES[r['arch']]} "
            f"| {r['registers']} | {r['spilled']} |"
        )
    return "\n".join(lines)


def check(results):
    for r in results:
        assert r["shared"] <= ARCHITECTURES[r["arch"]] * 1024, r
        assert r["spilled"] == 0, r
        if r.get("reduce"):
            continue
        assert r["shared"] <= r["estimate"] <= 2.1 * r["shared"], r
        assert r["estimate"] <= ARCHITECTURES[r["arch"]] * 1024, r
        assert r["async_copies"] > 0, f"the pipeline fell apart: {r}"
        assert r["tensor_cores"] or r["q"] == "fp32", r


@pytest.mark.slow
def test_whole_tile_table_compiles_within_limits():
    results = compile_in_subprocess(all_entries())
    print(as_markdown(results))
    check(results)


def test_main_tiles_compile_within_limits():
    results = compile_in_subprocess(some_entries())
    print(as_markdown(results))
    assert {r["arch"] for r in results} == set(ARCHITECTURES)
    check(results)


def main():
    sys.path.insert(0, str(KERNELS))
    if sys.argv[1:2] == ["--worker"]:
        specs = json.loads(sys.argv[2])
        print(json.dumps([compile_entry(spec) for spec in specs]))
        return
    wanted = [int(arch) for arch in sys.argv[1:]] or list(ARCHITECTURES)
    entries = [e for e in all_entries() if e["arch"] in wanted]
    results = compile_in_subprocess(entries)
    print(as_markdown(results))
    check(results)


if __name__ == "__main__":
    main()
