"""The module that pytest's entry point names, so that no package attribute is touched when pytest loads it.

Each module of the plugin is listed here once; none imports torch before a fixture or an option asks for it.
"""

pytest_plugins = (
    "fusiongate.plugin.options",
    "fusiongate.plugin.device",
    "fusiongate.plugin.rows",
    "fusiongate.plugin.device_health",
    "fusiongate.plugin.causes",
    "fusiongate.plugin.recorder",
    "fusiongate.plugin.alone",
    "fusiongate.plugin.cells",
    "fusiongate.plugin.kernels",
    "fusiongate.plugin.saboteurs",
    "fusiongate.plugin.snapshots",
    "fusiongate.plugin.preset_times",
    "fusiongate.plugin.benchmark",
    "fusiongate.plugin.timings",
    "fusiongate.plugin.processes",
    "fusiongate.plugin.gpu_affinity",
    "fusiongate.plugin.progress",
    "fusiongate.plugin.summary",
    "fusiongate.plugin.github",
)
