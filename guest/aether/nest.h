/* Nests, as spares.c keeps them and answers.c hears of them. */
#ifndef NEST_H
#define NEST_H

#include "aether.h"

/* A process asked for: `slot` names it until its pid is known. */
struct child { bool used; int sock; struct place at; };
struct nest {
    bool used, busy, broken;
    bool gone;                 /* nothing more will be heard of it */
    uint32_t unclaimed;        /* slot of its command, until its process is known; 0: none */
    int procs;                 /* cgroup.procs of its leaf */
    dev_t root_dev; ino_t root_ino; /* the root that it was told of, */
    bool root_last;            /* after which no other comes */
    uint64_t policy;           /* policy_sent as it was told; what it took it cannot shed */
    struct child root;
};

extern struct nest nests[NESTS];
extern int asked;
void nest_retire(struct nest *n);

#endif
