"""Windows and order of an operation's stream, under any schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec._flow import ACK_EVERY_BYTES, KEPT_BYTES, Gap, Receiving, Sending, Stood
from libdsec._wire import CHUNK_BYTES, WINDOW_BYTES


@given(st.binary(max_size=400), st.data())
def test_output_arrives_once_and_in_order_over_any_number_of_attachments(
    content: bytes, data: st.DataObject
) -> None:
    """The edge sends again from anywhere it has not seen acknowledged; frames get lost."""
    receiving, got = Receiving(), bytearray()
    for _ in range(200):
        if receiving.have == len(content):
            break
        start = data.draw(st.integers(0, receiving.have + 3))
        end = data.draw(st.integers(start, start + 60))
        try:
            got += receiving.accept(content[start:end], start)
        except Gap:
            assert start > receiving.have
    else:
        got += receiving.accept(content[receiving.have :], receiving.have)
    assert bytes(got) == content


def test_a_frame_without_an_offset_goes_where_the_output_stands() -> None:
    receiving = Receiving()
    assert receiving.accept(b"ab", None) + receiving.accept(b"cd", None) == b"abcd"
    assert receiving.accept(b"cdef", 2) == b"ef"
    assert receiving.complete(6)
    assert receiving.complete(None)
    assert not receiving.complete(7)


@given(st.lists(st.integers(0, CHUNK_BYTES), max_size=80))
def test_counts_rise_and_never_lag_by_more_than_a_part_of_the_window(sizes: list[int]) -> None:
    receiving, told = Receiving(), 0
    for size in sizes:
        total = receiving.take(size)
        if total is not None:
            assert total > told
            told = total
        assert receiving.taken - told < ACK_EVERY_BYTES
    assert receiving.taken == sum(sizes)


class Edge:
    """The other side of an input: takes chunks, forgets what it had at a re-attach."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, bytes]] = []
        self.taken = bytearray()

    def take(self) -> None:
        if self.queue:
            self.taken += self.queue.pop(0)[1]


@given(st.lists(st.sampled_from(["send", "take", "ack", "lose"]), max_size=200), st.data())
def test_input_is_taken_once_whatever_is_lost(steps: list[str], data: st.DataObject) -> None:
    sending, edge, sent = Sending(), Edge(), bytearray()
    for step in steps:
        if step == "send":
            chunk = data.draw(st.binary(min_size=1, max_size=20))
            edge.queue.append((sending.push(chunk), chunk))
            sent += chunk
        elif step == "take":
            edge.take()
        elif step == "ack":
            sending.acknowledge(len(edge.taken))
        else:  # a re-attach: the queue is gone, the count says where to go on
            sending.acknowledge(len(edge.taken))
            edge.queue = sending.again()
            assert b"".join(c for _, c in edge.queue) == bytes(sent[len(edge.taken) :])
        assert sending.sent - sending.acked <= WINDOW_BYTES
    while edge.queue:
        edge.take()
    assert edge.taken == sent


def test_more_than_the_window_is_never_sent() -> None:
    sending = Sending()
    for _ in range(WINDOW_BYTES // CHUNK_BYTES):
        sending.push(b"x" * CHUNK_BYTES)
    assert sending.room == 0
    with pytest.raises(ValueError, match="window"):
        sending.push(b"x")
    sending.acknowledge(10)
    assert sending.room == 10
    assert sending.again()[0] == (10, b"x" * (CHUNK_BYTES - 10))
    sending.acknowledge(5)
    sending.acknowledge(WINDOW_BYTES + 1)
    assert sending.acked == 10, "a count that goes back or beyond is nobody's"


def test_input_goes_on_from_less_than_was_acknowledged() -> None:
    """An edge that was killed had taken more than reached the sandbox."""
    sending = Sending()
    data = bytes(range(256)) * (CHUNK_BYTES // 256)
    for _ in range(12):
        sending.push(data)
        sending.acknowledge(sending.sent)
    lowest = sending.unacked[0][0]
    assert 0 < lowest <= sending.sent - KEPT_BYTES
    assert sending.begin_at(lowest + 5)
    again = sending.again()
    assert (again[0][0], again[0][1][:1]) == (lowest + 5, data[5:6])
    assert sum(len(c) for _, c in again) == sending.sent - lowest - 5
    assert sending.room == WINDOW_BYTES - (sending.sent - lowest - 5)
    assert not sending.begin_at(lowest - 1)


def test_the_input_that_is_kept_is_bounded() -> None:
    sending = Sending()
    for _ in range(100):
        sending.push(b"x" * CHUNK_BYTES)
        sending.acknowledge(sending.sent)
    assert sum(len(c) for _, c in sending.unacked) <= KEPT_BYTES + CHUNK_BYTES
    assert sending.again() == []


def test_what_came_is_counted_by_stream() -> None:
    receiving = Receiving()
    receiving.accept(b"abc", 0)
    receiving.accept(b"de", 3, error=True)
    assert receiving.counts == "3 2"


def test_paused_time_is_what_the_edge_told_and_what_passed_since() -> None:
    stood = Stood()
    stood.told(b"", 1.0)
    assert (stood.seconds(5.0), stood.now) == (0.0, False)
    stood.told(b"2.500 p", 10.0)
    assert (stood.seconds(14.0), stood.now) == (6.5, True)
    stood.told(b"7.000", 15.0)
    assert (stood.seconds(99.0), stood.now) == (7.0, False)
    stood.told(b"0.500 p", 100.0)  # of an edge that was restarted
    assert stood.seconds(101.0) == 8.5
    stood.told(b"rubbish", 102.0)
    assert stood.now
