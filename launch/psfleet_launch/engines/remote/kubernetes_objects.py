"""The Kubernetes objects of a job. Pure, and without secrets: pods name the Secret that they mount.

Servers are a StatefulSet behind a headless Service, so that each keeps its name and its volume. Workers
are an Indexed Job. With `--jobset` one JobSet has an Indexed Job of each role instead, and a volume that all
servers share.
"""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from psfleet.errors import ConfigError
from psfleet.settings.declaration import settings_of, to_variables
from psfleet.settings.declared_settings import (
    FleetSettings,
    JobSettings,
    NumberSettings,
    ProcessSettings,
)
from psfleet.settings.environment import Environment
from psfleet_launch.job.exit_codes import USAGE_EXIT
from psfleet_launch.job.job_plan import Member, Role, strategy_variables, thread_variables
from psfleet_launch.job.job_request import JobRequest, Launch
from psfleet_launch.job.resources import Resources

if TYPE_CHECKING:
    from psfleet_launch.engines.kubernetes import KubernetesSettings

__all__ = ["LOG_VOLUME", "Manifest", "endpoints", "manifests", "member_of"]

Manifest = dict[str, Any]
LOG_VOLUME = "log-volume.json"

_PORT = 9000
_USER = 1000  # the user of the image
_JOB_INDEX = "batch.kubernetes.io/job-completion-index"
_SET_INDEX = "apps.kubernetes.io/pod-index"


def member_of(pod: Manifest) -> Member | None:
    """The seat that a pod of a job fills; None: it fills none."""
    labels = pod["metadata"].get("labels", {})
    index = labels.get(_SET_INDEX, labels.get(_JOB_INDEX, ""))
    role = labels.get("psfleet.role")
    return Member(role, int(index)) if role in ("server", "worker") and index.isdigit() else None


def endpoints(request: JobRequest, name: str, said: "KubernetesSettings") -> list[str]:
    """Where the servers of a job are found, in order of rank."""
    job = "-0" if said.jobset else ""  # the first and only Job of its role
    return [f"{name}-server{job}-{rank}.{name}-server:{_PORT}" for rank in range(request.servers)]


def manifests(
    request: JobRequest, name: str, launch: Launch, said: "KubernetesSettings"
) -> dict[str, Manifest]:
    """The files of a job, by name.

    Raises:
        ConfigError: Kubernetes cannot run the job as it is asked for.
    """
    _check(request, name, launch, said)
    pods = _Pods(request, name, said)
    files = {
        "disruption-budget.json": _disruption_budget(pods),
        "network-policy.json": _network_policy(name),
    }
    if not said.jobset:
        return files | {
            "service.json": _service(name),
            "servers.json": _stateful_set(pods),
            "workers.json": _job(pods),
        }
    if request.keeps_log:
        files[LOG_VOLUME] = _shared_claim(pods)
    return files | {"jobset.json": _job_set(pods)}


def _check(request: JobRequest, name: str, launch: Launch, said: "KubernetesSettings") -> None:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--job is {name!r}; Kubernetes takes up to 40 lower case letters, digits and '-'"
        )
    if not said.image:
        raise ConfigError(
            "--engine kubernetes needs an image with psfleet and the script (--image)"
        )
    if request.keeps_snapshots or request.resume:
        raise ConfigError(
            "snapshots need a folder that all servers share, which these files do not have; use --durability "
            "log, and save with fleet.save_persistables"
        )
    for flag, wanted in (
        ("--replicas", request.replicas),
        ("--server-script", request.server_script),
        ("--stages", sum(request.copies) > 1),
        ("--chaos", launch.chaos is not None),
    ):
        if wanted:
            raise ConfigError(f"{flag} does not go with --engine kubernetes; leave it out")
    if launch.watch:
        raise ConfigError(
            f"--watch {launch.watch} does not go with --engine kubernetes, whose launcher cannot reach the "
            "servers from outside the cluster; run the launcher in a pod with --engine join and --watch "
            "0.0.0.0:9100, or watch the job with --trace and `kubectl top pods`"
        )


