"""What a scheme is, as pure functions of numbers.

Actions, their order, the weights that each reads, corrections for staleness, and plans of transfers. Nothing here
depends on tensors or threads. The names that your own schemes need are exported here.
"""

from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import ScheduleError
from pipetrain.schemes.policies import Policy, Read, Reader
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme

__all__ = ["Action", "Policy", "Read", "Reader", "Schedule", "ScheduleError", "Scheme"]
