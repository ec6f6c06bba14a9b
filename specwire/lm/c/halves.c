/* Products with AMX, of weights in bfloat16 and inputs in float32.
 *
 * A number of sixteen bits is the sum of two of eight: each row of x becomes two of bfloat16, products with them are exact, and what the
 * two give is added in float32. So eight rows of x fill a tile of sixteen, which meets a tile of weights in as many cycles: any few rows
 * cost what reading the weights costs. The last eight of a float32's 24 bits are rounded off; bfloat16 arithmetic keeps eight of all, and
 * with a third part five rows would fill a tile.
 */

enum {
    OUTPUTS = 2 * BLOCK, /* of a pair of tiles */
    INPUTS = 32,   /* of a tile */
    TILE = 1024,   /* bytes */
    PARTS = 2,     /* of a number */
    TILE_ROWS = 8, /* of x; PARTS times as many of a tile */
    TOGETHER = 2,  /* tiles of rows that meet a pair of tiles of weights: four hold their sums, so that none waits for its last product */
    NEAR = 1 << 19, /* bytes of weights that all rows meet before the next ones: they stay in the second cache, and rows need not */
    AHEAD = 16384, /* bytes from the weights that are met to those that are fetched */
};

/* Sums are in 0 to 3, rows in 4 and 5, weights in 6 and 7: sixteen lines of 64 bytes each. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tiles = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

INLINE size_t steps_of(size_t inputs) { return (inputs + INPUTS - 1) / INPUTS; }

/* A row of x becomes PARTS of a tile (an infinity becomes none, and its row not-a-number): [rows / TILE_ROWS, inputs / INPUTS, tile].
 * What a tile holds beside them is left as it was: nobody asks what becomes of it, and rows do not see each other. */
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

/* Weights [outputs, inputs] to specwire_packed_bytes. A tile holds, for each two inputs, those of BLOCK outputs: [outputs / OUTPUTS,
 * inputs / INPUTS, OUTPUTS / BLOCK, INPUTS / 2, BLOCK, 2]. */
void specwire_pack(const char *from, size_t outputs, size_t inputs, char *to) {
    uint16_t *weight = (uint16_t *)to;
    for (size_t first = 0; first < outputs; first += OUTPUTS)
        for (size_t k = 0; k < steps_of(inputs) * INPUTS; k += INPUTS)
            for (size_t block = first; block < first + OUTPUTS; block += BLOCK)
                for (size_t two = k; two < k + INPUTS; two += 2)
                    for (size_t n = block; n < block + BLOCK; n++)
                        for (size_t j = two; j < two + 2; j++)
                            *weight++ = n < outputs && j < inputs ? ((const uint16_t *)from)[n * inputs + j] : 0;
}

/* Sums of a tile of rows and BLOCK outputs, of which PARTS make one. */
typedef float parts_t[TILE_ROWS * PARTS][BLOCK];

/* `groups` tiles of rows, `steps` tiles from one to the next, meet OUTPUTS. `fetch`: their weights come from memory. */
INLINE void meet(const int groups, const int fetch, const char *x, const char *w, size_t steps, parts_t parts[TOGETHER][OUTPUTS / BLOCK]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t k = 0; k < steps; k++, x += TILE, w += 2 * TILE) {
        if (fetch) UNROLL for (int line = 0; line < 2 * TILE; line += LINE) _mm_prefetch(w + AHEAD + line, FETCH);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (groups > 1) {
            _tile_loadd(5, x + steps * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, parts[0][0], 64);
    _tile_stored(1, parts[0][1], 64);
    if (groups > 1) {
        _tile_stored(2, parts[1][0], 64);
        _tile_stored(3, parts[1][1], 64);
    }
}

/* Sums of the rows of a tile and BLOCK outputs, into y. */
INLINE void put_rows(const product_t *p, const parts_t parts, size_t row, size_t output) {
    if (output >= p->l->outputs) return;
    const size_t count = p->l->outputs - output < BLOCK ? p->l->outputs - output : BLOCK;
    for (size_t r = 0; r < TILE_ROWS && row + r < p->rows; r++) {
        float sums[BLOCK];
        _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(parts[r * PARTS]), _mm512_loadu_ps(parts[r * PARTS + 1])));
        put(p, row + r, output, sums, count);
    }
}

static void split_rows(const void *job, size_t index, size_t thread) {
    const product_t *p = job;
    (void)thread;
    for (size_t row = index * PIECE; row < p->rows && row < (index + 1) * PIECE; row++)
        split(p->x + row * p->l->inputs, p->l->inputs, p->split, row);
}

/* Rows from `group` on meet blocks of weights. */
INLINE void product(const int groups, const int fetch, const product_t *p, size_t group, size_t block, size_t end) {
    const size_t steps = steps_of(p->l->inputs);
    for (; block < end; block++) {
        parts_t parts[TOGETHER][OUTPUTS / BLOCK];
        meet(groups, fetch, (const char *)p->split + group * steps * TILE, p->l->weight + block * steps * 2 * TILE, steps, parts);
        for (int g = 0; g < groups; g++)
            for (int b = 0; b < OUTPUTS / BLOCK; b++)
                put_rows(p, parts[g][b], (group + g) * TILE_ROWS, block * OUTPUTS + b * BLOCK);
    }
}

/* Some blocks for all rows. */
static void product_chunk(const void *job, size_t index, size_t thread) {
    const product_t *p = job;
    const size_t groups = (p->rows + TILE_ROWS - 1) / TILE_ROWS, size = steps_of(p->l->inputs) * 2 * TILE;
    const size_t near = NEAR > size ? NEAR / size : 1, end = chunk_begin(p, index + 1);
    (void)thread;
    _tile_loadconfig(&tiles);
    for (size_t block = chunk_begin(p, index), until; block < end; block = until) {
        until = block + near < end ? block + near : end;
        for (size_t group = 0; group < groups; group += TOGETHER)
            if (group)
                groups - group < TOGETHER ? product(1, 0, p, group, block, until) : product(2, 0, p, group, block, until);
            else
                groups < TOGETHER ? product(1, 1, p, group, block, until) : product(2, 1, p, group, block, until);
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

size_t specwire_packed_bytes(size_t outputs, size_t inputs) { return (outputs + OUTPUTS - 1) / OUTPUTS * steps_of(inputs) * 2 * TILE; }
size_t specwire_split_bytes(size_t rows, size_t inputs) { return (rows + TILE_ROWS - 1) / TILE_ROWS * steps_of(inputs) * TILE; }
