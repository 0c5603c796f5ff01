"""Statistics to Plotly figures, light on bytes and readable in both themes."""

from __future__ import annotations

from typing import Any

from plotly.subplots import make_subplots

from engines import SIDES, GenerationStats, RunRecord, typical
from specdec_ui.state import TuneState
from specdec_ui.theme import (
    AGREEMENT_COLOUR,
    LOSS_COLOUR,
    OVERLAP_COLOUR,
    SIDE_COLOURS,
    SIDE_NAMES,
)

HEIGHT = 340
GREY = "#767676"  # readable on both themes' backgrounds
GRID = "rgba(128,128,128,0.25)"


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
                    "color": GREY,
                }
                if has_range
                else None,
            )
    _dress(figure, showlegend=False, margin={"l": 90, "r": 20, "t": 30, "b": 25})
    return figure


def tuning_figure(state: TuneState) -> Any:
    """Return how a draft learns: its acceptance above, its loss below, over minutes of training.

    None where nothing is known yet.
    """
    if not state.num_points:
        return None
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        subplot_titles=[
            "On text not trained on, %",
            "Training loss; from half-way on with the overlap",
        ],
        vertical_spacing=0.16,
        row_heights=[0.6, 0.4],
    )
    minutes = [round(item.minutes, 3) for item in state.validations]
    for name, symbol, colour, values in (
        ("Greedy agreement", "circle", AGREEMENT_COLOUR, [v.agreement for v in state.validations]),
        (
            "Acceptance rate at temperature 1",
            "diamond",
            OVERLAP_COLOUR,
            [v.overlap for v in state.validations],
        ),
    ):
        figure.add_scatter(
            row=1,
            col=1,
            x=minutes,
            y=[round(100 * value, 1) for value in values],
            name=name,
            mode="lines+markers",
            line_color=colour,
            marker={"symbol": symbol, "size": 7},
            cliponaxis=False,
            hovertemplate=f"{name}: %{{y:.1f}} %<extra></extra>",
        )
    figure.add_scatter(
        row=2,
        col=1,
        x=[round(minutes, 3) for minutes, _ in state.losses],
        y=[round(loss, 3) for _, loss in state.losses],
        mode="lines",
        line_color=LOSS_COLOUR,
        showlegend=False,
        hovertemplate="Loss: %{y:.3f}<extra></extra>",
    )
    _dress(
        figure,
        legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"},
        margin={"l": 40, "r": 10, "t": 30, "b": 25},
        hovermode="x",
    )
    figure.update_xaxes(row=2, col=1, title_text="Minutes of training", title_standoff=5)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero", gridcolor=GRID, zeroline=False)
    return figure


def _dress(figure: Any, **layout: Any) -> None:
    """Give a figure what all of them share: its size, and colours that suit both themes."""
    figure.update_layout(
        template="none",
        height=HEIGHT,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": GREY, "size": 12},
        **layout,
    )
    figure.update_annotations(font_size=13)
    figure.update_xaxes(gridcolor=GRID, zeroline=False)


def _time_per_token_ms(stats: GenerationStats) -> float | None:
    seconds = stats.time_per_token_s
    return None if seconds is None else seconds * 1000
