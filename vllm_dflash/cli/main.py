# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``vllm-dflash``: parse, then import what the subcommand needs."""

import argparse
import sys
from collections.abc import Sequence

from vllm_dflash import __version__

USAGE_ERROR = 2
INTERRUPTED = 130


class CommandError(Exception):
    """A failure the user can act on; printed to stderr without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0, 1, 2 (error) or 130 (Ctrl-C)."""
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        return args.run(args)
    except CommandError as error:
        print(f"vllm-dflash {args.command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"vllm-dflash {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parse(argv: list[str]) -> argparse.Namespace:
    # argparse has no notion of "the rest belongs to another program".
    own, serve_args = argv, []
    if "--" in argv:
        split = argv.index("--")
        own, serve_args = argv[:split], argv[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="vllm-dflash", description="DFlash drafts verified as trees on vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_demo(commands)
    check = commands.add_parser(
        "check", help="is the plugin installed, registered, and would it use a tree"
    )
    check.set_defaults(run=_run_check)
    collect = commands.add_parser(
        "collect-env", help="print what a bug report needs, as JSON"
    )
    collect.set_defaults(run=_run_collect_env)
    args = parser.parse_args(own)
    if serve_args and args.command != "demo":
        parser.error("arguments after -- go to vllm serve: only demo takes them")
    args.serve_args = serve_args
    return args


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="serve a small model with trees, stream an answer, compare",
        description="Serve a small model with trees, stream one answer, then compare "
        "no speculation, vLLM's DFlash chain and the tree on the same prompts. "
        "Arguments after -- go to vllm serve.",
    )
    demo.add_argument("--model", help="your target instead of the embedded pair")
    demo.add_argument("--draft-model", help="the DFlash draft of --model")
    demo.add_argument(
        "--depth", type=_positive, help="draft depth (default 15, of a block of 16)"
    )
    demo.add_argument(
        "--budget", type=_positive, help="tree nodes (default 47; on the CPU 16)"
    )
    demo.add_argument(
        "--max-tokens", type=_positive, default=128, help="per answer (default 128)"
    )
    demo.add_argument(
        "--port", type=_positive, help="default 8000 with --serve, else a free one"
    )
    demo.add_argument(
        "--serve",
        action="store_true",
        help="keep the tree server up on 127.0.0.1 instead of comparing",
    )
    demo.add_argument(
        "--vllm-default",
        action="store_true",
        help="CPU: add a row for vLLM's own default, without the plugin",
    )
    demo.set_defaults(run=_run_demo)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value


def _run_demo(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.demo import run_demo

    return run_demo(args)


def _run_check(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.check import run_check

    return run_check()


def _run_collect_env(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.check import run_collect_env

    return run_collect_env()


if __name__ == "__main__":
    sys.exit(main())
