"""The workers of a run and how they communicate. The only user of torch.distributed besides the host of the store."""

from paceline.team.jobs import Pending
from paceline.team.processes import TorchTeam
from paceline.team.team import SoloTeam, Team
from paceline.team.threads import ThreadTeam

__all__ = ["Pending", "SoloTeam", "Team", "ThreadTeam", "TorchTeam"]
