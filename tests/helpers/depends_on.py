# SPDX-License-Identifier: Apache-2.0
"""What of vLLM the plugin subclasses, overrides or calls inside, and why: the one list.

Patched symbols are in the ledger (`vllm_dflash/patches/__init__.py`), this is the rest.
`tests/compat/test_depends_on.py` compares the source of each with its recorded digest
and finds what is missing here. Sources are read, not imported, so a vLLM that is only
unpacked can be looked at too:

    python tests/helpers/depends_on.py                        # what changed
    python tests/helpers/depends_on.py --diff OLD [--vllm NEW] # folders named vllm
    python tests/helpers/depends_on.py --record               # after reading it
"""

import argparse
import ast
import difflib
import hashlib
import json
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

DIGESTS = Path(__file__).resolve().parents[1] / "compat" / "source_digests.json"
_GPU = "vllm.v1.worker.gpu"
_SPEC = f"{_GPU}.spec_decode"
_SAMPLE = f"{_GPU}.sample"
_ATTENTION = "vllm.v1.attention"
_BACKENDS = f"{_ATTENTION}.backends"

# Module -> symbol -> why a change of it matters.
DEPENDS_ON: dict[str, dict[str, str]] = {
    f"{_SPEC}.dflash.speculator": {
        "DFlashSpeculator.__init__": "runs on a copy of the config with the depth K",
        "DFlashSpeculator.set_attn": "extended; target_attn_groups is read after it",
        "DFlashSpeculator.init_cudagraph_manager": "runs with the draft's sizes",
        "DFlashSpeculator._generate_draft": "inside the graph; the tree follows it",
        "DFlashSpeculator.propose": "gets the path batch; what it does with is_profile "
        "keeps the draft out of its graph",
        "DFlashSpeculator.capture": "captures _generate_draft with the tree in it",
    },
    f"{_SPEC}.speculator": {
        "DraftModelSpeculator.load_model": "sets draft_attn_layer_names",
        "DraftModelSpeculator.sample_draft": "replaced by collecting candidates",
        "DraftModelSpeculator.compute_draft_logits": "called for the candidates",
    },
    f"{_SPEC}.rejection_sampler": {
        "RejectionSampler.__init__": "extended by TreeRejectionSampler",
        "RejectionSampler.__call__": "replaced: arguments, order and result are vLLM's",
        "_iter_request_chunks": "chunks of requests whose logits fit the cap",
        "get_max_chunk_logits": "that cap",
    },
    f"{_GPU}.model_states.interface": {
        "ModelState": "the hooks that the runner calls, and when",
        "ModelSpecificAttnMetadata": "carries the tree to the builders",
    },
    f"{_GPU}.model_states.default": {
        "DefaultModelState.__init__": "extended by DDTreeModelState",
        "DefaultModelState.add_request": "extended; runs before the sampler's",
        "DefaultModelState.prepare_attn": "passes model_specific_attn_metadata on",
    },
    f"{_GPU}.model_runner": {
        "GPUModelRunner.sample": "calls the rejection sampler and hands its result on",
        "GPUModelRunner.sample_tokens": "order of sampling, post-update and propose",
        "GPUModelRunner.prepare_inputs": "drafts of a request become its rows",
        "GPUModelRunner.add_requests": "order of add_request of the states",
        "GPUModelRunner.execute_model": "preprocess_state comes right before the "
        "adapters of the step are set",
    },
    f"{_GPU}.lora_utils": {
        "LoraState.make_lora_inputs": "one row of logits a request, which is repeated",
        "create_lora_capture_hook": "sets the adapters of a graph that is captured",
    },
    f"{_SPEC}.dflash.utils": {
        "load_dflash_model": "the draft takes embedding and lm_head without adapters",
    },
    f"{_GPU}.input_batch": {
        "InputBatch": "PathBatchMaker copies it and sets fields",
        "get_num_sampled_and_rejected": "counts the rows of a tree as a chain's",
    },
    f"{_GPU}.block_table": {
        "BlockTables": "slot_mappings is what the KV compaction reads",
    },
    f"{_GPU}.states": {"RequestState": "prefill_len is read"},
    "vllm.v1.sample.ops.topk_topp_triton": {
        "_apply_topp_split": "makes scratch for _SPLIT_MAX_BATCH rows (raised), "
        "once, and keeps it",
    },
    f"{_GPU}.cudagraph_utils": {
        "CudaGraphManager.dispatch": "chooses the graph by tokens, requests and width",
    },
    f"{_SAMPLE}.gumbel": {
        "gumbel_sample": "the key of the noise: the same tokens as without speculation",
    },
    f"{_SAMPLE}.sampler": {
        "Sampler.apply_sampling_params": "called with one row a node",
        "Sampler.get_logprobs_dims": "called for the logprobs of a path",
        "Sampler.sample": "what a request without drafts gets: the twin of our drawing",
    },
    f"{_SAMPLE}.logprob": {"compute_topk_scores": "called with the rows of the path"},
    f"{_SAMPLE}.output": {"SamplerOutput": "built by TreeRejectionSampler"},
    f"{_SAMPLE}.logits_processor.interface": {
        "LogitsProcessor": "HistoryReader stands in for a custom one",
        "LogitsContext": "passed on by HistoryReader",
    },
    f"{_SAMPLE}.bad_words": {
        "BadWordsState": "vLLM's own; requests that use it are verified as chains",
        "_bad_words_kernel": "a row's history is the rows before it: why chains",
    },
    f"{_SAMPLE}.logit_bias": {"LogitBiasState": "vLLM's own: no history but positions"},
    f"{_SAMPLE}.penalties": {
        "PenaltiesState": "vLLM's own; requests that use it are verified as chains",
    },
    f"{_GPU}.metrics.logits": {"get_num_nans": "called on the target's logits"},
    "vllm.v1.outputs": {"LogprobsTensors": "rows of the path, joined over chunks"},
    f"{_ATTENTION}.backend": {
        "AttentionMetadataBuilder.__init__": "called past the CPU backend's own",
        "AttentionMetadataBuilder.build_for_cudagraph_capture": "calls build() once",
        "AttentionMetadataBuilder.get_cudagraph_support": "lowered to uniform batches",
        "AttentionImpl.fused_output_quant_supported": "overridden: never with a tree",
        "AttentionCGSupport": "its order is compared",
        "CommonAttentionMetadata": "fields are read, and set for the prefix call",
    },
    f"{_BACKENDS}.flash_attn": {
        "FlashAttentionMetadataBuilder.__init__": "max_num_splits is set after it",
        "FlashAttentionMetadataBuilder.build": "called twice; its metadata is extended",
        "FlashAttentionMetadataBuilder.get_cudagraph_support": "lowered",
        "FlashAttentionImpl.__init__": "its window, soft cap and sinks are read",
        "FlashAttentionImpl.forward": "serves mixed batches and the draft",
        "FlashAttentionImpl.do_kv_cache_update": "writes the rows that are compacted",
        "FlashAttentionBackend": "overridden under its own name; the cache layout",
    },
    f"{_BACKENDS}.fa_utils": {"get_flash_attn_version": "FlashAttention-3 or not"},
    f"{_BACKENDS}.triton_attn": {
        "TritonAttentionMetadataBuilder.__init__": "extended",
        "TritonAttentionMetadataBuilder.build": "its metadata is extended",
        "TritonAttentionMetadataBuilder.build_for_cudagraph_capture": "calls build()",
        "TritonAttentionImpl.__init__": "its window, soft cap and sinks are read",
        "TritonAttentionImpl.forward": "serves mixed batches and the draft",
        "TritonAttentionImpl.fused_output_quant_supported": "overridden",
        "TritonAttentionImpl.do_kv_cache_update": "writes the rows that are compacted",
        "TritonAttentionBackend": "overridden under its own name; the cache layout",
    },
    f"{_BACKENDS}.cpu_attn": {
        "CPUAttentionMetadataBuilder.__init__": "replaced: no packing",
        "CPUAttentionMetadataBuilder.build": "replaced: no schedule",
        "CPUAttentionMetadata": "built by the plain builder",
        "CPUAttentionBackendImpl.__init__": "attributes are read",
        "CPUAttentionBackendImpl.forward": "replaced: arguments and result",
        "CPUAttentionBackendImpl.do_kv_cache_update": "replaced by plain rows",
        "CPUAttentionBackend": "overridden under its own name",
    },
    f"{_BACKENDS}.registry": {
        "register_backend": "puts the tree backends in place",
        "_AttentionBackendEnumMeta": "names of backends",
        "AttentionBackendEnum": "clear_override gives vLLM's classes back",
    },
    f"{_ATTENTION}.selector": {
        "_cached_get_attn_backend": "its cache is cleared by name",
        "AttentionSelectorConfig": "built to ask for a backend before the worker",
    },
    "vllm.v1.worker.gpu_worker": {
        "Worker.init_device": "extended: builds the runner and the speculator",
        "Worker.load_model": "extended: loads the target first",
    },
    "vllm.v1.worker.cpu_worker": {"CPUWorker.init_device": "extended, as the GPU's"},
    "vllm.model_executor.model_loader.utils": {
        "get_draft_load_config": "how the draft is going to be loaded",
    },
    "vllm.model_executor.model_loader.weight_utils": {
        "download_weights_from_hf": "called with the arguments of vLLM's loader",
        "maybe_download_from_modelscope": "called before it",
    },
    "vllm.utils.torch_utils": {"async_tensor_h2d": "copies row counts to the device"},
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.schedule": "looks the drafts of the next step up in the table that "
        "the running schedule overwrites; cuts drafts at limits",
        "Scheduler.update_from_output": "gets every scheduled step in order; its "
        "arguments are read first, since it cuts sampled tokens at stops in place",
    },
    "vllm.v1.core.sched.async_scheduler": {
        "AsyncScheduler._update_after_schedule": "as many placeholders as the step's "
        "num_spec_tokens_to_schedule",
    },
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": "drafts, new and finished requests of a step are read",
    },
    "vllm.v1.spec_decode.dynamic.utils": {
        "build_dynamic_sd_schedule_lookup": "the table: indexed by the batch size",
    },
    "vllm.v1.spec_decode.metrics": {
        "SpecDecodingLogging": "subclassed for a line that counts depths",
        "SpecDecodingStats": "what the scheduler counts: nodes, not depths",
    },
    "vllm.v1.metrics.loggers": {
        "AggregateStatLoggerBase": "subclassed by TreeStatLogger",
        "PerEngineStatLoggerAdapter": "looked through for the logging logger",
        "LoggingStatLogger": "its spec_decoding_logging is replaced",
    },
    "vllm.v1.metrics.stats": {"SchedulerStats": "spec_decoding_stats is read"},
    "vllm.transformers_utils.config": {
        "get_config": "reads the draft before a calibration",
    },
    "vllm.transformers_utils.configs.speculators.base": {
        "SpeculatorsConfig": "reads the depth of a speculators draft",
    },
    "vllm.transformers_utils.repo_utils": {
        "get_hf_file_to_dict": "fetches the config of a draft",
    },
    "vllm.config.speculative": {
        "SpeculativeConfig.__post_init__": "what a tree's config goes through",
    },
}


