# SPDX-License-Identifier: Apache-2.0
"""A custom V2 logits processor that reads the drafts before a row."""

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

OPTION = "no_echo_of"


class NoEcho(LogitsProcessor):
    """Forbids the last ``extra_args[OPTION]`` tokens of a request's own history."""

    def __init__(self, vllm_config, req_states):
        self.req_states = req_states
        self.windows = [0] * req_states.max_num_reqs

    def add_request(self, req_idx, sampling_params):
        self.windows[req_idx] = (sampling_params.extra_args or {}).get(OPTION, 0)
        return self.windows[req_idx] > 0

    def apply(self, logits, ctx):
        slots = ctx.expanded_idx_mapping.tolist()
        for row, slot in enumerate(slots):
            window = self.windows[slot]
            if not window:
                continue
            local = int(ctx.expanded_local_pos[row])
            length = int(self.req_states.total_len.gpu[slot])
            committed = self.req_states.all_token_ids.gpu[slot, :length]
            drafts = ctx.input_ids[row - local + 1 : row + 1]
            history = torch.cat([committed.long(), drafts.long()])
            logits[row, history[-window:]] = -torch.inf
        return logits
