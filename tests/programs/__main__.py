"""`python -m tests.programs`: see `driver.py`."""

import sys

from tests.programs.driver import main

sys.exit(main())
