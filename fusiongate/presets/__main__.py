"""``python -m fusiongate.presets``: the process that runs presets for another one; tasks come on its input."""

import sys

from .processes import main

sys.exit(main())
