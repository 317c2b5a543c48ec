"""The Serve configuration file, for ``serve deploy`` and KubeRay: how the service starts on a cluster."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from paceline.cluster.config import PacelineConfig
from paceline.cluster.runtime import SERVICER_FUNCTION
from paceline.cluster.service_start import APPLICATION_NAME, ROUTE_PREFIX

VERSION_VARIABLE = "PACELINE_VERSION"
IMPORT_PATH = "paceline.cluster.application:build_app"


def serve_config(service: PacelineConfig, proxy_location: str = "EveryNode") -> dict[str, Any]:
    """What ``serve deploy`` takes.

    Args:
        service: as the application gets it, defaults left out.
        proxy_location: where the endpoints listen.
    """
    gateway = service.gateway
    return {
        "proxy_location": proxy_location,
        "http_options": {"host": gateway.http_host, "port": gateway.http_port},
        "grpc_options": {
            "port": gateway.grpc_port,
            "grpc_servicer_functions": [SERVICER_FUNCTION],
            "enable_reflection": True,
        },
        "applications": [
            {
                "name": APPLICATION_NAME,
                "route_prefix": ROUTE_PREFIX,
                "import_path": IMPORT_PATH,
                # Serve replaces replicas when something here has changed: another release has to show.
                "runtime_env": {"env_vars": {VERSION_VARIABLE: importlib.metadata.version("paceline")}},
                "args": service.given(),
            }
        ],
    }
