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
    rich_markup_mode="markdown",  # the other modes keep the line breaks of docstrings
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


SANDBOXES = "Sandboxes"
ENVIRONMENTS = "Environments"
PROJECT = "Projects and who may do what"
OVERSIGHT = "Oversight"

for panel, modules in (
    (SANDBOXES, (commands, files, ports, sandboxes)),
    ("Disks and history", (snapshots, trajectory)),
    (OVERSIGHT, (doctor,)),
):
    before = len(app.registered_commands)
    for module in modules:
        module.register(app)
    for command in app.registered_commands[before:]:
        command.rich_help_panel = panel
app.command("logs", rich_help_panel=OVERSIGHT)(admin.logs)
for group, name, panel, what in (
    (jobs.app, "job", SANDBOXES, "Jobs: sandboxes that outlive their trainer."),
    (images.app, "image", ENVIRONMENTS, "Images, workspaces and toolkits."),
    (images.workspaces, "workspace", ENVIRONMENTS, "Workspaces: what a task works on."),
    (images.toolkits, "toolkit", ENVIRONMENTS, "Toolkits: tools over any base."),
    (admin.projects, "project", PROJECT, "Projects."),
    (admin.keys, "key", PROJECT, "Keys: principals that may connect."),
    (admin.grants, "grant", PROJECT, "What principals may do."),
    (admin.quotas, "quota", PROJECT, "Limits of projects."),
    (policies.app, "policy", PROJECT, "Named policies."),
    (secrets.app, "secret", PROJECT, "Values that no sandbox sees."),
    (admin.nodes, "node", OVERSIGHT, "The fleet."),
    (audit.app, "audit", OVERSIGHT, "The record, violations and findings."),
):
    app.add_typer(group, name=name, help=what, rich_help_panel=panel)
