"""The part of KubeRay's ``RayService`` (ray.io/v1, KubeRay 1.5.1 and newer) that the manifest uses, as JSON
Schema.

Written for these tests from the field reference of KubeRay's custom resource definitions. Objects are closed:
a field that is not listed here is one that nobody has looked up there.
"""

from __future__ import annotations

from typing import Any


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list_of(items: dict[str, Any], least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


def _one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
PORT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": TEXT}
PORT_NAME: dict[str, Any] = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,13}[a-z0-9])?$"}
NAME: dict[str, Any] = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 47}
QUANTITY: dict[str, Any] = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|[kMGTPE]i?)?$"}
QUANTITIES: dict[str, Any] = {"type": "object", "additionalProperties": QUANTITY}
LABEL_VALUE = {"type": "string", "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", "maxLength": 63}
LABELS: dict[str, Any] = {
    "type": "object",
    "propertyNames": {
        "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
    },
    "additionalProperties": LABEL_VALUE,
}

CONTAINER = _closed(
    ("name", "image"),
    name=NAME,
    image=TEXT,
    resources=_closed(limits=QUANTITIES, requests=QUANTITIES),
    env=_list_of(_closed(("name", "value"), name=TEXT, value=TEXT)),
    ports=_list_of(_closed(("containerPort",), name=PORT_NAME, containerPort=PORT)),
    securityContext=_closed(allowPrivilegeEscalation=FLAG, runAsNonRoot=FLAG, runAsUser=COUNT),
    volumeMounts=_list_of(_closed(("name", "mountPath"), name=NAME, mountPath=TEXT, readOnly=FLAG)),
)

SECRET = _closed(
    ("secretName",), secretName=NAME, items=_list_of(_closed(("key", "path"), key=TEXT, path=TEXT))
)

TEMPLATE = _closed(
    ("spec",),
    spec=_closed(
        ("containers",),
        containers=_list_of(CONTAINER),
        terminationGracePeriodSeconds=COUNT,
        automountServiceAccountToken=FLAG,
        nodeSelector=LABELS,
        tolerations=_list_of(
            _closed(
                key=TEXT,
                operator=_one_of("Exists", "Equal"),
                effect=_one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
            )
        ),
        volumes=_list_of(_closed(("name", "secret"), name=NAME, secret=SECRET)),
    ),
)

RAY_CLUSTER = _closed(
    ("headGroupSpec",),
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=_closed(
        version=_one_of("v1", "v2"),
        upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
        idleTimeoutSeconds=COUNT,
    ),
    authOptions=_closed(mode=_one_of("disabled", "token")),
    headGroupSpec=_closed(
        ("template",), labels=LABELS, resources=TEXTS, rayStartParams=TEXTS, template=TEMPLATE
    ),
    workerGroupSpecs=_list_of(
        _closed(
            ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
            groupName=NAME,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            labels=LABELS,
            resources=TEXTS,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        )
    ),
)

RAY_SERVICE = _closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_closed(("name",), name=NAME, namespace=NAME),
    spec=_closed(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=TEXT,
        upgradeStrategy=_closed(type=_one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None")),
        rayClusterDeletionDelaySeconds=COUNT,
        serveService=_closed(
            spec=_closed(
                type=_one_of("ClusterIP", "NodePort", "LoadBalancer"),
                ports=_list_of(
                    _closed(("port",), name=PORT_NAME, port=PORT, targetPort=PORT, appProtocol=TEXT)
                ),
            )
        ),
        rayClusterConfig=RAY_CLUSTER,
    ),
)
