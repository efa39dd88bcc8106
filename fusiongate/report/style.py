"""How the report looks, on a screen and on paper; it reads from top to bottom without any of this."""

from __future__ import annotations

from typing import Final

__all__ = ["STYLE"]

STYLE: Final = """
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --faint: #57606a; --paper: #ffffff; --rule: #d0d7de; --shade: #f3f5f7;
  --red: #b3261e; --kernel: #1a6b54; --other: #9aa5b1; --link: #0b5cad;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ec; --faint: #a3adb8; --paper: #14171b; --rule: #3a424b; --shade: #1e2329;
    --red: #ff8a80; --kernel: #5cc8a5; --other: #6c7885; --link: #7ab8ff;
  }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 0.95rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7em; margin: 0; }
h2 { font-size: 1.3em; margin: 2.5rem 0 0.75rem; padding-top: 0.5rem; border-top: 2px solid var(--rule); }
h3 { font-size: 1.05em; margin: 1.25rem 0 0.25rem; overflow-wrap: anywhere; }
p { margin: 0.5rem 0; overflow-wrap: anywhere; }
.verdict { font-size: 1.15em; font-weight: 600; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; margin: 0.75rem 0; padding: 0; list-style: none; }
a { color: var(--link); }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; }
caption { text-align: left; font-weight: 600; padding: 0.25rem 0; }
th, td { padding: 0.2rem 0.75rem 0.2rem 0; text-align: left; vertical-align: top; }
thead th { vertical-align: bottom; font-weight: 600; color: var(--faint); border-bottom: 1px solid var(--rule); }
tbody th { font-weight: 400; }
tbody th, tbody .number { white-space: nowrap; }
tbody th[scope="rowgroup"] { font-weight: 600; padding-top: 0.5rem; }
tbody + tbody { border-top: 1px solid var(--rule); }
tbody tr:hover { background: var(--shade); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 0.9em/1.45 ui-monospace, monospace; }
pre { margin: 0; padding: 0.6rem 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--shade); }
.finding { border-left: 4px solid var(--red); padding-left: 0.8rem; margin: 1rem 0; }
.red { color: var(--red); }
.names { columns: 22rem; margin: 0.25rem 0; padding-left: 1.2rem; font-size: 0.9em; overflow-wrap: anywhere; }
svg { display: block; max-width: none; }
.bar { fill: var(--other); }
.bar.kernel { fill: var(--kernel); }
.one { stroke: var(--faint); stroke-dasharray: 2 2; }
.interval { stroke: var(--ink); stroke-width: 1.5; }
@media print {
  :root { --ink: #000000; --faint: #444444; --paper: #ffffff; --rule: #999999; --shade: #f3f5f7;
    --red: #8c1d18; --kernel: #1a6b54; --other: #9aa5b1; --link: #000000; }
  body { max-width: none; padding: 0; font-size: 8pt; }
  nav { display: none; }
  .wide { overflow: visible; }
  h2, h3, caption { break-after: avoid; }
  tr, tbody, .finding { break-inside: avoid; }
  thead { break-after: avoid; }
}
"""
"""The page's style sheet."""