@dataclasses.dataclass(frozen=True)
class _Pods:
    """What the pods of a job have in common."""

    request: JobRequest
    name: str
    said: "KubernetesSettings"

    def template(self, role: Role) -> Manifest:
        """The pod of a server or a worker."""
        spec: Manifest = {
            "enableServiceLinks": False,  # they would be variables called NAME_PORT
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container(role)],
            "volumes": [
                {
                    "name": "tls",
                    "secret": {"secretName": f"{self.name}-{role}-tls", "defaultMode": 0o400},
                },
                {"name": "cache", "emptyDir": {}},
            ],
        }
        if role == "server":
            spec["terminationGracePeriodSeconds"] = 30
            spec["topologySpreadConstraints"] = [_spread(self.name)]
            if self.said.jobset and self.request.keeps_log:
                claim = {"claimName": f"{self.name}-server-log"}
                spec["volumes"].append({"name": "log", "persistentVolumeClaim": claim})
        if self.is_in_job(role):
            spec["restartPolicy"] = "Never"  # the Job counts its failures
        return {"metadata": {"labels": _labels(self.name, role)}, "spec": spec}

    def is_in_job(self, role: Role) -> bool:
        """Whether pods of a role belong to a Job, and not to a StatefulSet."""
        return role == "worker" or self.said.jobset

    def _container(self, role: Role) -> Manifest:
        request = self.request
        command = ["psfleet-server"]
        if role == "worker":
            command = ["python", request.script, *request.arguments]
        container: Manifest = {
            "name": role,
            "image": self.said.image,
            "command": command,
            "env": self._variables(role),
            "volumeMounts": [
                {"name": "tls", "mountPath": "/tls", "readOnly": True},
                {"name": "cache", "mountPath": "/cache"},
            ],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        needs = request.needs(role)
        if size := _quantities(needs.confined if role == "server" else needs):
            container["resources"] = {"requests": size, "limits": size}
        if role == "server":
            probe = {"exec": {"command": ["test", "-f", "/tmp/ready"]}, "periodSeconds": 1}
            container |= {
                "ports": [{"name": "psfleet", "containerPort": _PORT, "protocol": "TCP"}],
                "startupProbe": probe | {"failureThreshold": 300},  # it may have a long log to read
                "readinessProbe": probe,
            }
            if request.keeps_log:
                container["volumeMounts"].append({"name": "log", "mountPath": "/log"})
        return container

    def _variables(self, role: Role) -> list[Manifest]:
        request, is_server = self.request, role == "server"
        settings = {one.name: getattr(request, one.name) for one in settings_of(JobSettings)}
        settings["memory"] = request.memory if is_server else 0
        environment = Environment(
            role=role,
            servers=tuple(endpoints(request, self.name, self.said)),
            workers=request.workers,
            job=self.name,
            log_folder="/log" if is_server and request.keeps_log else "",
            ready_file="/tmp/ready" if is_server else "",
            tls="/tls",
            listen=f"$(POD_IP):{_PORT}" if is_server else "",  # its name may not be known yet
            **settings,
        )
        told = to_variables(environment, FleetSettings, JobSettings, ProcessSettings)
        told |= to_variables(request, NumberSettings) | strategy_variables(request)
        told |= {
            "PSFLEET_CACHE": "/cache",
            "OMP_NUM_THREADS": "1",
            **thread_variables(request, role),
        }
        del told["PSFLEET_RANK"]
        fields = {"PSFLEET_RANK": f"metadata.labels['{_SET_INDEX}']"}
        if self.is_in_job(role):
            fields["PSFLEET_RANK"] = f"metadata.annotations['{_JOB_INDEX}']"
        if is_server:
            fields["POD_IP"] = "status.podIP"
        return [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in sorted(fields.items())
        ] + [{"name": name, "value": value} for name, value in sorted(told.items())]


def _quantities(needs: Resources) -> dict[str, str]:
    """Resources as Kubernetes writes them; nothing of what it is not asked for."""
    asked = {"cpu": needs.cores, "memory": needs.memory}
    return {name: str(amount) for name, amount in asked.items() if amount}


def _labels(name: str, role: str) -> dict[str, str]:
    return {"psfleet.job": name, "psfleet.role": role}


def _metadata(name: str, role: str, suffix: str = "") -> Manifest:
    """Of an object that concerns a role."""
    return {"name": f"{name}-{role}{suffix}", "labels": _labels(name, role)}


def _spread(name: str) -> Manifest:
    """Servers go to different nodes while there are any."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(name, "server")},
    }


def _service(name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, "server"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # servers reach each other before they are ready
            "selector": _labels(name, "server"),
            "ports": [{"name": "psfleet", "port": _PORT}],
        },
    }


def _stateful_set(pods: _Pods) -> Manifest:
    spec: Manifest = {
        "replicas": pods.request.servers,
        "serviceName": f"{pods.name}-server",
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(pods.name, "server")},
        "template": pods.template("server"),
    }
    if pods.request.keeps_log:
        claim = _claim(pods, "ReadWriteOnce")
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "log"}, "spec": claim}]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(pods.name, "server"),
        "spec": spec,
    }


def _claim(pods: _Pods, mode: str) -> Manifest:
    """A volume for logs of servers."""
    claim: Manifest = {
        "accessModes": [mode],
        "resources": {"requests": {"storage": pods.said.volume_size}},
    }
    if pods.said.storage_class:
        claim["storageClassName"] = pods.said.storage_class
    return claim


def _shared_claim(pods: _Pods) -> Manifest:
    """The volume of all servers of a JobSet, whose pods cannot have one each."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(pods.name, "server", "-log"),
        "spec": _claim(pods, "ReadWriteMany"),
    }


