"""A regular package: it takes precedence over the package of the same name that fairscale installs."""
