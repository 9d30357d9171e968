"""The record by days, how long it is kept, and what judging it needs.

Only the administrator's rows and functions make and drop days: the service's role can
call them, but neither choose what goes nor shorten how long it is kept.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

RECORD = (
    "alter table record rename to record_before",
    "alter index record_pkey rename to record_before_pkey",
    "drop index record_once, record_project, record_target, record_request",
    """
    create table record (
        day date not null,
        seq bigint not null,
        kind varchar not null,
        record_id varchar not null,
        at double precision not null,
        project varchar not null,
        principal varchar not null,
        verb varchar not null,
        target varchar not null,
        outcome varchar not null,
        request_id varchar not null,
        record jsonb not null,
        prev bytea not null,
        hash bytea not null,
        primary key (seq, day)
    ) partition by range (day)
    """,
    "create unique index record_once on record (kind, record_id, day)",
    "create index record_project on record (project, seq)",
    "create index record_target on record (target, seq) where target <> ''",
    "create index record_request on record (request_id) where request_id <> ''",
    "alter table head add column day date not null default (now() at time zone 'utc')::date",
    "alter table head alter column day drop default",
)
DAYS = (
    """
    create table retention (
        id smallint primary key,
        keep_days integer not null check (keep_days between 7 and 36500)
    )
    """,
    "insert into retention values (1, 90)",
    """
    create table anchor (
        seq bigint primary key,
        hash bytea not null,
        day date not null,
        entries bigint not null,
        at timestamptz not null default now()
    )
    """,
    """
    create function make_days(first date, days integer) returns void
    language plpgsql security definer set search_path from current as $$
    declare
        one date;
        name text;
    begin
        if days > 8 or first not between current_date - 2 and current_date + 8 then
            raise exception 'days are made near today only';
        end if;
        for i in 0 .. days - 1 loop
            one := first + i;
            name := 'record_' || to_char(one, 'YYYYMMDD');
            if to_regclass(quote_ident(name)) is null then
                execute format('create table %I partition of record for values from (%L) to (%L)',
                    name, one, one + 1);
                execute format('revoke all on %I from public, dsec_audit', name);
            end if;
        end loop;
    end $$
    """,
    """
    create function drop_days() returns setof anchor
    language plpgsql security definer set search_path from current as $$
    declare
        name text;
        last anchor;
    begin
        for name in
            select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
            where i.inhparent = 'record'::regclass
            and c.relname < 'record_' || to_char((now() at time zone 'utc')::date
                - (select keep_days from retention where id = 1), 'YYYYMMDD')
            order by c.relname
        loop
            execute format('select seq, hash, day, (select count(*) from %1$I), now() from %1$I'
                ' order by seq desc limit 1', name) into last;
            execute format('drop table %I', name);
            if last.seq is not null then
                insert into anchor select last.*;
                return next last;
            end if;
        end loop;
    end $$
    """,
    "select make_days((now() at time zone 'utc')::date - 1, 5)",
    "insert into record select h.day, b.* from record_before b, head h where h.id = 1",
    "drop table record_before",
)
JUDGING = (
    """
    create table owner (
        uid varchar primary key,
        node varchar not null,
        project varchar not null,
        principal varchar not null,
        job varchar not null,
        task varchar not null,
        at timestamptz not null default now()
    )
    """,
    "create index owner_at on owner (at)",
    """
    create table measured (
        rule varchar not null,
        key varchar not null,
        state bytea not null,
        at timestamptz not null default now(),
        primary key (rule, key)
    )
    """,
    "create index measured_at on measured (at)",
    """
    create table outbox (
        id bigint generated always as identity primary key,
        subject varchar not null,
        data bytea not null,
        headers text,
        at timestamptz not null default now(),
        tries integer not null default 0,
        next_at timestamptz not null default now()
    )
    """,
)
RIGHTS = (
    "revoke all on record, retention, anchor from dsec_audit",
    "grant select, insert on record to dsec_audit",
    "grant select on retention, anchor to dsec_audit",
    "revoke all on function make_days(date, integer), drop_days() from public",
    "grant execute on function make_days(date, integer), drop_days() to dsec_audit",
)


def upgrade() -> None:
    for statement in (*RECORD, *DAYS, *JUDGING, *RIGHTS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("drop table record, head, retention, anchor, owner, measured, outbox")
    op.execute("drop function make_days(date, integer), drop_days()")