def targets() -> dict[str, str]:
    """Return `module:symbol` -> why, kernels that have a twin on the CPU included."""
    from vllm_dflash.cpu.replacements import REPLACEMENTS

    twins = {
        item.target: f"{item.twin} does the same in torch" for item in REPLACEMENTS
    }
    own = {
        f"{module}:{symbol}": why
        for module, symbols in DEPENDS_ON.items()
        for symbol, why in symbols.items()
    }
    return {**twins, **own}


def installed() -> Path:
    """Return the folder of the installed vLLM, without importing it."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    return Path(spec.origin).parent


def source(target: str, vllm: Path) -> str | None:
    """Return the source of `module:symbol` in a folder `vllm`, None if it is gone."""
    module, _, symbol = target.partition(":")
    path = vllm.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return _definitions(file).get(symbol)
    return None


@cache
def _definitions(file: Path) -> dict[str, str]:
    """Return every function, class and method of a file, decorators included."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    found: dict[str, str] = {}

    def visit(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.If | ast.Try):
                visit([*node.body, *node.orelse], prefix)
            if not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ):
                continue
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            own = "".join(lines[first - 1 : node.end_lineno])
            # Overloads and getters with setters are one symbol.
            found[prefix + node.name] = found.get(prefix + node.name, "") + own
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(text).body, "")
    return found


