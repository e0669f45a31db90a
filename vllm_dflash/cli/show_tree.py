# SPDX-License-Identifier: Apache-2.0
"""``vllm-dflash show-tree``: the trees of a request and what was accepted of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from vllm_dflash.cli.arguments import CommandError, positive
from vllm_dflash.cli.tree_page import render_page
from vllm_dflash.cli.tree_text import TokenText, render_round, summarise
from vllm_dflash.metrics.tree_dump import DumpError, TreeDump, TreeRound, read_dump

_FIRST_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "dump", nargs="?", type=Path, help="a file that VLLM_DFLASH_DUMP_TREES named"
    )
    parser.add_argument(
        "--demo", action="store_true", help="ask the embedded pair instead"
    )
    parser.add_argument(
        "--prompt", help="ask a model this instead: the embedded pair, or --model"
    )
    parser.add_argument("--model", help="the target that --prompt is for")
    parser.add_argument(
        "--draft-model", "--draft", help="the DFlash draft of --model", metavar="DRAFT"
    )
    for option, default, text in (
        ("--depth", None, "draft depth (default 15)"),
        ("--budget", None, "tree nodes (default 47; on the CPU 16)"),
        ("--max-tokens", 48, "of the answer (default 48)"),
    ):
        parser.add_argument(option, type=positive, default=default, help=text)
    # What else the demo's server can be given.
    parser.set_defaults(port=None, serve=False, vllm_default=False)
    parser.add_argument(
        "--request", help="which request of the dump: the start of its id (default all)"
    )
    parser.add_argument(
        "--rounds",
        type=_round_range,
        metavar="FIRST-LAST",
        help=f"which rounds (default 1-{_FIRST_ROUNDS}; with --html all)",
    )
    parser.add_argument(
        "--tokenizer", help="a directory or hub name: show text, not token ids"
    )
    parser.add_argument("--html", type=Path, help="write a page instead of text")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: only on a terminal",
    )


def run_show_tree(args: argparse.Namespace) -> int:
    """Show what the arguments name; returns the exit code."""
    if args.demo or args.prompt is not None:
        if args.dump is not None:
            raise CommandError(
                f"a dump and a prompt are two sources (got {args.dump} too). One is "
                "allowed. Type: vllm-dflash show-tree DUMP, or: show-tree --demo"
            )
        dump, tokenizer = _ask(args)
    elif args.dump is None:
        raise CommandError(
            "nothing to show (got no dump and no prompt). Allowed are a file that "
            "VLLM_DFLASH_DUMP_TREES named, --demo and --prompt. Type: vllm-dflash "
            "show-tree --demo"
        )
    else:
        dump, tokenizer = _read(args.dump), args.tokenizer
    token_text = _token_text(tokenizer)
    requests = _choose_requests(dump, args.request)
    if args.html is not None:
        return _write_page(args, dump, requests, token_text)
    _print_requests(
        args, {name: dump.of_request(name) for name in requests}, token_text
    )
    return 0


def _print_requests(
    args: argparse.Namespace,
    requests: dict[str, list[TreeRound]],
    token_text: TokenText,
) -> None:
    colour = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    first, last = args.rounds or (1, _FIRST_ROUNDS)
    longest = max(map(len, requests.values()))
    if first > longest:
        raise CommandError(
            f"there is no round {first} (got --rounds {first}-{last}). 1-{longest} is "
            f"allowed. Type: --rounds 1-{longest}"
        )
    for index, (request, rounds) in enumerate(requests.items()):
        print(("\n" if index else "") + f"request {request}: {summarise(rounds)}")
        for number, item in enumerate(rounds[first - 1 : last], first):
            print("\n" + render_round(item, number, token_text, colour=colour))
        if args.rounds is None and len(rounds) > last:
            print(f"\n{len(rounds) - last} more rounds: --rounds 1-{len(rounds)}")


def _write_page(
    args: argparse.Namespace,
    dump: TreeDump,
    requests: list[str],
    token_text: TokenText,
) -> int:
    if len(requests) > 1:
        names = ", ".join(requests[:4]) + (", …" if len(requests) > 4 else "")
        raise CommandError(
            f"a page shows one request (got {len(requests)}: {names}). The start of "
            f"one id is allowed. Type: --request {requests[0]}"
        )
    rounds = dump.of_request(requests[0])
    first, last = args.rounds or (1, len(rounds))
    rounds = rounds[first - 1 : last]
    if not rounds:
        raise CommandError(
            f"there is no round {first} (got --rounds {first}-{last}). Leave --rounds "
            "out for all. Type: --html FILE"
        )
    engine = dump.engine
    facts = "Target {}, draft {}, depth {}, budget {} nodes".format(
        *(engine.get(key, "?") for key in ("model", "draft", "depth", "budget"))
    )
    title = args.prompt or f"Request {requests[0]}"
    page = render_page(rounds, token_text, title=title, facts=facts)
    try:
        args.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CommandError(
            f"the page can't be written (got {args.html}: {error.strerror}). A file in "
            "a folder of yours is allowed. Type: --html trees.html"
        ) from error
    print(f"{args.html}: {summarise(rounds)}")
    return 0


def _read(path: Path) -> TreeDump:
    try:
        dump = read_dump(path)
    except DumpError as error:
        raise CommandError(str(error)) from error
    if not dump.rounds:
        raise CommandError(
            f"{path} has no round yet (got {len(dump.engine)} facts of an engine). A "
            "dump of at least one answered request is allowed. Send the server a "
            "request, then type: vllm-dflash show-tree " + str(path)
        )
    return dump


def _choose_requests(dump: TreeDump, wanted: str | None) -> list[str]:
    requests = dump.requests
    if wanted is None:
        return requests
    found = [request for request in requests if request.startswith(wanted)]
    if not found:
        names = ", ".join(requests[:4]) + (", …" if len(requests) > 4 else "")
        raise CommandError(
            f"the dump has no such request (got {wanted}). It has {names}. "
            f"Type: --request {requests[0]}"
        )
    return found


def _token_text(tokenizer: str | None) -> TokenText:
    if tokenizer is None:
        return lambda token: f"{token} "
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise CommandError(
            f"the tokenizer can't be loaded (got {tokenizer}: {first}). A directory "
            "with tokenizer files or a hub name is allowed. Type: --tokenizer "
            "with the target's directory, or leave it out for token ids"
        ) from error
    return lambda token: loaded.decode([token])


def _ask(args: argparse.Namespace) -> tuple[TreeDump, str]:
    """Serve the pair, send one chat request, and read its dump."""
    from vllm_dflash.cli import demo
    from vllm_dflash.demo import compare, fetch
    from vllm_dflash.demo.client import RequestError
    from vllm_dflash.demo.convert import ConversionError
    from vllm_dflash.demo.serve import ServerError

    with tempfile.TemporaryDirectory(prefix="vllm-dflash-") as folder:
        path = Path(folder) / "trees.jsonl"
        try:
            with demo.signals_interrupt():
                spec = demo.tree_server(args, {"VLLM_DFLASH_DUMP_TREES": str(path)})
                with demo.start_server(spec) as server:
                    question = args.prompt or compare.CHAT_QUESTION
                    print(f"\n  > {question}\n", flush=True)
                    server.client.complete(compare.user_turn(question), args.max_tokens)
        except (fetch.FetchError, ConversionError, ServerError, RequestError) as error:
            raise CommandError(str(error)) from error
        return _read(path), args.tokenizer or spec.pair.target


def _round_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise argparse.ArgumentTypeError(f"must be like 3 or 1-10 (got {text})")
    start, end = int(first), int(last or first)
    if not 1 <= start <= end:
        raise argparse.ArgumentTypeError(f"must rise from 1 (got {text})")
    return start, end
