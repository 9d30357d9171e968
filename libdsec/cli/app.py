"""The tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from libdsec.cli import (
    admin,
    audit,
    commands,
    doctor,
    files,
    images,
    jobs,
    policies,
    ports,
    sandboxes,
    secrets,
    snapshots,
    trajectory,
)
from libdsec.cli.common import connection

app = typer.Typer(
    name="dsec",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Elastic sandboxes for training and evaluating agents.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    url: Annotated[str | None, typer.Option(help="Server; default DSEC_URL.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key; default DSEC_API_KEY.")] = None,
    project: Annotated[
        str | None, typer.Option("--project", "-p", help="Project; default DSEC_PROJECT.")
    ] = None,
) -> None:
    """Options of the connection come before the command."""
    connection.url, connection.api_key, connection.project = url, api_key, project


for module in (commands, files, ports, sandboxes, snapshots, trajectory, doctor):
    module.register(app)
app.command("logs")(admin.logs)
app.add_typer(jobs.app, name="job", help="Jobs: sandboxes that outlive their trainer.")
app.add_typer(images.app, name="image", help="Images, workspaces and toolkits.")
app.add_typer(images.workspaces, name="workspace", help="Workspaces: what a task works on.")
app.add_typer(images.toolkits, name="toolkit", help="Toolkits: tools over any base.")
app.add_typer(admin.projects, name="project", help="Projects.")
app.add_typer(admin.keys, name="key", help="Keys: principals that may connect.")
app.add_typer(admin.grants, name="grant", help="What principals may do.")
app.add_typer(admin.quotas, name="quota", help="Limits of projects.")
app.add_typer(admin.nodes, name="node", help="The fleet.")
app.add_typer(policies.app, name="policy", help="Named policies.")
app.add_typer(secrets.app, name="secret", help="Values that no sandbox sees.")
app.add_typer(audit.app, name="audit", help="The record, violations and findings.")
