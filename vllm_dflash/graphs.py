# SPDX-License-Identifier: Apache-2.0
"""CUDA-graph sizes of an engine with trees.

vLLM captures batches of up to 512 tokens by default, which is ten requests of a tree
of 48 nodes. Each captured size is also a target that mixed batches are padded to, so
the sizes added here are few and stop where graphs no longer pay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dflash.config import DDTreeConfig
from vllm_dflash.schedule import by_batch_size, to_ranges

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Past this a forward takes longer than its launches, and padding costs more than it
# saves. A number of requests that the user named is covered whatever its size.
MAX_DEFAULT_GRAPH_TOKENS = 2048


def cover_verify_widths(
    config: VllmConfig, tree: DDTreeConfig, *, user_sizes: bool, user_max_num_seqs: bool
) -> None:
    """Add capture sizes in place so that verify batches replay FULL graphs.

    Args:
        config: The finished config of the engine.
        tree: Its trees.
        user_sizes: The user has named capture sizes, which stay as they are.
        user_max_num_seqs: The user has named the number of requests.
    """
    compilation = config.compilation_config
    sizes = compilation.cudagraph_capture_sizes
    if user_sizes or not sizes or not compilation.cudagraph_mode.has_full_cudagraphs():
        return
    added = verify_sizes(
        tree,
        config.scheduler_config.max_num_seqs,
        config.scheduler_config.max_num_batched_tokens,
        None if user_max_num_seqs else MAX_DEFAULT_GRAPH_TOKENS,
    )
    compilation.cudagraph_capture_sizes = sorted({*sizes, *added})
    compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]


def cover_no_drafts(config: VllmConfig) -> None:
    """Have vLLM capture decode steps without drafts too, in `config` in place.

    For a schedule that may come down to none while it serves. vLLM captures the widths
    of its schedule, whatever their batch sizes: one batch size whose width others have
    too is put down for no drafts. The scheduler's table is set right when it is made
    (`patches/scheduler.py`), so no step follows that entry.
    """
    speculative = config.speculative_config
    assert speculative is not None, "called for an engine without trees"
    schedule = speculative.num_speculative_tokens_per_batch_size
    if not schedule:
        return
    nodes = by_batch_size(tuple(schedule), config.scheduler_config.max_num_seqs)
    spare = [batch for batch in range(1, len(nodes)) if nodes.count(nodes[batch]) > 1]
    if 0 in nodes[1:] or not spare:
        return
    nodes[spare[-1]] = 0
    speculative.num_speculative_tokens_per_batch_size = list(to_ranges(nodes))


def verify_sizes(
    tree: DDTreeConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_graph_tokens: int | None,
) -> list[int]:
    """Return the token counts of verify batches worth a graph, ascending."""
    tiers = tree.budget_per_batch_size or ((1, max_num_seqs, tree.budget),)
    sizes = set()
    for index, (first, last, nodes) in enumerate(tiers):
        width = nodes + 1
        if nodes == 0:
            continue
        if index == len(tiers) - 1:
            # vLLM carries the last range on to the largest batch.
            last = max(last, max_num_seqs)
        # The scheduler keeps room for the draft beside the rows of a request.
        last = min(last, max_num_seqs, max_num_batched_tokens // (width + tree.depth))
        if max_graph_tokens is not None:
            last = min(last, max_graph_tokens // width)
        sizes |= {count * width for count in request_counts(first, last)}
    return sorted(sizes)


def request_counts(first: int, last: int) -> list[int]:
    """Return batch sizes from `first` to `last`, at most a quarter apart."""
    counts = []
    count = first
    while count < last:
        counts.append(count)
        count += max(1, (1 << (count.bit_length() - 1)) // 4)
    return [*counts, last] if last >= first else []


def draft_sizes(
    tree: DDTreeConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    verify_sizes: list[int],
) -> list[int]:
    """Return the token counts of the draft's graphs, K + 1 rows a request, ascending.

    The draft is as wide whatever the tree's width, so it is captured for the batch
    sizes whose verify is captured at any width, and for those whose draft has no more
    rows than the target's largest graph: where a forward of the target is too long for
    its launches to matter, one of the draft, a few layers of fewer rows, is not. A
    narrow tree can have more requests in a step than the draft has rows for; its
    buffers hold `max_num_batched_tokens`.
    """
    counts = [
        size // width
        for size in verify_sizes
        for width in tree.widths
        if width > 1 and size % width == 0
    ]
    rows = tree.depth + 1
    counts += [1, max(verify_sizes, default=1) // rows]
    most = max(1, max_num_batched_tokens // rows)
    largest = min(max(counts), max_num_seqs, most)
    return [count * rows for count in request_counts(1, largest)]
