"""What the front-end believes to be in the instances' prefix caches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaserve.cached_prefixes import CachedPrefixes, prefix_of

sequences = st.lists(st.integers(0, 1), max_size=40)


@given(first=sequences, second=sequences, block_size=st.integers(1, 8))
def test_what_two_sequences_share_is_counted_in_full_blocks(first: list[int], second: list[int], block_size: int) -> None:
    cache = CachedPrefixes(num_blocks=1000)
    cache.remember(prefix_of(first, block_size), len(first))
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    assert cache.tokens_of(prefix_of(second, block_size)) == shared // block_size * block_size


@given(sequence=sequences, computed=st.integers(0, 40))
def test_only_what_was_computed_is_there(sequence: list[int], computed: int) -> None:
    cache = CachedPrefixes(num_blocks=1000)
    cache.remember(prefix_of(sequence, 4), computed)
    assert cache.tokens_of(prefix_of(sequence, 4)) == min(computed, len(sequence)) // 4 * 4


@given(learnt=st.lists(sequences, max_size=10), num_blocks=st.integers(1, 20))
def test_an_instance_never_has_more_than_its_blocks(learnt: list[list[int]], num_blocks: int) -> None:
    cache = CachedPrefixes(num_blocks)
    for sequence in learnt:
        cache.remember(prefix_of(sequence, 2), len(sequence))
        assert cache.tokens_of(prefix_of(sequence, 2)) == 2 * min(len(sequence) // 2, num_blocks)


def test_the_end_of_an_old_sequence_goes_before_its_beginning() -> None:
    cache = CachedPrefixes(num_blocks=3)
    old, new = prefix_of([1, 2, 3, 4], 2), prefix_of([7, 8, 9, 10], 2)
    cache.remember(old, 4)
    cache.remember(new, 4)
    assert (cache.tokens_of(old), cache.tokens_of(new)) == (2, 4)


def test_another_adapter_s_blocks_are_not_the_same() -> None:
    cache = CachedPrefixes(num_blocks=10)
    cache.remember(prefix_of([1, 2], 2, "adapter"), 2)
    assert cache.tokens_of(prefix_of([1, 2], 2)) == 0


def test_what_turned_out_to_be_gone_is_forgotten() -> None:
    cache = CachedPrefixes(num_blocks=10)
    prefix = prefix_of([1, 2, 3, 4, 5, 6], 2)
    cache.remember(prefix, 6)
    cache.correct(prefix, 3)
    assert cache.tokens_of(prefix) == 2
