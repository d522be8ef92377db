"""A regular package, so that it is found before the one of the same name that fairscale installs."""
