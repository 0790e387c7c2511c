"""The command line: ``hvd-onebit`` or ``python -m hvd_onebit``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hvd_onebit
from hvd_onebit._arguments import as_count

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Refuses what it does not know with the nearest name; may get its arguments only when it is used.

    Attributes:
        populate: adds the arguments of a command whose module is too heavy to import for the others.
    """

    populate: Callable[[argparse.ArgumentParser], None] | None = None

    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today is ambiguous once there is another option.
        super().__init__(**{"allow_abbrev": False} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses; unlike the base class a subcommand's parser refuses the rest itself, as only it knows its names."""
        if self.populate is not None:
            populate, self.populate = self.populate, None
            populate(self)
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unknown argument: {' '.join(rest)}")
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        """Prints the message, the nearest name if one is near, and where to find help; exits with status 2."""
        wrong = re.search(r"unknown argument: (\S+)|invalid choice: '([^']*)'", message)
        near: list[str] = []
        if wrong is not None:
            name = (wrong.group(1) or wrong.group(2)).split("=")[0]
            known = set(re.findall(r"(?<![\w-])(?:--?)?[a-z][\w-]*", self.format_help()))
            known = {word for word in known if word.startswith("-") == name.startswith("-")}
            choices = re.search(r"\(choose from (.*)\)", message)
            if choices is not None:
                known = set(re.findall(r"[\w-]+", choices.group(1)))
            near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}{hint}\nHelp: {self.prog} --help\n")


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected an existing folder, got {text!r}")
    return path.resolve()


def _install_horovod(args: argparse.Namespace) -> int:
    from hvd_onebit import horovod_build

    try:
        horovod_build.install(
            build_dir=args.build_dir,
            sdist=args.sdist,
            jobs=args.jobs,
            with_mpi=args.with_mpi,
            with_nccl=args.gpu == "nccl",
            rebuild=args.rebuild,
        )
    except horovod_build.InstallError as error:
        print(f"hvd-onebit: Horovod is not installed: {error}", file=sys.stderr)
        return 1
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from hvd_onebit import doctor

    report = doctor.examine()
    print(report.to_json() if args.json else report.to_text())
    return 0 if report.ok else 1


def _bench(args: argparse.Namespace) -> int:
    return int(importlib.import_module("hvd_onebit.bench").main(args) or 0)


def _populate_bench(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("hvd_onebit.bench").add_arguments(parser)


def _plan(args: argparse.Namespace) -> int:
    return int(importlib.import_module("hvd_onebit._plan_command").main(args))


def _populate_plan(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("hvd_onebit._plan_command").add_arguments(parser)


def _parser() -> _Parser:
    parser = _Parser(prog="hvd-onebit", description="1-bit and 0/1 compressed optimizers for Horovod.")
    parser.add_argument("--version", action="version", version=f"hvd-onebit {hvd_onebit.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    text = "build Horovod for the frameworks installed here, install it, and prove it with two ranks"
    command = commands.add_parser("install-horovod", help=text, description=text.capitalize() + ".")
    command.add_argument("--jobs", type=as_count, metavar="N", help="compilers at a time (default: one a CPU)")
    command.add_argument("--build-dir", type=_directory, metavar="DIR", help="folder for the temporary build tree")
    command.add_argument("--sdist", type=Path, metavar="FILE", help="Horovod's source archive, if there is no network")
    command.add_argument("--without-mpi", dest="with_mpi", action="store_false", help="build for Gloo alone")
    command.add_argument("--gpu", choices=["nccl"], help="build for NVIDIA GPUs too, with NCCL (default: CPUs alone)")
    command.add_argument("--rebuild", action="store_true", help="build even if the cache holds a wheel that fits")
    command.set_defaults(run=_install_horovod)

    text = "show what is installed, what Horovod was built with, and what is missing"
    command = commands.add_parser("doctor", help=text, description=text.capitalize() + ".")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(run=_doctor)

    text = "measure compressed against plain communication"
    command = commands.add_parser("bench", help=text, description=text.capitalize() + ".")
    command.populate = _populate_bench
    command.set_defaults(run=_bench)

    text = "estimate what compression saves, or costs, on a cluster"
    command = commands.add_parser("plan", help=text, description=text.capitalize() + ".")
    command.populate = _populate_plan
    command.set_defaults(run=_plan)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (or else the process's own command line) names; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
