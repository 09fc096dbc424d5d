"""What a simulated policy knows of the lengths of answers."""

from __future__ import annotations

import numpy as np
import pytest

from dynaserve.bench import expected_lengths
from dynaserve.errors import ConfigError
from workloads.trace import MOST_TOKENS

OUTPUTS = [1, 10, 100, 1000] * 2000


def expected(how: str, seed: int = 1) -> list[int]:
    return expected_lengths.expected(how, OUTPUTS, np.random.default_rng(seed))


def test_lengths_can_be_known_exactly_on_average_or_not_at_all() -> None:
    assert expected("exact") == OUTPUTS
    assert expected("mean") == [round(1111 / 4)] * len(OUTPUTS)
    assert expected("fixed:1467") == [1467] * len(OUTPUTS)
    assert expected(f"fixed:{MOST_TOKENS}") == [MOST_TOKENS] * len(OUTPUTS)


def test_a_lognormal_error_has_its_sigma_and_a_median_of_1() -> None:
    factors = np.array(expected("lognormal:0.5"))[3::4] / 1000
    assert float(np.median(factors)) == pytest.approx(1.0, rel=0.05)
    assert float(np.std(np.log(factors))) == pytest.approx(0.5, rel=0.05)
    assert min(expected("lognormal:3")) >= 1
    assert (min(expected("lognormal:10")), max(expected("lognormal:10"))) == (1, MOST_TOKENS)


def test_the_same_seed_errs_the_same() -> None:
    assert expected("lognormal:0.5") == expected("lognormal:0.5")
    assert expected("lognormal:0.5") != expected("lognormal:0.5", seed=2)


@pytest.mark.parametrize(
    "how",
    [
        *("", "best", "exact:1", "fixed", "fixed:0", "fixed:1.5", f"fixed:{MOST_TOKENS + 1}", "fixed:1e30", "fixed:inf"),
        *("lognormal:-1", "lognormal:nan", "lognormal:"),
    ],
)
def test_anything_else_is_refused(how: str) -> None:
    with pytest.raises(ConfigError, match="accepted are exact, mean"):
        expected_lengths.check(how)
