"""The command line: `zeroshard plan`, `checkpoint inspect`, `checkpoint convert`, `run` and `doctor`."""