def _job(pods: _Pods) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(pods.name, "worker"),
        "spec": _indexed(pods, "worker", pods.request.workers, pods.request.worker_restarts),
    }


def _job_set(pods: _Pods) -> Manifest:
    """A Job of servers, then one of workers, whose end is the end of both."""
    restarts = pods.request.server_restarts if pods.request.keeps_log else 0
    servers = _indexed(pods, "server", pods.request.servers, restarts)
    workers = _indexed(pods, "worker", pods.request.workers, pods.request.worker_restarts)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": pods.name, "labels": {"psfleet.job": pods.name}},
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": f"{pods.name}-server",
                "publishNotReadyAddresses": True,
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["worker"]},
            "replicatedJobs": [
                {"name": "server", "replicas": 1, "template": {"spec": servers}},
                {
                    "name": "worker",
                    "replicas": 1,
                    "dependsOn": [{"name": "server", "status": "Ready"}],
                    "template": {"spec": workers},
                },
            ],
        },
    }


def _indexed(pods: _Pods, role: Role, count: int, restarts: int) -> Manifest:
    """The specification of a Job with a seat for each process of a role."""
    usage = {"containerName": role, "operator": "In", "values": [USAGE_EXIT]}
    rules: list[Manifest] = [{"action": "FailJob", "onExitCodes": usage}]
    if role == "worker" or pods.request.keeps_log:  # it may be evicted without a loss
        evicted = [{"type": "DisruptionTarget", "status": "True"}]
        rules.insert(0, {"action": "Ignore", "onPodConditions": evicted})
    return {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": restarts,
        "maxFailedIndexes": 0,  # the others would wait for it
        "podReplacementPolicy": "Failed",  # never two pods in one seat
        "podFailurePolicy": {"rules": rules},
        "template": pods.template(role),
    }


def _disruption_budget(pods: _Pods) -> Manifest:
    spec: Manifest = {"selector": {"matchLabels": _labels(pods.name, "server")}}
    if pods.said.jobset:
        spec["minAvailable"] = pods.request.servers - 1  # of a Job's pods nothing else can be said
    else:
        spec["maxUnavailable"] = 1
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(pods.name, "server"),
        "spec": spec,
    }


def _network_policy(name: str) -> Manifest:
    """Only pods of the job reach its servers, and nobody reaches its workers."""
    ours = {"podSelector": {"matchLabels": {"psfleet.job": name}}}
    spec = {
        "podSelector": {"matchLabels": {"psfleet.job": name}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [ours], "ports": [{"port": _PORT}]}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": {"psfleet.job": name}},
        "spec": spec,
    }
