"""Turns the log-probabilities of options into probabilities, without what a model prefers whatever it is asked about.

Language models prefer some words and some places in a list. Content-free calibration divides by the probabilities that
the options have for an empty input (Zhao et al. 2021, "Calibrate Before Use": diagonal W, no bias). A second order of
the options averages the preference for places out (Wang et al. 2023, "Large Language Models are not Fair Evaluators";
Pezeshkpour and Hruschka 2023, "Large Language Models Sensitivity to the Order of Options").
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxpaged.core.engine.readout import normalized


def probabilities(log_probabilities: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Returns them normalized over the options. Raises ValueError if no option has a probability."""
    return normalized([each / temperature for each in log_probabilities])


def calibrated(log_probabilities: Sequence[float], content_free: Sequence[float]) -> list[float]:
    """Returns log-probabilities, up to a constant, that would be equal for an empty input. An option that is impossible
    for an empty input stays as it is."""
    return [own - free if free > -1e30 else own for own, free in zip(log_probabilities, content_free, strict=True)]


def mean(of_orders: Sequence[Sequence[float]]) -> list[float]:
    """Returns the mean of probabilities in several orders. All are in the order of the first."""
    return [sum(each) / len(of_orders) for each in zip(*of_orders, strict=True)]
