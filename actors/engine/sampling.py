"""One token per row of logits, by the shared-noise rule; exact, and the same alone or in any batch.

Order of the filters, each on the law that the one before it left, renormalised: temperature, min-p, top-k,
top-p. It is vLLM's (v1 sampler: temperature, then the argmax-invariant processors, min-p among them, then
top-k and top-p); min-p therefore compares *tempered* probabilities. ``truncation`` says what they keep: top-k
keeps exactly k tokens, and top_k = 1 is greedy.

A token is drawn as the argmax of log weight + Gumbel noise (Gumbel-max); ``race`` finds it.

Array work is done with numpy on host memory: on a CPU its kernels for these shapes are several times
faster than torch's. Rows of another device are copied to the host, except for greedy rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.noise import seed_bits
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.race import Race
from paceline.actors.engine.truncation import Logits, cut


class LogitEdit(Protocol):
    """What a sequence's processors do to the logits of one position, before the temperature."""

    def apply(self, values: Logits) -> None:
        """Change ``values`` [V] float32 in place."""


Edits = Sequence[LogitEdit | None]
"""One per row; None = the row stays as it is."""


def process_logits(
    logits: torch.Tensor, params: Sequence[SamplingParams], edits: Edits | None = None
) -> torch.Tensor:
    """Log weights after edits, temperature, min-p, top-k and top-p.

    Args:
        logits: ``[R, V]`` float32, not changed.
        params: one per row.

    Returns:
        float64 ``[R, V]`` on the device of ``logits``, unnormalised: the best token of a row has 0, removed
        tokens −inf. A greedy row keeps its argmax only.

    Raises:
        NonFiniteLogitsError: naming the rows without a law.
    """
    _check_shapes(logits, len(params))
    logits = edited(logits, edits)
    best_ids = _best_ids(logits)
    host = _to_host(logits)
    weights = np.full(host.shape, -np.inf)
    for row, (values, best_id, wanted) in enumerate(zip(host, best_ids, params, strict=True)):
        best = float(values[best_id])
        if wanted.greedy:
            weights[row, best_id] = 0.0
            continue
        ids = cut(values, best, wanted).kept_ids(values)
        weights[row, ids] = (values[ids].astype(np.float64) - best) / wanted.temperature
    return torch.from_numpy(weights).to(logits.device)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    edits: Edits | None = None,
) -> list[int]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` float32, not changed.
        params: one per row.
        positions: one per row, the absolute index in its sequence of the token being drawn.

    Returns:
        R token ids. Row r depends on the r-th entry of each argument only. Greedy rows have
        the argmax, ties to the lowest id.

    Raises:
        NonFiniteLogitsError: naming the rows without a law; no row is drawn then.
    """
    _check_shapes(logits, len(params))
    if len(positions) != len(params):
        raise ValueError(f"{len(params)} rows but {len(positions)} positions")
    logits = edited(logits, edits)
    tokens = _best_ids(logits)
    random_rows = [row for row, wanted in enumerate(params) if not wanted.greedy and wanted.top_k != 1]
    if not random_rows:
        return tokens
    if len(random_rows) < len(params):
        logits = logits[torch.tensor(random_rows, device=logits.device)]
    host = _to_host(logits)
    random_params = [params[row] for row in random_rows]
    best_ids = np.array([tokens[row] for row in random_rows], dtype=np.int64)
    best = host[np.arange(len(host)), best_ids].tolist()
    race = Race.start(
        host,
        best_ids,
        [cut(*row) for row in zip(host, best, random_params, strict=True)],
        temperatures=np.array([wanted.temperature for wanted in random_params]),
        seeds=np.array([seed_bits(wanted.seed) for wanted in random_params], dtype=np.int64),
        positions=np.array([positions[row] for row in random_rows], dtype=np.int64),
    )
    drawn = race.run(host)
    for row, token in zip(random_rows, drawn, strict=True):
        tokens[row] = token
    return tokens


def edited(logits: torch.Tensor, edits: Edits | None) -> torch.Tensor:
    """``logits`` [R, V] with the edits applied: itself where there are none, else a copy on the host.

    A row without a law stays as it is, whatever the edit would remove: it is a fault of the model.
    """
    if edits is None or not any(edits):
        return logits
    host = _to_host(logits).copy()
    for values, edit in zip(host, edits, strict=True):
        if edit is not None and math.isfinite(values.max()):
            edit.apply(values)
    return torch.from_numpy(host)


def has_law(values: torch.Tensor) -> bool:
    """Whether a token can be drawn from ``values`` [V]: none is NaN or +inf, and not all are −inf."""
    return math.isfinite(float(values.max()))


def _check_shapes(logits: torch.Tensor, num_rows: int) -> None:
    if logits.dim() != 2 or logits.shape[0] != num_rows or logits.shape[1] == 0:
        raise ValueError(f"logits must be [R = {num_rows}, V > 0], got {list(logits.shape)}")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")


def _to_host(logits: torch.Tensor) -> Logits:
    host: Logits = logits.detach().cpu().contiguous().numpy()
    return host


def _best_ids(logits: torch.Tensor) -> list[int]:
    """Argmax per row, ties to the lowest id. Both numpy and torch promise the first maximum and let a NaN
    win, so that the winner's value alone tells whether the row has a law.

    Raises:
        NonFiniteLogitsError: for rows whose maximum is not finite.
    """
    if logits.shape[0] == 0:
        return []
    if logits.device.type == "cpu":
        host = _to_host(logits)
        best_ids = host.argmax(axis=1)
        finite = np.isfinite(host[np.arange(len(host)), best_ids])
    else:
        device_ids = logits.argmax(dim=1)
        maxima = logits.gather(1, device_ids[:, None])[:, 0]
        best_ids, finite = device_ids.cpu().numpy(), torch.isfinite(maxima).cpu().numpy()
    if not finite.all():
        raise NonFiniteLogitsError(tuple(int(row) for row in np.flatnonzero(~finite)))
    return [int(token) for token in best_ids]
