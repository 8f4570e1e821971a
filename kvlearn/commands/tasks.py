"""``kvlearn tasks``: what policies can be compared on."""


def tasks() -> None:
    """List the tasks of kvlearn compare: what they measure, their variants, and what they score."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvlearn.rows import metric_info
    from kvlearn.tasks import catalogue

    table = Table(box=None, pad_edge=False, leading=1)
    table.add_column("name", no_wrap=True)
    table.add_column("what it asks; variants; what is scored")
    for task in catalogue():
        facts = [", ".join(task.variants), ", ".join(metric_info(metric).title for metric in task.metrics)]
        lines = Text("\n").join([Text(task.summary), Text("; ".join(filter(None, facts)), style="dim")])
        table.add_row(task.name, lines)
    Console().print(table)
