/* What the parts of the helper share. */
#ifndef ATTACH_H
#define ATTACH_H

void fail(const char *fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));
void put(int tree, int at, const char *what); /* mounts tree on at, closes both */
void guard(int root, char **rules);
int decoy_take(char **rules); /* a detached mount; -1: none is wanted */
void decoy_put(int root, int tree);

#endif
