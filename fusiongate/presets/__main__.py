"""``python -m fusiongate.presets``: the process that runs presets for another one; tasks come on its input."""

import gc
import sys

from .worker import main

status = main()
gc.freeze()  # the search for garbage before it ends would take a second where a compiler is loaded
sys.exit(status)
