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
from typing import Final, Protocol

import numpy as np
import torch

from paceline.actors.engine.errors import NonFiniteLogitsError
from paceline.actors.engine.noise import seed_bits
from paceline.actors.engine.parameters import SamplingParams
from paceline.actors.engine.race import Racer, winners
from paceline.actors.engine.truncation import Logits, cut

_ROW_BY_ROW: Final = 8
"""Up to so many rows one call for each is faster than one for all."""


class LogitEdit(Protocol):
    """What a sequence's processors do to the logits of one position, before the temperature."""

    def apply(self, values: Logits) -> None:
        """Change ``values`` [V] float32 in place."""


Edits = Sequence[LogitEdit | None]
"""One per row; None = the row stays as it is."""


def process_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log weights after temperature, min-p, top-k and top-p.

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
    host = _to_host(logits)
    best_ids = _best_ids_on_host(host, range(len(params)))
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
    rows: Sequence[int] | None = None,
) -> list[int]:
    """Draw one token from each of some rows.

    Args:
        logits: ``[N, V]`` float32, not changed.
        params: R, one per row that is drawn from.
        positions: R, the absolute index in its sequence of the token being drawn.
        rows: R indices into ``logits``, ascending: the rows that are drawn from; None = all. Others are not
            looked at.

    Returns:
        R token ids. The r-th depends on the r-th entry of each argument only. Greedy rows have
        the argmax, ties to the lowest id.

    Raises:
        NonFiniteLogitsError: naming, as indices below R, the rows without a law; no row is drawn then.
    """
    _check_shapes(logits, len(params) if rows is None else None)
    if rows is None:
        rows = range(len(params))
    if not len(positions) == len(params) == len(rows):
        raise ValueError(f"{len(rows)} rows but {len(params)} parameters and {len(positions)} positions")
    host = _to_host(logits) if logits.device.type == "cpu" else None
    tokens = _best_ids(logits, rows) if host is None else _best_ids_on_host(host, rows)
    drawn = [index for index, wanted in enumerate(params) if not wanted.greedy and wanted.top_k != 1]
    if not drawn:
        return tokens
    drawn_rows = [rows[index] for index in drawn]
    values = _rows_to_host(logits, drawn_rows) if host is None else _rows_of(host, drawn_rows)
    racers: list[Racer] = []
    for row, index in zip(values, drawn, strict=True):
        wanted = params[index]
        best = float(row[tokens[index]])
        racers.append(
            Racer(
                tokens[index],
                best,
                cut(row, best, wanted),
                wanted.temperature,
                seed_bits(wanted.seed),
                positions[index],
            )
        )
    for index, token in zip(drawn, winners(values, racers), strict=True):
        tokens[index] = token
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


def _check_shapes(logits: torch.Tensor, num_rows: int | None) -> None:
    """``num_rows``: how many there must be; None: any number."""
    if logits.dim() != 2 or num_rows not in (None, logits.shape[0]) or logits.shape[1] == 0:
        wanted = "N" if num_rows is None else f"R = {num_rows}"
        raise ValueError(f"logits must be [{wanted}, V > 0], got {list(logits.shape)}")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")


def _to_host(logits: torch.Tensor) -> Logits:
    """Without a copy where they are there already, whatever their strides."""
    host: Logits = logits.detach().cpu().numpy()
    return host


def _rows_of(host: Logits, rows: Sequence[int]) -> Logits:
    """Some rows, ascending, contiguous; copied only where they are scattered."""
    adjoining = rows[-1] - rows[0] + 1 == len(rows)
    return np.ascontiguousarray(host[rows[0] : rows[-1] + 1] if adjoining else host[list(rows)])


def _rows_to_host(logits: torch.Tensor, rows: Sequence[int]) -> Logits:
    return np.ascontiguousarray(_to_host(_rows_on_device(logits, rows)))


def _rows_on_device(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == len(logits):
        return logits
    return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]


# Argmax per row, ties to the lowest id. Both numpy and torch promise the first maximum and let a NaN win, so
# that the winner's value alone tells whether the row has a law. Both raise NonFiniteLogitsError for rows
# whose maximum is not finite.


def _best_ids_on_host(host: Logits, rows: Sequence[int]) -> list[int]:
    if len(rows) == len(host) and len(rows) > _ROW_BY_ROW:
        best_ids: list[int] = host.argmax(axis=1).tolist()
    else:
        best_ids = [int(host[row].argmax()) for row in rows]
    _check_maxima([math.isfinite(host[row, best_id]) for row, best_id in zip(rows, best_ids, strict=True)])
    return best_ids


def _best_ids(logits: torch.Tensor, rows: Sequence[int]) -> list[int]:
    wanted = _rows_on_device(logits, rows)
    device_ids = wanted.argmax(dim=1)
    maxima = wanted.gather(1, device_ids[:, None])[:, 0]
    best_ids: list[int] = device_ids.tolist()
    _check_maxima(torch.isfinite(maxima).tolist())
    return best_ids


def _check_maxima(finite: Sequence[bool]) -> None:
    if not all(finite):
        raise NonFiniteLogitsError(tuple(row for row, is_finite in enumerate(finite) if not is_finite))
