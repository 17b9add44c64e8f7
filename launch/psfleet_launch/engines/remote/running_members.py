"""Which machine runs which process."""

from collections.abc import Collection

from psfleet_launch.job.job_plan import Member

__all__ = ["RunningMembers"]


class RunningMembers(dict[Member, str]):
    """The machine of each member that has a process."""

    def on(self, machines: Collection[str]) -> frozenset[Member]:
        """What these machines run."""
        return frozenset(member for member, name in self.items() if name in machines)

    def of_server(self, member: Member) -> set[str]:
        """The machines that run a process of this member's server: primary, standby, or one given up."""
        return {
            name for one, name in self.items() if (one.role, one.rank) == (member.role, member.rank)
        }
