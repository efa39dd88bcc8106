"""``python -m fusiongate.presets RESULTS``: the process that runs presets for another; tasks come on its input."""

import sys

from .processes import main

sys.exit(main(sys.argv[1:]))
