"""Entry point of `zeroshard` and `python -m zeroshard`. `run`, `doctor` and `--version` need only torch."""

import sys
from collections.abc import Callable, Sequence

_EXTRA = ("typer", "rich", "numpy")


def main() -> None:
    command = _plain(sys.argv[1] if len(sys.argv) > 1 else "")
    if command is not None:
        sys.exit(command(sys.argv[2:]))
    try:
        from .cli.app import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sys.exit(
            f"The command line needs {missing}, which is not installed: pip install 'zeroshard[cli]'\n"
            "Without it there are: zeroshard run, zeroshard doctor (each with --help), zeroshard --version"
        )
    run()


def _plain(name: str) -> Callable[[Sequence[str]], int] | None:
    """Return a command that needs only torch, or None if `name` is another one."""
    if name == "--version":
        return _version
    if name == "run":
        from .torch_patch import run_command as run

        return run
    if name == "doctor":
        from .doctor.report import main as doctor

        return doctor
    return None


def _version(_: Sequence[str]) -> int:
    from . import __version__

    sys.stdout.write(f"zeroshard {__version__}\n")
    return 0


if __name__ == "__main__":
    main()
