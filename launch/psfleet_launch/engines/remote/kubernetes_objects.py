"""The Kubernetes objects of a job. Pure, and without secrets: pods name the Secret that they mount.

Servers are a StatefulSet behind a headless Service, so that each keeps its name and its volume. Workers
are an Indexed Job.
"""

import dataclasses
import re
from typing import Any

from psfleet.errors import ConfigError
from psfleet.settings.declaration import settings_of, to_variables
from psfleet.settings.environment import Environment
from psfleet.settings.groups import FleetSettings, JobSettings, NumberSettings, ProcessSettings
from psfleet_launch.job.job_plan import Role, strategy_variables
from psfleet_launch.job.job_request import JobRequest, Launch

__all__ = ["Manifest", "manifests"]

Manifest = dict[str, Any]

_PORT = 9000
_USER = 1000  # the user of the image
_USAGE_EXIT = 2  # bad usage, which no second attempt mends
_ROOM = 512 << 20  # bytes of a server beside its tables
_RANKS = {
    "server": "metadata.labels['apps.kubernetes.io/pod-index']",
    "worker": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
}


def manifests(request: JobRequest, name: str, launch: Launch) -> dict[str, Manifest]:
    """The files of a job, by name.

    Raises:
        ConfigError: Kubernetes cannot run the job as it is asked for.
    """
    _check(request, name, launch)
    pods = _Pods(request, name, launch)
    return {
        "service.json": _service(name),
        "servers.json": _stateful_set(pods),
        "workers.json": _job(pods),
        "disruption-budget.json": _disruption_budget(name),
        "network-policy.json": _network_policy(name),
    }


def _check(request: JobRequest, name: str, launch: Launch) -> None:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--job is {name!r}; Kubernetes takes up to 40 lower case letters, digits and '-'"
        )
    if not launch.image:
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
    ):
        if wanted:
            raise ConfigError(f"{flag} needs psfleet's launcher, which Kubernetes replaces")


@dataclasses.dataclass(frozen=True)
class _Pods:
    """What the pods of a job have in common."""

    request: JobRequest
    name: str
    launch: Launch

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
        else:
            spec["restartPolicy"] = "Never"  # the Job counts its failures
        return {"metadata": {"labels": _labels(self.name, role)}, "spec": spec}

    def _container(self, role: Role) -> Manifest:
        request = self.request
        command = ["psfleet-server"]
        if role == "worker":
            command = ["python", request.script, *request.arguments]
        container: Manifest = {
            "name": role,
            "image": self.launch.image,
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
        if role == "server":
            probe = {"exec": {"command": ["test", "-f", "/tmp/ready"]}, "periodSeconds": 1}
            container |= {
                "ports": [{"name": "psfleet", "containerPort": _PORT}],
                "startupProbe": probe | {"failureThreshold": 300},  # it may have a long log to read
                "readinessProbe": probe,
            }
            if request.memory:
                size = str(request.memory * 5 // 4 + _ROOM)
                container["resources"] = {"requests": {"memory": size}, "limits": {"memory": size}}
            if request.keeps_log:
                container["volumeMounts"].append({"name": "log", "mountPath": "/log"})
        return container

    def _variables(self, role: Role) -> list[Manifest]:
        request, is_server = self.request, role == "server"
        settings = {one.name: getattr(request, one.name) for one in settings_of(JobSettings)}
        settings["memory"] = request.memory if is_server else 0
        environment = Environment(
            role=role,
            servers=tuple(
                f"{self.name}-server-{rank}.{self.name}-server:{_PORT}"
                for rank in range(request.servers)
            ),
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
        told |= {"PSFLEET_CACHE": "/cache", "OMP_NUM_THREADS": "1"}
        del told["PSFLEET_RANK"]
        fields = {"PSFLEET_RANK": _RANKS[role]}
        if is_server:
            fields["POD_IP"] = "status.podIP"
        return [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in sorted(fields.items())
        ] + [{"name": name, "value": value} for name, value in sorted(told.items())]


def _labels(name: str, role: str) -> dict[str, str]:
    return {"psfleet.job": name, "psfleet.role": role}


def _metadata(name: str, role: str) -> Manifest:
    return {"name": f"{name}-{role}", "labels": _labels(name, role)}


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
        claim: Manifest = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": pods.launch.volume_size}},
        }
        if pods.launch.storage_class:
            claim["storageClassName"] = pods.launch.storage_class
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "log"}, "spec": claim}]
    metadata = _metadata(pods.name, "server")
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _job(pods: _Pods) -> Manifest:
    workers = pods.request.workers
    usage = {"containerName": "worker", "operator": "In", "values": [_USAGE_EXIT]}
    spec = {
        "completions": workers,
        "parallelism": workers,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": pods.request.worker_restarts,
        "maxFailedIndexes": 0,  # the others would wait for it
        "podReplacementPolicy": "Failed",  # never two pods in one seat
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "FailJob", "onExitCodes": usage},
            ]
        },
        "template": pods.template("worker"),
    }
    metadata = _metadata(pods.name, "worker")
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _disruption_budget(name: str) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(name, "server")}}
    metadata = _metadata(name, "server")
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
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
        "metadata": {"name": name},
        "spec": spec,
    }
