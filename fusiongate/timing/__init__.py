"""Device time: stopwatches, arms measured in pairs, and the verdict on their ratio.

Nothing is exported from here, so that reading recorded runs (:mod:`.recorded`, :mod:`.judging`) imports no torch:
:func:`fusiongate.timing.measuring.measure` is where a measurement begins.
"""
