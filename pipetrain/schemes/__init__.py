"""What a scheme is, as pure functions of numbers.

Actions, the order of them, which weights each reads, and what an update makes up for. One paper, one file. Nothing here
knows of tensors, threads, seconds or bytes. What a scheme of one's own is made of is named here.
"""

from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import ScheduleError
from pipetrain.schemes.policies import Policy, Read, Reader
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme

__all__ = ["Action", "Policy", "Read", "Reader", "Schedule", "ScheduleError", "Scheme"]
