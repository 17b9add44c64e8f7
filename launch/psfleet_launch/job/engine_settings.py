"""What each launch engine asks of the user beside the job: its flags and keys of a job file."""

from dataclasses import dataclass

from psfleet.settings.declaration import setting
from psfleet.settings.kinds import SECONDS

__all__ = ["EngineSettings"]


@dataclass(frozen=True)
class EngineSettings:
    """Of all engines; each help begins with the name of its own.

    `nodes` and `stop_before` mean the same for every batch queue (psfleet_launch.engines.remote.batch_job).
    """

    agents: int = setting(
        1,
        "Engine join: how many machines to wait for",
        names="--agents engine.join.agents",
        least=1,
    )
    hosts: tuple[str, ...] = setting(
        (),
        "Engine ssh: machines, as `ssh` takes them",
        names="--hosts engine.ssh.hosts",
        metavar="HOST,...",
    )
    hostfile: str = setting(
        "",
        "Engine ssh: a file with one machine per line",
        names="--hostfile engine.ssh.hostfile",
        metavar="FILE",
    )
    remote_python: str = setting(
        "",
        "Engine ssh: Python on the machines; by default at the path of this machine's",
        names="--remote-python engine.ssh.python",
        metavar="PATH",
    )
    ssh_options: tuple[str, ...] = setting(
        (),
        "Engine ssh: arguments for `ssh`, as in -F,my_config",
        names="--ssh-options engine.ssh.options",
        metavar="OPTION,...",
    )
    nodes: int = setting(
        1, "Engine slurm: how many nodes to ask for", names="--nodes engine.slurm.nodes", least=1
    )
    sbatch_options: tuple[str, ...] = setting(
        (),
        "Engine slurm: arguments for `sbatch`, as in --partition=cpu,--time=12:00:00",
        names="--sbatch-options engine.slurm.options",
        metavar="OPTION,...",
    )
    stop_before: float = setting(
        120.0,
        "Engine slurm: how long before the time limit to take a snapshot and end",
        SECONDS,
        names="--stop-before engine.slurm.stop_before",
        metavar="2min",
        least=1,
        most=65535,
    )
    ray_address: str = setting(
        "auto",
        "Engine ray: `HOST:PORT` of the cluster's head; by default the cluster of this machine",
        names="--ray-address engine.ray.address",
        metavar="HOST:PORT",
    )
    bundles: int = setting(
        1,
        "Engine ray: how many agents, each in a bundle of a placement group",
        names="--bundles engine.ray.bundles",
        least=1,
    )
    bundle_cores: float = setting(
        1.0, "Engine ray: CPUs of each bundle", names="--bundle-cores engine.ray.cores", least=0
    )
    bundle_gpus: float = setting(
        0.0, "Engine ray: GPUs of each bundle", names="--bundle-gpus engine.ray.gpus", least=0
    )
    render: str = setting(
        "",
        "Engine kubernetes: write the files of the job to this folder, and do not run it",
        names="--render",
        metavar="FOLDER",
    )
    image: str = setting(
        "",
        "Engine kubernetes: image with psfleet and the script",
        names="--image engine.kubernetes.image",
    )
    storage_class: str = setting(
        "",
        "Engine kubernetes: storage class of the servers' logs; by default that of the cluster",
        names="--storage-class engine.kubernetes.storage_class",
        metavar="NAME",
    )
    volume_size: str = setting(
        "20Gi",
        "Engine kubernetes: size of the volume of each server's log, with `--jobset` of all servers",
        names="--volume-size engine.kubernetes.volume_size",
        metavar="SIZE",
    )
    jobset: bool = setting(
        False,
        "Engine kubernetes: one JobSet in place of a StatefulSet and a Job",
        names="--jobset engine.kubernetes.jobset",
    )
    kubectl_options: tuple[str, ...] = setting(
        (),
        "Engine kubernetes: arguments for `kubectl`, as in --context=lab,--namespace=ml",
        names="--kubectl-options engine.kubernetes.options",
        metavar="OPTION,...",
    )
