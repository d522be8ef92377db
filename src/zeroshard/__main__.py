"""The command `zeroshard`, also as `python -m zeroshard`."""

import sys

_EXTRA = ("typer", "rich")


def main() -> None:
    try:
        from .cli.app import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sys.exit(f"The command line needs {missing}, which is not installed: pip install zeroshard[cli]")
    run()


if __name__ == "__main__":
    main()
