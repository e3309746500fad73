"""The findings of ``lockstep doctor`` as a part of its page, from the docstrings of the functions that check."""

from lockstep.study.doctor import examine  # noqa: F401  # its imports fill the table
from lockstep.study.doctor.findings import CHECKS

MARKER = "<!-- findings: from the source -->"


def as_sections() -> str:
    """Return a heading for each part of the machine, and under it one for each finding."""
    lines: list[str] = []
    for section in dict.fromkeys(check.facts.section for check in CHECKS):
        lines += [f"# {section}", ""]
        for check in CHECKS:
            if check.facts.section == section:
                explanation = check.explanation.replace("``", "`")
                lines += [f"### {check.kind}", explanation, "", f"{check.cost} {check.fix}", ""]
    return "\n".join(lines)
