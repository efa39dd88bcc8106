"""Sites in other people's models: found in the syntax trees of their sources, and rewired with gates for a while."""

from .listing import FoundSite, Scan, scan
from .rewire import RewiredSite, RewireReport, rewired

__all__ = ["FoundSite", "RewireReport", "RewiredSite", "Scan", "rewired", "scan"]
