/* One output stream: its budget (head and tail are kept, the middle is dropped and
 * counted) and what of it the edge has been sent. The command never waits for a
 * slow reader: what the edge has not yet taken is kept within the budget. A stream
 * without a budget loses nothing instead: the newest part is kept, what the edge took
 * before makes room, and a writer that is far ahead of it waits. */
#include "aether.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static size_t retained_total;

void stream_init(struct outstream *s, int fd, bool retain, uint64_t limit)
{
    memset(s, 0, sizeof *s);
    s->fd = fd;
    s->retain = retain;
    s->credit = WINDOW;
    s->slides = retain && limit > RETAIN_TOTAL_MAX;
    if (s->slides) {
        s->head_max = SLIDE_MAX;
        return;
    }
    s->tail_max = limit / 2 < TAIL_MAX ? (size_t)(limit / 2) : TAIL_MAX;
    s->head_max = (size_t)limit - s->tail_max;
}

/* Makes room in the head for n more bytes; returns how many fit. */
static size_t head_room(struct outstream *s, size_t n)
{
    if (n > s->head_max - s->head_len)
        n = s->head_max - s->head_len;
    size_t need = s->head_len + n;
    if (need <= s->head_cap)
        return n;
    size_t cap = s->head_cap ? s->head_cap : 4096;
    while (cap < need)
        cap *= 2;
    if (cap > s->head_max)
        cap = s->head_max;
    uint8_t *p = NULL;
    if (retained_total + (cap - s->head_cap) <= RETAIN_TOTAL_MAX)
        p = realloc(s->head, cap);
    if (!p) {
        if (!s->slides)
            s->head_max = s->head_len; /* all further bytes go to the tail */
        return 0;
    }
    retained_total += cap - s->head_cap;
    s->head = p;
    s->head_cap = cap;
    return n;
}

static void tail_grow(struct outstream *s, size_t need)
{
    if (need > s->tail_max)
        need = s->tail_max;
    if (need <= s->tail_cap)
        return;
    size_t cap = s->tail_cap ? s->tail_cap : 4096;
    while (cap < need)
        cap *= 2;
    if (cap > s->tail_max)
        cap = s->tail_max;
    if (retained_total + (cap - s->tail_cap) > RETAIN_TOTAL_MAX)
        return;
    uint8_t *p = malloc(cap);
    if (!p)
        return;
    size_t first = s->tail_cap - s->tail_at;
    if (first > s->tail_len)
        first = s->tail_len;
    if (s->tail_len) {
        memcpy(p, s->tail + s->tail_at, first);
        memcpy(p + first, s->tail, s->tail_len - first);
    }
    free(s->tail);
    retained_total += cap - s->tail_cap;
    s->tail = p;
    s->tail_cap = cap;
    s->tail_at = 0;
}

static void tail_push(struct outstream *s, const uint8_t *p, size_t n)
{
    tail_grow(s, s->tail_len + n);
    if (n > s->tail_cap) {
        s->dropped += n - s->tail_cap;
        p += n - s->tail_cap;
        n = s->tail_cap;
    }
    if (s->tail_len + n > s->tail_cap) {
        size_t over = s->tail_len + n - s->tail_cap;
        s->dropped += over;
        s->tail_at = (s->tail_at + over) % s->tail_cap;
        s->tail_len -= over;
    }
    if (!n)
        return;
    size_t at = (s->tail_at + s->tail_len) % s->tail_cap;
    size_t first = s->tail_cap - at < n ? s->tail_cap - at : n;
    memcpy(s->tail + at, p, first);
    memcpy(s->tail, p + first, n - first);
    s->tail_len += n;
}

/* What may make room: the edge took it so long ago that it cannot ask for it again. */
static size_t passed(const struct outstream *s)
{
    size_t unconfirmed = s->credit < WINDOW ? WINDOW - s->credit : 0;
    size_t kept = unconfirmed + SLIDE_KEEP;
    return s->slides && s->head_sent > kept ? s->head_sent - kept : 0;
}

/* How much may be read from its writer now. */
size_t stream_room(const struct outstream *s)
{
    return s->slides ? s->head_max - s->head_len + passed(s) : CHUNK;
}

static void slide(struct outstream *s)
{
    size_t n = passed(s);
    memmove(s->head, s->head + n, s->head_len - n);
    s->base += n;
    s->head_len -= n;
    s->head_sent -= n;
}

void stream_push(struct outstream *s, const uint8_t *p, size_t n)
{
    s->total += n;
    if (s->slides && n > s->head_max - s->head_len)
        slide(s);
    size_t k = s->tail_len ? 0 : head_room(s, n);
    if (k) {
        memcpy(s->head + s->head_len, p, k);
        s->head_len += k;
    }
    if (n > k)
        tail_push(s, p + k, n - k);
}

/* What may be sent now: the head at once, the tail when the stream has ended. */
size_t stream_peek(struct outstream *s, bool ended, const uint8_t **p)
{
    size_t n;
    if (s->head_sent < s->head_len) {
        *p = s->head + s->head_sent;
        n = s->head_len - s->head_sent;
    } else if (ended && s->tail_sent < s->tail_len) {
        size_t at = (s->tail_at + s->tail_sent) % s->tail_cap;
        *p = s->tail + at;
        n = s->tail_len - s->tail_sent;
        if (n > s->tail_cap - at)
            n = s->tail_cap - at;
    } else {
        return 0;
    }
    return n > CHUNK ? CHUNK : n;
}

void stream_sent(struct outstream *s, size_t n)
{
    if (s->head_sent < s->head_len)
        s->head_sent += n;
    else
        s->tail_sent += n;
    s->credit -= (uint32_t)n;
}

void stream_rewind(struct outstream *s)
{
    s->head_sent = s->tail_sent = 0;
    s->credit = WINDOW;
}

void stream_free(struct outstream *s)
{
    if (s->fd >= 0)
        close(s->fd);
    retained_total -= s->head_cap + s->tail_cap;
    free(s->head);
    free(s->tail);
    memset(s, 0, sizeof *s);
    s->fd = -1;
}
