"""Every rule, broken once, is noticed by a named test. Minutes long: pytest -m slow tests/test_mutations.py"""

from __future__ import annotations

import pytest

from mutations import MUTATIONS, ROOT, Mutation, main, try_one


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_named_tests_exist_and_the_text_is_there(mutation: Mutation) -> None:
    """Quick: the list fits the code it breaks."""
    assert mutation.old in (ROOT / "src" / "consilience" / mutation.file).read_text()
    path, _, name = mutation.test.partition("::")
    assert f"def {name}" in (ROOT / "tests" / path).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_caught(mutation: Mutation) -> None:
    caught, said = try_one(mutation)
    assert caught, said


@pytest.mark.slow
def test_the_script_checks_itself_first() -> None:
    """One mutation by the whole script: named tests pass unmutated, the copy is what is imported, and the break is caught."""
    assert main(["MR without the half"]) == 0
