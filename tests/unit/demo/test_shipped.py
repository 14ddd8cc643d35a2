"""Promises that the day inside the package is the repository's first one, with its attribution."""

from pathlib import Path

from procession.demo.__main__ import SHIPPED
from procession.demo.ledgers import find_ledgers, read_text, split_lines

EXAMPLES = Path(__file__).parents[3] / "examples" / "ledger"


def test_the_shipped_day_is_the_first_of_the_examples() -> None:
    (shipped,), first = find_ledgers(SHIPPED), find_ledgers(EXAMPLES)[0]

    assert shipped.name == first.name
    assert shipped.path.read_bytes() == first.path.read_bytes()
    assert len(split_lines(shipped.name, read_text(shipped))) == 3_108


def test_the_shipped_day_names_its_source_and_licence() -> None:
    text = (SHIPPED / "README.md").read_text(encoding="utf-8")

    for said in ("Online Retail", "10.24432/C5BW33", "CC BY 4.0", "Changes: "):
        assert said in text
