"""Contracts for other projects' functions, put in front of them on request: ``layoutcheck.peers.install("sglang")``.

Nothing here imports a project before it is installed, and nothing in the library depends on one. Each module of this
package declares one project: which versions its contracts were compared with, and a contract for each function.
"""

from layoutcheck.peers._install import functions, install, installed, uninstall

__all__ = ["functions", "install", "installed", "uninstall"]
