"""Statistics to Plotly figures, light on bytes and readable in both themes."""

from __future__ import annotations

from typing import Any

from plotly.subplots import make_subplots

from engines import SIDES, GenerationStats, RunRecord, typical
from specdec_ui.theme import SIDE_COLOURS, SIDE_NAMES

HEIGHT = 340


def latency_figure(record: RunRecord) -> Any:
    """Return the latency of each side that ran to its end: first token, per token, total.

    Bars are those of the typical repeat, whiskers the range. None where no side ran to its end.
    """
    # A run that was stopped has no total, and its first tokens may not be like the rest.
    whole = {
        side: [stats for stats in record.stats(side) if stats.finish_reason != "cancelled"]
        for side in SIDES
    }
    shown = {side: stats for side, stats in whole.items() if stats}
    if not shown:
        return None
    measures = (
        ("Time to first token, s", "%{x:.2f} s", lambda stats: stats.time_to_first_token_s),
        ("Time per output token, ms", "%{x:.1f} ms", _time_per_token_ms),
        ("Total time, s", "%{x:.2f} s", lambda stats: stats.elapsed_s),
    )
    figure = make_subplots(
        rows=3, cols=1, subplot_titles=[name for name, _, _ in measures], vertical_spacing=0.17
    )
    for row, (_, template, measure) in enumerate(measures, start=1):
        longest = max(
            (value for stats in shown.values() for item in stats if (value := measure(item))),
            default=1.0,
        )
        # Room for the figure behind the longest bar.
        figure.update_xaxes(row=row, col=1, range=[0, longest * 1.25])
        for side in reversed(SIDES):  # Plotly draws horizontal bars from the bottom up
            values = [value for stats in shown.get(side, []) if (value := measure(stats))]
            if not values:
                continue
            middle = measure(typical(shown[side]))
            has_range = len(values) > 1
            figure.add_bar(
                row=row,
                col=1,
                x=[middle],
                y=[SIDE_NAMES[side]],
                orientation="h",
                marker_color=SIDE_COLOURS[side],
                texttemplate=template,
                textposition="outside",
                cliponaxis=False,
                hovertemplate=f"{SIDE_NAMES[side]}: {template}<extra></extra>",
                error_x={
                    "array": [max(values) - middle],
                    "arrayminus": [middle - min(values)],
                    "color": "#767676",
                }
                if has_range
                else None,
            )
    figure.update_layout(
        template="none",
        height=HEIGHT,
        showlegend=False,
        margin={"l": 90, "r": 20, "t": 30, "b": 25},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#767676", "size": 12},
    )
    figure.update_annotations(font_size=13)
    figure.update_xaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    return figure


def _time_per_token_ms(stats: GenerationStats) -> float | None:
    seconds = stats.time_per_token_s
    return None if seconds is None else seconds * 1000
