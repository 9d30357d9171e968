/* Growing buffers and the fields of a payload. Nothing here trusts a length. */
#include "aether.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

bool buf_room(struct buf *b, size_t more)
{
    if (more > SIZE_MAX / 4 || b->len > SIZE_MAX / 4)
        return false;
    size_t need = b->len + more;
    if (need <= b->cap)
        return true;
    size_t cap = b->cap ? b->cap : 256;
    while (cap < need)
        cap *= 2;
    uint8_t *p = realloc(b->p, cap);
    if (!p)
        return false;
    b->p = p;
    b->cap = cap;
    return true;
}

bool buf_add(struct buf *b, const void *p, size_t n)
{
    if (!n)
        return true;
    if (!buf_room(b, n))
        return false;
    memcpy(b->p + b->len, p, n);
    b->len += n;
    return true;
}

void buf_free(struct buf *b)
{
    free(b->p);
    memset(b, 0, sizeof *b);
}

void buf_cut(struct buf *b, size_t n)
{
    b->len -= n;
    if (n && b->len)
        memmove(b->p, b->p + n, b->len);
}

uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

void put_field(struct buf *b, uint8_t tag, const void *v, size_t n)
{
    uint8_t head[5] = {tag, (uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), (uint8_t)(n >> 24)};
    if (buf_add(b, head, sizeof head))
        buf_add(b, v, n);
}

void put_str(struct buf *b, uint8_t tag, const char *s)
{
    put_field(b, tag, s, strlen(s));
}

void put_u64(struct buf *b, uint8_t tag, uint64_t v)
{
    uint8_t raw[8];
    for (int i = 0; i < 8; i++)
        raw[i] = (uint8_t)(v >> (8 * i));
    put_field(b, tag, raw, 8);
}

int next_field(struct reader *r, struct field *f)
{
    size_t left = (size_t)(r->end - r->p);
    if (!left)
        return 0;
    if (left < 5)
        return -1;
    f->tag = r->p[0];
    f->n = get_u32(r->p + 1);
    if (f->n > left - 5)
        return -1;
    f->v = r->p + 5;
    r->p += 5 + (size_t)f->n;
    return 1;
}

uint64_t field_u64(const struct field *f)
{
    uint64_t v = 0;
    for (uint32_t i = 0; i < f->n && i < 8; i++)
        v |= (uint64_t)f->v[i] << (8 * i);
    return v;
}

char *field_str(const struct field *f)
{
    if (memchr(f->v, 0, f->n))
        return NULL;
    char *s = malloc((size_t)f->n + 1);
    if (s) {
        memcpy(s, f->v, f->n);
        s[f->n] = 0;
    }
    return s;
}

void put_error(struct buf *b, const char *code, const char *field, int err, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    put_str(b, T_CODE, code);
    put_str(b, T_MESSAGE, text);
    if (field)
        put_str(b, T_FIELD, field);
    if (err) {
        const char *name = strerrorname_np(err);
        put_str(b, T_ERRNO, name ? name : "EIO");
    }
}

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void set_nonblock(int fd)
{
    fcntl(fd, F_SETFL, O_NONBLOCK); /* nothing of ours has another flag that can be set */
}

ssize_t write_all(int fd, const void *p, size_t n)
{
    const uint8_t *at = p;
    size_t left = n;
    while (left) {
        ssize_t k = write(fd, at, left);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return -1;
        at += k;
        left -= (size_t)k;
    }
    return (ssize_t)n;
}
