/* Products with AMX, of weights in bfloat16 and inputs in float32.
 *
 * A number of 24 bits is the sum of three of eight: each row of x becomes three of bfloat16, products with them are exact, and what the
 * three give is added. So five rows of x fill a tile of fifteen, which meets a tile of weights in as many cycles: any few rows cost what
 * reading the weights costs.
 */

enum {
    OUTPUTS = BLOCK,
    INPUTS = 32,   /* of a tile */
    TILE = 1024,   /* bytes */
    PARTS = 3,     /* of a number */
    TILE_ROWS = 5, /* of x; PARTS times as many of a tile */
    TOGETHER = 4,  /* tiles of rows that meet a tile of weights; they hold their sums */
    AHEAD = 16384, /* bytes from the weights that are met to those that are fetched */
};

/* All have fifteen rows of 64 bytes but 7, weights, which has sixteen. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tiles = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {15, 15, 15, 15, 15, 15, 15, 16}};

INLINE size_t steps_of(size_t inputs) { return (inputs + INPUTS - 1) / INPUTS; }

/* A row of x becomes PARTS of a tile (an infinity becomes none, and its row not-a-number): [rows / TILE_ROWS, inputs / INPUTS, tile]. What a tile holds beside them is left as it was: nobody
 * asks what becomes of it, and rows do not see each other. */
INLINE void split(const float *x, size_t inputs, void *to, size_t row) {
    __m512bh *tile = (__m512bh *)((char *)to + row / TILE_ROWS * steps_of(inputs) * TILE) + row % TILE_ROWS * PARTS;
    for (size_t k = 0; k < inputs; k += INPUTS, tile += TILE / sizeof *tile) {
        const size_t left = inputs - k;
        const __mmask32 there = left < INPUTS ? (1u << left) - 1 : ~0u;
        __m512 low = _mm512_maskz_loadu_ps((__mmask16)there, x + k), high = _mm512_maskz_loadu_ps((__mmask16)(there >> 16), x + k + INPUTS / 2);
        for (int part = 0; part < PARTS; part++) {
            const __m512bh nearest = _mm512_cvtne2ps_pbh(high, low);
            tile[part] = nearest;
            const __m512i words = (__m512i)nearest;
            low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)), 16)));
            high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)), 16)));
        }
    }
}

/* Weights [outputs, inputs] to specwire_packed_bytes. A tile holds, for each two inputs, those of OUTPUTS: [outputs / OUTPUTS,
 * inputs / INPUTS, INPUTS / 2, OUTPUTS, 2]. */
void specwire_pack(const char *from, size_t outputs, size_t inputs, char *to) {
    uint16_t *weight = (uint16_t *)to;
    for (size_t block = 0; block < outputs; block += OUTPUTS)
        for (size_t k = 0; k < steps_of(inputs) * INPUTS; k += 2)
            for (size_t n = block; n < block + OUTPUTS; n++)
                for (size_t j = k; j < k + 2; j++)
                    *weight++ = n < outputs && j < inputs ? ((const uint16_t *)from)[n * inputs + j] : 0;
}

/* `count` tiles of rows, `steps` tiles from one to the next, meet a block of weights. */
static void meet(size_t count, const char *x, const char *w, size_t steps, float sums[TOGETHER][TILE_ROWS][OUTPUTS]) {
    float parts[TOGETHER][TILE_ROWS * PARTS][OUTPUTS];
#define STEP(tile) _tile_loadd(4, x + tile * steps * TILE, 64); _tile_dpbf16ps(tile, 4, 7)
#define MEET(steps_of_rows) \
    for (size_t k = 0; k < steps; k++, x += TILE, w += TILE) { \
        UNROLL for (int line = 0; line < TILE; line += LINE) _mm_prefetch(w + AHEAD + line, FETCH); \
        _tile_loadd(7, w, 64); \
        steps_of_rows; \
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    switch (count) {
        case 1: MEET(STEP(0)); break;
        case 2: MEET(STEP(0); STEP(1)); break;
        case 3: MEET(STEP(0); STEP(1); STEP(2)); break;
        default: MEET(STEP(0); STEP(1); STEP(2); STEP(3)); break;
    }
    _tile_stored(0, parts[0], 64);
    _tile_stored(1, parts[1], 64);
    _tile_stored(2, parts[2], 64);
    _tile_stored(3, parts[3], 64);
#undef MEET
#undef STEP
    for (size_t g = 0; g < count; g++)
        for (size_t r = 0; r < TILE_ROWS; r++) {
            const float(*part)[OUTPUTS] = parts[g] + r * PARTS;
            const __m512 small = _mm512_add_ps(_mm512_loadu_ps(part[1]), _mm512_loadu_ps(part[2]));
            _mm512_storeu_ps(sums[g][r], _mm512_add_ps(_mm512_loadu_ps(part[0]), small));
        }
}

static void split_rows(const void *job, size_t index, size_t thread) {
    const product_t *p = job;
    (void)thread;
    for (size_t row = index * PIECE; row < p->rows && row < (index + 1) * PIECE; row++)
        split(p->x + row * p->l->inputs, p->l->inputs, p->split, row);
}

/* Some blocks for all rows. */
static void product_chunk(const void *job, size_t index, size_t thread) {
    const product_t *p = job;
    const linear_t *l = p->l;
    const size_t groups = (p->rows + TILE_ROWS - 1) / TILE_ROWS, steps = steps_of(l->inputs), end = chunk_begin(p, index + 1);
    (void)thread;
    _tile_loadconfig(&tiles);
    for (size_t group = 0; group < groups; group += TOGETHER) {
        const size_t count = groups - group < TOGETHER ? groups - group : TOGETHER;
        const char *x = (const char *)p->split + group * steps * TILE;
        for (size_t b = chunk_begin(p, index); b < end; b++) {
            const size_t n = b * OUTPUTS, valid = l->outputs - n < OUTPUTS ? l->outputs - n : OUTPUTS;
            float sums[TOGETHER][TILE_ROWS][OUTPUTS];
            meet(count, x, l->weight + b * steps * TILE, steps, sums);
            for (size_t row = group * TILE_ROWS, r = 0; r < count * TILE_ROWS && row + r < p->rows; r++)
                put(p, row + r, n, sums[r / TILE_ROWS][r % TILE_ROWS], valid);
        }
    }
    _tile_release();
}

static void linear(const linear_t *l, const float *x, float *y, size_t rows, int add, void *split) {
    const size_t threads = atomic_load(&pool.threads);
    const product_t product = {l, x, y, rows, (l->outputs + OUTPUTS - 1) / OUTPUTS, threads, add, split};
    share(split_rows, &product, (rows + PIECE - 1) / PIECE);
    share(product_chunk, &product, threads * CHUNKS);
}

/* Asks the system for the tiles, for all threads. Returns 0 if this process may use them. */
int specwire_prepare(void) { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

size_t specwire_packed_bytes(size_t outputs, size_t inputs) { return (outputs + OUTPUTS - 1) / OUTPUTS * steps_of(inputs) * TILE; }
size_t specwire_split_bytes(size_t rows, size_t inputs) { return (rows + TILE_ROWS - 1) / TILE_ROWS * steps_of(inputs) * TILE; }
