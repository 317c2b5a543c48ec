"""Services side by side: each in a process of its own, with a Ray of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any


@contextlib.contextmanager
def running_services(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Start one service per configuration, one after the other; name -> its gRPC address.

    They stop with the block, or when this process ends.

    Raises:
        RuntimeError: one does not come up; the text is its own.
    """
    context = multiprocessing.get_context("spawn")  # a fork would take this process's threads' locks along
    with contextlib.ExitStack() as stack:
        addresses: dict[str, str] = {}
        for name, content in configs.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(dict(content), theirs), name=f"service {name}")
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ours.close)
            try:
                address, error = ours.recv()
            except EOFError:
                raise RuntimeError(f"the service {name!r} ended before it was up") from None
            if error:
                raise RuntimeError(f"the service {name!r} does not start: {error}")
            addresses[name] = address
        yield addresses


def _serve(content: dict[str, Any], parent: Connection) -> None:
    """The child: a service until the parent closes its end."""
    from paceline.actors.engine.errors import PacelineError
    from paceline.cluster.config import load_config
    from paceline.cluster.service_start import check_models, serving

    try:
        config = load_config(content)
        check_models(config)
        with serving(config, address="local") as service:
            parent.send((service.grpc_address, ""))
            with contextlib.suppress(EOFError, KeyboardInterrupt):
                parent.recv()
    except PacelineError as error:
        parent.send(("", str(error)))
