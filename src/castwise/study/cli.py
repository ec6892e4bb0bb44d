"""``castwise study``: the command line of a study."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

__all__ = ["add_arguments", "main"]

_INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended: 128 + SIGINT
_PRECISIONS = "fp32,fp16,bf16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``castwise study`` to ``parser``."""
    add = parser.add_argument
    add("task", metavar="TASK", help="digits, text, or your own as path/to/file.py:Name (see castwise.study.Task)")
    add(
        "--precisions",
        default=_PRECISIONS,
        metavar="LIST",
        help="formats, presets or policy files to compare, separated by commas (default: %(default)s)",
    )
    add("--steps", type=int, metavar="N", help="optimizer steps of each run (default: the task's)")
    add("--seeds", type=int, metavar="K", help="runs of each precision (default: the task's)")
    add("--device", metavar="NAME", help="study this device's formats, emulated where needed (default: this machine)")
    add("--margin", type=float, metavar="X", help="the worsening of the metric you would accept (default: the task's)")
    add("--remedy", action="store_true", help="look for a cure for every unsafe precision")
    add("--out", type=Path, metavar="DIR", help="folder of the results (default: castwise-study-TASK)")
    add("--resume", action="store_true", help="go on with an interrupted study, or add seeds or precisions to it")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the task's, else the framework's)")
    add("--nproc", type=int, metavar="N", help="train on N processes of this machine, by torchrun (default: 1)")
    add("--quiet", action="store_true", help="no progress on stderr")


def main(args: argparse.Namespace) -> int:
    """Run a study as ``args`` say, print its table and where the report is.

    Returns:
        0 when the study is complete, whatever the verdict; 130 when it was interrupted.
    """
    from castwise.study.api import checked_settings, default_folder, study
    from castwise.study.ranks import inside, launch
    from castwise.study.table import table

    out = args.out if args.out is not None else default_folder(args.task)
    try:
        if args.nproc is not None and not inside(args.nproc):
            # What is wrong with the arguments is told once, and not by every rank.
            checked_settings(
                args.task, args.precisions.split(","), args.steps, args.seeds, args.device, args.margin, args.remedy
            )
            return launch([*command_words(args), *(["--resume"] if args.resume else [])], args.nproc)
        results = study(
            args.task,
            precisions=args.precisions.split(","),
            steps=args.steps,
            seeds=args.seeds,
            device=args.device,
            margin=args.margin,
            remedy=args.remedy,
            out=out,
            resume=args.resume,
            threads=args.threads,
            nproc=args.nproc,
            quiet=args.quiet,
        )
    except KeyboardInterrupt:
        print(f"\ninterrupted; at most one interval is lost. Go on with:\n  {resume_command(args)}", file=sys.stderr)
        return _INTERRUPTED
    print(table(results))
    print(f"\npolicy: {out / 'policy.toml'}")
    report = out / "report.html"
    print(f"report: {report}" if report.exists() else f"results: {out / 'results.json'}")
    return 0


def resume_command(args: argparse.Namespace) -> str:
    """The command line that goes on with the study that ``args`` began."""
    return shlex.join(["castwise", "study", *command_words(args), "--resume"])


def command_words(args: argparse.Namespace) -> list[str]:
    """The arguments that ``args`` came from, but for ``--resume``."""
    words = [args.task]
    if args.precisions != _PRECISIONS:
        words += ["--precisions", args.precisions]
    for key in ("steps", "seeds", "device", "margin", "out", "threads", "nproc"):
        value = getattr(args, key)
        if value is not None:
            words += [f"--{key}", str(value)]
    for key in ("remedy", "quiet", "verbose", "debug"):
        if getattr(args, key, False):
            words.append(f"--{key}")
    return words
