/* Runs a fuzz target without a fuzzer: every file given, then ROUNDS changed copies of
 * each, by a generator that begins with the same seed every time. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INPUT_MAX (1 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint32_t dice(uint32_t sides)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 33) % sides;
}

static size_t change(uint8_t *p, size_t n)
{
    static const uint8_t edges[] = {0, 1, 2, 5, 9, 0x7f, 0x80, 0xff};
    for (uint32_t changes = 1 + dice(6); changes && n > 1; changes--) {
        size_t at = dice((uint32_t)n), size = 1 + dice((uint32_t)(n - at < 64 ? n - at : 64));
        switch (dice(6)) {
        case 0: p[at] ^= (uint8_t)(1u << dice(8)); break;
        case 1: p[at] = edges[dice(sizeof edges)]; break;
        case 2: p[at] = (uint8_t)dice(256); break;
        case 3: /* a piece is gone */
            memmove(p + at, p + at + size, n - at - size);
            n -= size;
            break;
        case 4: /* a piece comes twice */
            if (n + size <= INPUT_MAX) {
                memmove(p + at + size, p + at, n - at);
                n += size;
            }
            break;
        case 5: memmove(p + dice((uint32_t)(n - size + 1)), p + at, size); break;
        }
    }
    return n;
}

int main(int argc, char **argv)
{
    static uint8_t seed[INPUT_MAX], input[INPUT_MAX];
    int rounds = argc > 1 ? atoi(argv[1]) : 0;
    for (int i = 2; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        size_t n = f ? fread(seed, 1, sizeof seed, f) : 0;
        if (!f)
            return 2;
        fclose(f);
        LLVMFuzzerTestOneInput(seed, n);
        for (int round = 0; round < rounds; round++) {
            memcpy(input, seed, n);
            LLVMFuzzerTestOneInput(input, change(input, n));
        }
    }
    printf("%d inputs, %d changed copies of each\n", argc - 2, rounds);
    return 0;
}