def digest(text: str) -> str:
    """Return the start of the SHA-256 of a source."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded() -> dict[str, str]:
    """Return `module:symbol` -> digest of the source that was read."""
    return json.loads(DIGESTS.read_text(encoding="utf-8"))


def changes(vllm: Path) -> dict[str, str]:
    """Return `module:symbol` -> gone, changed or not recorded, for what differs."""
    known = recorded()
    found = {}
    for target in targets():
        text = source(target, vllm)
        if text is None:
            found[target] = "gone"
        elif target not in known:
            found[target] = "not recorded"
        elif digest(text) != known[target]:
            found[target] = "changed"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, help="folder; the installed one if absent")
    parser.add_argument("--diff", type=Path, metavar="OLD", help="folder of another")
    parser.add_argument("--record", action="store_true", help="write the digests")
    args = parser.parse_args()
    vllm = args.vllm or installed()
    for folder in filter(None, (vllm, args.diff)):
        if not (folder / "__init__.py").is_file():
            parser.error(f"{folder} is no folder of vLLM's package. Type PATH/vllm")
    found = changes(vllm)
    for target, state in found.items():
        print(f"{state}: {target}\n    {targets()[target]}")
        if args.diff:
            old = (source(target, args.diff) or "").splitlines()
            new = (source(target, vllm) or "").splitlines()
            print("\n".join(difflib.unified_diff(old, new, lineterm="", n=3)))
    print(f"{len(found)} of {len(targets())} symbols differ from what was read")
    if args.record:
        texts = {target: source(target, vllm) for target in sorted(targets())}
        if gone := [target for target, text in texts.items() if text is None]:
            print(f"not recorded: {gone} are gone; take them out of the list first")
            return 1
        digests = {target: digest(text) for target, text in texts.items() if text}
        DIGESTS.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
        return 0
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
