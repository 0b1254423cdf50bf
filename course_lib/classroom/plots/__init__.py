"""The figures of the course. Each function takes plain data and returns a figure, which a cell can show."""

from course_lib.classroom.plots.buckets import plot_ready_order
from course_lib.classroom.plots.cluster import draw_cluster
from course_lib.classroom.plots.costs import crossovers, plot_alpha_beta, plot_costs
from course_lib.classroom.plots.ddp import plot_bucket_sizes, plot_overlap
from course_lib.classroom.plots.flows import plot_flows
from course_lib.classroom.plots.links import plot_on_links
from course_lib.classroom.plots.recovery import plot_loss_with_fault, plot_recovery
from course_lib.classroom.plots.rings import plot_ring_step, plot_ring_steps
from course_lib.classroom.plots.style import RANK_COLORS, CourseFigure, rank_color, rank_hatch, to_png
from course_lib.classroom.plots.timeline import plot_trace
from course_lib.classroom.plots.traffic import plot_bytes_per_rank
from course_lib.classroom.plots.training import plot_server_load, plot_staleness, plot_training
from course_lib.classroom.tables import show_table

__all__ = [
    "RANK_COLORS",
    "CourseFigure",
    "crossovers",
    "draw_cluster",
    "plot_alpha_beta",
    "plot_bucket_sizes",
    "plot_bytes_per_rank",
    "plot_costs",
    "plot_flows",
    "plot_loss_with_fault",
    "plot_on_links",
    "plot_overlap",
    "plot_ready_order",
    "plot_recovery",
    "plot_ring_step",
    "plot_ring_steps",
    "plot_server_load",
    "plot_staleness",
    "plot_trace",
    "plot_training",
    "rank_color",
    "rank_hatch",
    "show_table",
    "to_png",
]
