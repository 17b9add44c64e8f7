"""JobSet's own part of an object, as its API reference (v1alpha2) describes it.

What is in the Jobs is Kubernetes' own. The definition of a cluster has 10,000 lines, most of them for that.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
SWITCH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
ANYTHING: Schema = {"type": "object"}


def fields(*required: str, **known: Schema) -> Schema:
    """An object with these fields and no other, which Kubernetes would drop."""
    needed = {"required": [*required]} if required else {}
    return {"type": "object", "properties": known, "additionalProperties": False, **needed}


def several(item: Schema, **limits: int) -> Schema:
    """A list."""
    return {"type": "array", "items": item, **limits}


def one_of(*values: str) -> Schema:
    """One of a few texts."""
    return {"enum": [*values]}


_DEPENDENCY = fields("name", "status", name=TEXT, status=one_of("Ready", "Complete"))
_REPLICATED_JOB = fields(
    "name",
    "template",
    name=TEXT,
    groupName=TEXT,
    replicas=COUNT,
    template=fields(metadata=ANYTHING, spec=ANYTHING),
    dependsOn=several(_DEPENDENCY, maxItems=5),
)
_FAILURE_RULE = fields(
    "action",
    "name",
    name=TEXT,
    action=one_of(
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ),
    onJobFailureReasons=several(TEXT),
    onJobFailureMessagePatterns=several(TEXT),
    targetReplicatedJobs=several(TEXT),
)
_SPEC = fields(
    replicatedJobs=several(_REPLICATED_JOB),
    network=fields(enableDNSHostnames=SWITCH, publishNotReadyAddresses=SWITCH, subdomain=TEXT),
    successPolicy=fields(
        "operator", operator=one_of("All", "Any"), targetReplicatedJobs=several(TEXT)
    ),
    failurePolicy=fields(
        maxRestarts=COUNT,
        restartStrategy=one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules=several(_FAILURE_RULE),
    ),
    startupPolicy=fields("startupPolicyOrder", startupPolicyOrder=one_of("AnyOrder", "InOrder")),
    coordinator=fields("replicatedJob", replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT),
    suspend=SWITCH,
    managedBy=TEXT,
    ttlSecondsAfterFinished=COUNT,
    volumeClaimPolicies=several(ANYTHING),
)
JOBSET = fields(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=ANYTHING,
    spec=_SPEC,
)
