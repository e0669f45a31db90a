# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, progress, evaluations, interruptions."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from vllm_dflash.errors import option_error
from vllm_dflash_training import losses
from vllm_dflash_training.acceptance import Totals, block_acceptance, evaluate
from vllm_dflash_training.blocks import (
    Blocks,
    draw_anchors,
    make_blocks,
    to_device,
)
from vllm_dflash_training.checkpoint import (
    export,
    load_state,
    make_draft,
    save_state,
)
from vllm_dflash_training.config import RunConfig
from vllm_dflash_training.data import Batches, Responses
from vllm_dflash_training.distributed import World
from vllm_dflash_training.forward import BlockForward
from vllm_dflash_training.optimiser import Average, Optimiser, learning_rate
from vllm_dflash_training.target import Target


class Trainer:
    """One draft in training. Everything random depends on the seed and the step."""

    def __init__(
        self, config: RunConfig, target: Target, responses: Responses, world: World
    ):
        self.config, self.target, self.world = config, target, world
        self.options = options = config.training
        draft, self.draft_config = make_draft(target, config.draft, config.seed)
        self.draft = draft.to(world.device)
        self.forward = BlockForward(target, self.draft, options)
        if world.size > 1:
            is_cuda = world.device.type == "cuda"
            self.forward.module = DistributedDataParallel(
                self.forward.module, device_ids=[world.device] if is_cuda else None
            )
        self.optimiser = Optimiser(self.draft, options)
        self.average = Average(self.draft, options.ema_decay)
        self.batches = Batches(responses, options.sequences_per_batch, config.seed)
        self.weights = losses.depth_weights(config.loss, draft.shape.depth)
        self.weights = self.weights.to(world.device)
        self.parts = losses.mixture(config.loss)
        self.loss_kernel = losses.loss_rows
        if self.forward.is_compiled:
            self.loss_kernel = torch.compile(self.loss_kernel, dynamic=False)
        self.step, self.elapsed_s = 0, 0.0
        # Until the first step was made: compilation, the first evaluation.
        self.start_up_s = 0.0
        self.facts = _facts(config, self.draft.shape.num_layers, responses, world)
        self._wants_stop = False

    # What is done after each interruption.

    def resume(self) -> bool:
        """Go on from the last state; return whether there was one.

        Raises:
            ValueError: It belongs to a training with other data or options.
        """
        folder = self.config.folder("state")
        state = load_state(folder)
        if state is None:
            return False
        changed = [k for k, v in self.facts.items() if state["facts"].get(k) != v]
        if changed:
            key = changed[0]
            raise option_error(
                f"the training in {folder} was begun otherwise: {', '.join(changed)} "
                f"(got {key} {self.facts[key]!r}, it has {state['facts'].get(key)!r})",
                "Other steps, time_limit_s and learning rates are allowed",
                f"rm -r {folder} to begin again, or work_dir: with a new folder",
            )
        self.draft.load_state_dict(state["draft"])
        self.optimiser.load(state["optimiser"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self.start_up_s = state["start_up_s"]
        self.average.steps = state["average_steps"]
        for weight, saved in zip(self.average.weights, state["average"], strict=True):
            weight.copy_(saved)
        torch.set_rng_state(state["rng"])
        return True

    def save(self) -> None:
        """Store everything that the next step depends on."""
        if not self.world.is_first:
            return
        state = {
            "facts": self.facts,
            "draft": self.draft.state_dict(),
            "optimiser": self.optimiser.state(),
            "average": self.average.weights,
            "average_steps": self.average.steps,
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "start_up_s": self.start_up_s,
            "rng": torch.get_rng_state(),
        }
        save_state(self.config.folder("state"), state)

    def export(self, folder: Path) -> None:
        """Write the draft as it is, averaged if the config says so."""
        dtype = getattr(torch, self.config.export_dtype)
        export(folder, self.average.named(), self.draft_config, dtype)

    # One step.

    def train_step(self, rate: float) -> dict[str, Any]:
        """Make one optimiser step over all micro-batches of all processes."""
        options, world = self.options, self.world
        loss = torch.zeros((), device=world.device)
        for part in range(options.accumulation):
            is_last = part == options.accumulation - 1
            number = (self.step * options.accumulation + part) * world.size + world.rank
            batch, generator = self.batches.get(number)
            anchors, is_used = draw_anchors(
                batch, options.anchors_per_sequence, generator
            )
            # On the host, so that a step never waits for the GPU to count its rows.
            blocks = make_blocks(batch, anchors, is_used, self.draft.shape.depth)
            rows = to_device(blocks.rows(), world.device)
            batch, blocks = batch.to(world.device), blocks.to(world.device)
            ddp = self.forward.module
            is_synced = is_last or world.size == 1
            with nullcontext() if is_synced else ddp.no_sync():  # type: ignore[operator]
                hidden, final = self.forward.hidden(batch, blocks.anchors)
                value = self._loss(hidden, final, blocks, rows)
                (value / options.accumulation).backward()
            loss += value.detach() / options.accumulation
        norm = self.optimiser.step(rate)
        self.average.update()
        self.step += 1
        return {"loss": loss, "norm": norm, "hidden": hidden, "blocks": blocks}

    def _loss(
        self,
        hidden: torch.Tensor,
        final: torch.Tensor,
        blocks: Blocks,
        # Those of `blocks.rows`
        rows: torch.Tensor,
    ) -> torch.Tensor:
        pad = torch.nn.functional.pad
        num_blocks, num_rows, missing = blocks.anchors.numel(), len(rows), 0
        counted = rows
        labels = blocks.labels.flatten()[rows]
        teacher = self._teacher(final, blocks, rows)
        chunk = self.options.loss_chunk
        if self.forward.is_compiled:
            # Whole chunks only, so that the loss is compiled once; weight 0 fills up.
            missing = -num_rows % chunk
            rows, labels = pad(rows, (0, missing)), pad(labels, (0, missing))
            if teacher is not None:
                teacher = losses.Teacher(
                    pad(teacher.tokens, (0, 0, 0, missing)),
                    pad(teacher.probs, (0, 0, 0, missing)),
                )

        def weigh(found: torch.Tensor) -> torch.Tensor:
            weights = losses.row_weights(
                found[:num_rows], counted, self.weights, num_blocks, self.config.loss
            )
            return pad(weights, (0, missing))

        return losses.ChunkedLoss.apply(
            hidden.flatten(0, 2)[rows],
            self.target.output,
            labels,
            weigh,
            teacher,
            self.parts,
            chunk,
            self.loss_kernel,
        )

    def _teacher(
        self, final: torch.Tensor, blocks: Blocks, rows: torch.Tensor
    ) -> losses.Teacher | None:
        """The target's distribution for each label: that of the position before it."""
        if not self.parts.teacher_share:
            return None
        num_seqs, length = final.shape[:2]
        depth = torch.arange(self.draft.shape.depth, device=final.device)
        seq = torch.arange(num_seqs, device=final.device)[:, None, None]
        before = (seq * length + blocks.anchors[..., None] + depth).flatten()[rows]
        # Blocks overlap: a position is looked up once for all of them.
        needed, place = before.unique(return_inverse=True)
        flat, parts = final.flatten(0, 1), []
        for chunk in needed.split(self.options.loss_chunk):
            logits = self.target.logits(flat[chunk])
            parts.append(losses.make_teacher(logits, self.config.loss))
        tokens = torch.cat([part.tokens for part in parts])
        probs = torch.cat([part.probs for part in parts])
        return losses.Teacher(tokens[place], probs[place])

    # The loop.

    def train(self, heldout: Responses | None) -> bool:
        """Train to the end; return False if it was interrupted before.

        Args:
            heldout: The target's answers to the held-out prompts.
        """
        options, world = self.options, self.world
        started, saved = time.perf_counter() - self.elapsed_s, time.perf_counter()
        bar = tqdm(
            total=options.steps,
            initial=self.step,
            disable=not world.is_first,
            unit="step",
            dynamic_ncols=True,
            mininterval=1.0,
        )
        shown: dict[str, Any] = {}
        with bar, self._signals():
            if not self.step:
                shown |= self._evaluate(heldout)
            while self._progress() < 1:
                rate = learning_rate(self._progress(), options)
                result = self.train_step(rate)
                bar.update()
                is_end = self.step >= options.steps
                if self.step % options.log_every == 0 or is_end:
                    shown |= self._probe(result, rate)
                    bar.set_postfix(_short(shown), refresh=False)
                del result
                # Decided in every step by all processes alike.
                self.elapsed_s = world.largest(time.perf_counter() - started)
                if self.step == 1:
                    self.start_up_s = self.elapsed_s
                is_end = self._progress() >= 1
                if self.step % options.evaluate_every == 0 or is_end:
                    shown |= self._evaluate(heldout)
                    bar.set_postfix(_short(shown), refresh=False)
                if world.any(self._wants_stop):
                    break
                if time.perf_counter() - saved > options.save_every_s:
                    self.save()
                    saved = time.perf_counter()
        self.save()
        return self._progress() >= 1

    def _progress(self) -> float:
        done, limit = self.step / self.options.steps, self.options.time_limit_s
        if limit is None:
            return done
        if self.elapsed_s >= limit:
            return 1.0
        # The warm-up would be over before the first step was made.
        begun = self.start_up_s
        return max(done, (self.elapsed_s - begun) / (limit - begun))

    def _probe(self, result: dict[str, Any], rate: float) -> dict[str, Any]:
        """Acceptance of a few blocks of the step, before its update."""
        blocks, hidden = result["blocks"], result["hidden"].detach()
        is_used = blocks.is_valid[..., 0].flatten().nonzero()[:, 0]
        stride = max(1, len(is_used) // self.options.probe_blocks)
        chosen = is_used[::stride][: self.options.probe_blocks]
        valid = blocks.is_valid.flatten(0, 1)[chosen]
        evaluation = self.config.evaluation
        totals = Totals()
        with torch.no_grad():
            found = block_acceptance(
                self.forward.logits(hidden.flatten(0, 1)[chosen]),
                blocks.labels.flatten(0, 1)[chosen],
                valid,
                evaluation.budget,
                evaluation.max_children,
            )
        totals.add(found, valid.cpu())
        row = {
            "loss": round(float(result["loss"]), 4),
            "norm": round(float(result["norm"]), 3),
            "rate": rate,
            **totals.summary(),
        }
        self._log({"train": row})
        return row

    def _evaluate(self, heldout: Responses | None) -> dict[str, Any]:
        if heldout is None or not self.world.is_first:
            return {}
        # Without DDP: the others don't take part.
        module = self.forward.module
        if self.world.size > 1:
            self.forward.module = module.module
        self.average.swap()
        summary = evaluate(self.forward, heldout, self.config.evaluation)
        self.average.swap()
        self.forward.module = module
        self._log({"heldout": summary})
        return {"heldout": summary}

    def _log(self, row: dict[str, Any]) -> None:
        if not self.world.is_first:
            return
        words = {"step": self.step, "elapsed_s": round(self.elapsed_s, 1), **row}
        with (self.config.folder() / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(words) + "\n")

    @contextmanager
    def _signals(self):
        """Ctrl-C and SIGTERM end the training after the step in progress."""

        def stop(number: int, frame: Any) -> None:
            self._wants_stop = True

        try:
            before = {
                s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)
            }
        except ValueError:
            # Only the main thread gets signals.
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _facts(
    config: RunConfig, num_layers: int, responses: Responses, world: World
) -> dict[str, Any]:
    """What the order of the batches and the meaning of a state depend on."""
    options = config.training
    return {
        "seed": config.seed,
        # Named or not, it is the number that the state has.
        "draft": dataclasses.asdict(config.draft) | {"num_layers": num_layers},
        "loss": dataclasses.asdict(config.loss),
        "max_length": options.max_length,
        "sequences_per_batch": options.sequences_per_batch,
        "anchors_per_sequence": options.anchors_per_sequence,
        "accumulation": options.accumulation,
        "optimizer": options.optimizer,
        "ema_decay": options.ema_decay,
        "processes": world.size,
        "response_tokens": responses.num_response_tokens,
    }


def _short(shown: dict[str, Any]) -> dict[str, str]:
    """What fits into a progress bar: loss, chain, tree, matches at three depths."""
    matches = shown.get("match_by_depth", [])
    depths = sorted({i for i in (1, 4, len(matches)) if 0 < i <= len(matches)})
    words = {"loss": f"{shown['loss']:.3f}"} if "loss" in shown else {}
    if matches:
        words["match"] = "/".join(f"{matches[i - 1]:.2f}@{i}" for i in depths)
        words["chain"], words["tree"] = f"{shown['chain']:.2f}", f"{shown['tree']:.2f}"
    if "heldout" in shown:
        held = shown["heldout"]
        words["held-out"] = f"{held['chain_walk']:.2f}/{held['tree_walk']:.2f}"
    return words
