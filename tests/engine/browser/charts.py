"""What the charts of a page say."""

from typing import Any


def captions(page: Any) -> dict[str, dict[str, float | None]]:
    """The numbers that the charts' captions show, in full, by title and label."""
    charts = page.evaluate(
        """() => [...document.querySelectorAll(".chart")].map((chart) => [
            chart.querySelector("h3").firstChild.textContent,
            [...chart.querySelectorAll(".legend li")].map((item) => [
                item.childNodes[1].textContent,
                item.querySelector(".value .number")?.title ?? null,
            ]),
        ])"""
    )
    return {title: {label: None if text is None else float(text) for label, text in values} for title, values in charts}
