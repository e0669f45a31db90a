# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``vllm-dflash``: parse, then import what the subcommand needs."""

import argparse
import sys
from collections.abc import Sequence

from vllm_dflash import __version__
from vllm_dflash.cli.arguments import CommandError, positive

USAGE_ERROR = 2
INTERRUPTED = 130


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
    _add_show_tree(commands)
    _add_calibrate(commands)
    check = commands.add_parser(
        "check", help="is the plugin installed, registered, and would it use a tree"
    )
    check.set_defaults(run=_run_check)
    collect = commands.add_parser(
        "collect-env", help="print what a bug report needs, as JSON"
    )
    collect.set_defaults(run=_run_collect_env)
    args = parser.parse_args(own)
    if serve_args and args.command not in {"calibrate", "demo", "show-tree"}:
        parser.error(
            "arguments after -- go to vLLM: calibrate, demo and show-tree take them"
        )
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
        "--depth", type=positive, help="draft depth (default 15, of a block of 16)"
    )
    demo.add_argument(
        "--budget", type=positive, help="tree nodes (default 47; on the CPU 16)"
    )
    demo.add_argument(
        "--max-tokens", type=positive, default=128, help="per answer (default 128)"
    )
    demo.add_argument(
        "--port", type=positive, help="default 8000 with --serve, else a free one"
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


def _add_show_tree(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    from vllm_dflash.cli.show_tree import add_arguments

    show_tree = commands.add_parser(
        "show-tree",
        help="show the trees of a request and the accepted paths",
        description="Show verified trees with their accepted paths, as text or as one "
        "HTML page: of a dump that vLLM wrote with VLLM_DFLASH_DUMP_TREES, or of a "
        "request sent now. Arguments after -- go to vllm serve.",
    )
    add_arguments(show_tree)
    show_tree.set_defaults(run=_run_show_tree)


def _add_calibrate(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    from vllm_dflash.cli.calibrate import add_arguments

    calibrate = commands.add_parser(
        "calibrate",
        help="measure how many nodes pay at which load, for this pair and GPU",
        description="Time steps of every tree width and batch size, count what the "
        "draft gets accepted, choose the number of nodes with the most tokens per "
        'second by batch size, and keep it for "budget_per_batch_size": "auto". '
        "Arguments after -- are vLLM's engine options.",
    )
    add_arguments(calibrate)
    calibrate.set_defaults(run=_run_calibrate)


def _run_demo(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.demo import run_demo

    return run_demo(args)


def _run_show_tree(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.show_tree import run_show_tree

    return run_show_tree(args)


def _run_calibrate(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.calibrate import run_calibrate

    return run_calibrate(args)


def _run_check(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.check import run_check

    return run_check()


def _run_collect_env(args: argparse.Namespace) -> int:
    from vllm_dflash.cli.check import run_collect_env

    return run_collect_env()


if __name__ == "__main__":
    sys.exit(main())
