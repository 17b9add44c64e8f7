"""A process that starts anew, as the cells of a notebook do when they are run again."""

import psfleet.fleet as fleet
from psfleet.program import names, program


def reset() -> None:
    """Forget the model, so that the code that builds it can run again in this process.

    Afterwards this process is as if it had just imported psfleet: the default programs are empty,
    generated names count from 0, and `fleet.init()` has not been called. The tables of an embedded
    fleet are gone; save them before if you want them. A worker of a cluster flushes its pushes and
    leaves the fleet, as with `fleet.stop_worker()`. Clients of `psfleet.connect()` share the fleet, so they
    end too. Programs that you have made yourself are untouched. Do not call it inside `program_guard`.
    """
    program.renew()
    names.renew()
    fleet.forget()
