"""Who owns what: integers and dtypes only, no tensor allocated, no process group."""
