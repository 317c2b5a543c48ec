import pytest

from paceline.actors.engine.errors import IncompatibleDraftError
from paceline.actors.vocabulary import check_compatible, emulated_vocabulary_hash, vocabulary_hash


def test_the_hash_depends_on_the_map_alone() -> None:
    vocabulary = {"a": 0, "b": 1, "é": 2, "\udc80": 3}
    assert vocabulary_hash(vocabulary) == vocabulary_hash(dict(reversed(vocabulary.items())))
    assert len(vocabulary_hash(vocabulary)) == 32


@pytest.mark.parametrize(
    "other",
    [{"a": 1, "b": 0}, {"a": 0}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 2}, {"a0:1:b": 0}, {"ab": 0, "": 1}],
)
def test_any_other_map_has_another_hash(other: dict[str, int]) -> None:
    assert vocabulary_hash(other) != vocabulary_hash({"a": 0, "b": 1})


def test_emulated_models_agree_by_size() -> None:
    assert emulated_vocabulary_hash(64) == emulated_vocabulary_hash(64)
    assert emulated_vocabulary_hash(64) != emulated_vocabulary_hash(65)


def test_an_incompatible_draft_is_told_both_models_and_why() -> None:
    one, other = vocabulary_hash({"a": 0}), vocabulary_hash({"b": 0})
    check_compatible(draft_model="d", draft_vocabulary=one, target_model="t", target_vocabulary=one)
    with pytest.raises(IncompatibleDraftError, match=r"'small'.*'large'.*tokenizer"):
        check_compatible(
            draft_model="small", draft_vocabulary=one, target_model="large", target_vocabulary=other
        )
    with pytest.raises(IncompatibleDraftError, match="missing"):
        check_compatible(draft_model="d", draft_vocabulary=b"", target_model="t", target_vocabulary=other)
