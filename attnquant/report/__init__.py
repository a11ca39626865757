"""What sharing blocks would cost a model, from its weights alone: `python -m attnquant report`."""

from attnquant.report.measure import Point, Report, measure
from attnquant.report.page import render_page
from attnquant.report.table import render_table

__all__ = ["Point", "Report", "measure", "render_page", "render_table"]
