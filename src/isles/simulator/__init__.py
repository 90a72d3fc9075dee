"""The research front end: M clusters in one process, on the rooms of a real run."""

from isles.simulator.folder import RunFolder
from isles.simulator.research import Simulation, records, simulate

__all__ = ["RunFolder", "Simulation", "records", "simulate"]
