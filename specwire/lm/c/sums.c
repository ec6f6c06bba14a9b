/* Products as partial sums, with AVX2 or AVX-512: LANES over the inputs and one fixed tree, the same bits either way.
 *
 * Few rows are read, not computed. Weights lie in the order in which they are met, eight outputs beside each other, and are read once
 * per pass: eight outputs at a time for all rows, the weights to come being fetched meanwhile. Up to six rows take the time of one.
 * Many, more than FEW, are computed: a piece of the weights is made float32 once, and all rows meet it while it lies in the first cache.
 */

/* How weights are kept: of a block of outputs first LANES inputs of each, then the next LANES, and so on. */
enum {
    INT8 = 1,
    FLOAT16 = 2,
    BFLOAT16 = 3, /* 2 * LANES inputs at a time: the word of 32 bits that holds input j in its low half holds j + LANES in its high one */
    FLOAT32 = 4,
    REST = 5, /* bfloat16 by LANES: the last ones, where inputs are no multiple of 2 * LANES */
};
/* One of the first four is KEPT: each library knows one, so that it is small and soon compiled. */

/* A register holds a partial sum of so many outputs. */
#ifdef __AVX512F__
typedef __m512 sums_t;
enum {
    TOGETHER = 2,
    TILE = 12, /* rows that a tile has sums for, at most */
};
#else
typedef __m256 sums_t;
enum { TOGETHER = 1, TILE = 6 };
#endif

enum {
    OUTPUTS = 8,  /* computed together, their weights staying in a near cache for all rows */
    FEW = 12,     /* rows, at most, that meet the weights as they are kept */
    GROUP = 6,    /* rows, at most, of many: computed together, with two outputs in fifteen of sixteen registers, with eight in 29 of 32 */
    STRIP = 48,   /* rows that meet weights in the first cache, one group after the other */
    PANEL = 1280, /* bytes of an output's weights, at most: OUTPUTS of them, as many being fetched, and rows share a near cache */
    READY = 320,  /* inputs of OUTPUTS that are float32 in the first cache, at most */
};

/* Bytes of a weight. */
INLINE size_t bytes(const int kind) { return kind == INT8 ? 1 : kind == FLOAT32 ? 4 : 2; }

/* Inputs that are met at a time. */
INLINE size_t step(const int kind) { return kind == BFLOAT16 ? 2 * LANES : LANES; }

#ifdef __AVX512F__

/* LANES weights of two outputs. */
INLINE sums_t load(const char *w, const int kind) {
    if (kind == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
    if (kind == FLOAT32) return _mm512_loadu_ps(w);
    const __m256i halves = _mm256_loadu_si256((const __m256i *)w);
    return kind == FLOAT16 ? _mm512_cvtph_ps(halves) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

typedef __m512i woven_t;

INLINE woven_t load_woven(const char *w) { return _mm512_loadu_si512(w); }
INLINE sums_t low(woven_t w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
INLINE sums_t high(woven_t w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(-65536))); }

/* LANES inputs, for each output of a register. */
INLINE sums_t spread(const float *x) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(x)); }

INLINE sums_t add_product(sums_t x, sums_t w, sums_t sums) { return _mm512_fmadd_ps(x, w, sums); }
INLINE sums_t resume(const float *from) { return from ? _mm512_loadu_ps(from) : _mm512_setzero_ps(); }
INLINE void keep(sums_t sums, float *to) { _mm512_storeu_ps(to, sums); }

INLINE void finish(sums_t sums, float *y) {
    y[0] = sum_of_lanes(_mm512_castps512_ps256(sums));
    y[1] = sum_of_lanes(_mm512_extractf32x8_ps(sums, 1));
}

#else

INLINE sums_t load(const char *w, const int kind) {
    if (kind == INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)));
    if (kind == FLOAT32) return _mm256_loadu_ps((const float *)w);
    const __m128i halves = _mm_loadu_si128((const __m128i *)w);
    return kind == FLOAT16 ? _mm256_cvtph_ps(halves) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

typedef __m256i woven_t;

INLINE woven_t load_woven(const char *w) { return _mm256_loadu_si256((const __m256i *)w); }
INLINE sums_t low(woven_t w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
INLINE sums_t high(woven_t w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(-65536))); }

INLINE sums_t spread(const float *x) { return _mm256_loadu_ps(x); }
INLINE sums_t add_product(sums_t x, sums_t w, sums_t sums) { return _mm256_fmadd_ps(x, w, sums); }
INLINE sums_t resume(const float *from) { return from ? _mm256_loadu_ps(from) : _mm256_setzero_ps(); }
INLINE void keep(sums_t sums, float *to) { _mm256_storeu_ps(to, sums); }
INLINE void finish(sums_t sums, float *y) { *y = sum_of_lanes(sums); }

#endif

/* A panel of weights: those of OUTPUTS outputs and `count` inputs from some on. */
typedef struct {
    const char *w;
    size_t count;
    const char *ahead; /* the panel after it, KEPT */
    int first, last;   /* of the panels of its outputs */
} panel_t;

/* Partial sums of a row. */
typedef float partial_t[OUTPUTS][LANES];

/* LANES inputs of `rows` rows, `x`, meet the weights of `outputs`. */
INLINE void add_products(
    const int rows, const int outputs, const sums_t weights[OUTPUTS / TOGETHER], const float *x, size_t inputs,
    sums_t sums[FEW][OUTPUTS / TOGETHER]
) {
    UNROLL for (int r = 0; r < rows; r++) {
        sums_t numbers = spread(x + r * inputs);
        __asm__("" : "+v"(numbers)); /* loaded once, not again for every output: loads are what there is too little of */
        UNROLL for (int n = 0; n < outputs / TOGETHER; n++) sums[r][n] = add_product(numbers, weights[n], sums[r][n]);
    }
    __asm__ volatile("" ::: "memory"); /* what comes next is loaded next: there are no registers for more */
}

/* One step of inputs. */
INLINE void meet(
    const int rows, const int outputs, const int kind, const char *w, const float *x, size_t inputs, sums_t sums[FEW][OUTPUTS / TOGETHER]
) {
    const size_t apart = TOGETHER * step(kind) * bytes(kind);
    sums_t weights[OUTPUTS / TOGETHER];
    if (kind != BFLOAT16) {
        UNROLL for (int n = 0; n < outputs / TOGETHER; n++) weights[n] = load(w + n * apart, kind);
        add_products(rows, outputs, weights, x, inputs, sums);
        return;
    }
    woven_t woven[OUTPUTS / TOGETHER];
    UNROLL for (int n = 0; n < outputs / TOGETHER; n++) woven[n] = load_woven(w + n * apart);
    UNROLL for (int n = 0; n < outputs / TOGETHER; n++) weights[n] = low(woven[n]);
    add_products(rows, outputs, weights, x, inputs, sums);
    UNROLL for (int n = 0; n < outputs / TOGETHER; n++) weights[n] = high(woven[n]);
    add_products(rows, outputs, weights, x + LANES, inputs, sums);
}

/* `rows` rows of x [rows, inputs] by outputs n .. n + outputs - 1 of a panel, on top of `partial` unless it is the first, into `y`
 * once it is the last. `kind`: how its weights are kept. Of each OUTPUTS cache lines of the panel to come it fetches `lines` from
 * `line` on. All that is const here is a constant where this is inlined, so that all sums stay in registers. */
INLINE void tile(
    const int rows, const int outputs, const int kind, size_t lines, size_t line, int n, const panel_t *panel, const float *x,
    size_t inputs, partial_t *partial, float *y
) {
    const size_t per_line = LINE / bytes(KEPT), all = OUTPUTS * bytes(kind);
    const char *ahead = panel->ahead + line * LINE;
    sums_t sums[FEW][OUTPUTS / TOGETHER];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < outputs / TOGETHER; o++) sums[r][o] = resume(panel->first ? NULL : partial[r][n + o * TOGETHER]);
    const char *w = panel->w + n * step(kind) * bytes(kind);
    size_t k = 0;
    for (; k + per_line <= panel->count; k += per_line, ahead += OUTPUTS * LINE) {
        UNROLL for (size_t i = 0; i < lines; i++) _mm_prefetch(ahead + i * LINE, FETCH);
        UNROLL for (size_t j = k; j < k + per_line; j += step(kind)) meet(rows, outputs, kind, w + j * all, x + j, inputs, sums);
    }
    for (; k + step(kind) <= panel->count; k += step(kind)) meet(rows, outputs, kind, w + k * all, x + k, inputs, sums);
    if (k < panel->count) meet(rows, outputs, REST, panel->w + k * all + n * LANES * bytes(REST), x + k, inputs, sums);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < outputs / TOGETHER; o++)
            if (panel->last)
                finish(sums[r][o], y + r * OUTPUTS + n + o * TOGETHER);
            else
                keep(sums[r][o], partial[r][n + o * TOGETHER]);
}

/* All outputs of a panel, `outputs` at a time, which share the fetching of `lines`. */
#define TILES(rows, outputs, kind, lines) \
    for (int n = 0; n < OUTPUTS; n += (outputs)) \
        tile(rows, outputs, kind, (lines) * (outputs) / OUTPUTS, turn * (lines) + n * (lines) / OUTPUTS, n, panel, x, inputs, partial, y)

/* OUTPUTS rows of a panel, as they are kept, for up to TILE rows of x: as many outputs at a time as the registers have sums for. Of
 * two groups of rows each, `turn`, fetches half of the panel to come, so that memory never waits for arithmetic. */
INLINE void meet_few(
    size_t rows, const panel_t *panel, const float *x, size_t inputs, size_t groups, size_t turn, partial_t *partial,
    float *y
) {
#define CASE(rows, outputs) case rows: TILES(rows, outputs, KEPT, OUTPUTS); break
#define HALF(rows, outputs) case TILE + rows: TILES(rows, outputs, KEPT, OUTPUTS / 2); break
    switch (groups == 1 ? rows : TILE + rows) {
#ifdef __AVX512F__
        CASE(1, 8); CASE(2, 8); CASE(3, 8); CASE(4, 8); CASE(5, 8); CASE(6, KEPT == BFLOAT16 ? 4 : 8);
        CASE(7, 4); CASE(8, 4); CASE(9, 4); CASE(10, 4); CASE(11, 4); CASE(12, 4);
#else
        CASE(1, 8); CASE(2, 4); CASE(3, 2); CASE(4, 2); CASE(5, 2); CASE(6, 2);
        HALF(4, 2); HALF(5, 2); HALF(6, 2); HALF(3, 2);
#endif
        default: __builtin_unreachable();
    }
#undef CASE
#undef HALF
}

/* The same of a panel that was made ready, for one of many groups of rows. */
static void meet_many(
    size_t rows, const panel_t *panel, const float *x, size_t inputs, size_t turn, partial_t *partial, float *y
) {
    enum { OF_MANY = TOGETHER == 1 ? 2 : OUTPUTS };
    const size_t lines = turn < 2 ? OUTPUTS / 2 : 0; /* the first two fetch half of the panel to come each */
    switch (rows) {
        case 4: TILES(4, OF_MANY, FLOAT32, lines); break;
        case 5: TILES(5, OF_MANY, FLOAT32, lines); break;
        case GROUP: TILES(GROUP, OF_MANY, FLOAT32, lines); break;
        default: __builtin_unreachable();
    }
}

/* A panel as FLOAT32. */
INLINE void make_ready(const panel_t *panel, float *ready) {
    const char *w = panel->w;
    for (size_t k = 0; k < panel->count;) {
        const int woven = KEPT == BFLOAT16 && k + step(KEPT) <= panel->count;
        for (int n = 0; n < OUTPUTS; n += TOGETHER, ready += TOGETHER * LANES)
            if (woven) {
                const woven_t both = load_woven(w + n * step(KEPT) * bytes(KEPT));
                keep(low(both), ready), keep(high(both), ready + OUTPUTS * LANES);
            } else
                keep(load(w + n * LANES * bytes(KEPT), KEPT == BFLOAT16 ? REST : KEPT), ready);
        ready += woven ? OUTPUTS * LANES : 0;
        k += woven ? step(KEPT) : LANES;
        w += OUTPUTS * (woven ? step(KEPT) : LANES) * bytes(KEPT);
    }
}

/* A block of OUTPUTS, `w`, for up to STRIP rows of x -> y [rows, OUTPUTS]. `next`: the weights that this thread meets after them. */
static void strip(size_t rows, const char *w, const char *next, const float *x, float *y, size_t inputs) {
    partial_t partial[STRIP];
    float ready[READY * OUTPUTS];
    const int many = rows > FEW;
    const size_t size = bytes(KEPT), per_line = LINE / size, room = many ? READY : PANEL / size, panels = (inputs + room - 1) / room;
    const size_t most = ((inputs + panels - 1) / panels + per_line - 1) / per_line * per_line;
    const size_t together = many ? GROUP : TILE, groups = (rows + together - 1) / together;
    for (size_t k = 0; k < inputs; k += most) {
        const int last = k + most >= inputs;
        panel_t panel = {
            .w = w + k * OUTPUTS * size,
            .count = last ? inputs - k : most,
            .ahead = last ? next : w + (k + most) * OUTPUTS * size,
            .first = k == 0,
            .last = last,
        };
        if (many) {
            make_ready(&panel, ready);
            panel.w = (const char *)ready;
        }
        for (size_t row = 0, g = 0; g < groups; g++) {
            const size_t take = (rows - row + groups - g - 1) / (groups - g);
            if (many)
                meet_many(take, &panel, x + row * inputs + k, inputs, g, partial + row, y + row * OUTPUTS);
            else
                meet_few(take, &panel, x + row * inputs + k, inputs, groups, g, partial + row, y + row * OUTPUTS);
            row += take;
        }
    }
}

/* Weights [outputs, inputs] to specwire_packed_bytes, in the order in which they are met. */
void specwire_pack(const char *from, size_t outputs, size_t inputs, char *to) {
    const size_t size = bytes(KEPT);
    for (size_t block = 0; block < outputs; block += OUTPUTS)
        for (size_t k = 0; k < inputs;) {
            const size_t together = KEPT == BFLOAT16 && k + step(KEPT) <= inputs ? step(KEPT) : LANES;
            for (size_t n = 0; n < OUTPUTS; n++)
                for (size_t j = 0; j < together; j++, to += size) {
                    const size_t input = k + (together == LANES ? j : j / 2 + j % 2 * LANES), output = block + n;
                    if (output < outputs)
                        memcpy(to, from + (output * inputs + input) * size, size);
                    else
                        memset(to, 0, size);
                }
            k += together;
        }
}

/* The block that a thread meets after block b of a chunk: the next one, else the chunk's first `again`, else that of its next chunk. */
INLINE size_t block_after(const product_t *p, size_t chunk, size_t b, int again) {
    if (b + 1 < chunk_begin(p, chunk + 1)) return b + 1;
    if (again) return chunk_begin(p, chunk);
    const size_t further = chunk_begin(p, chunk + p->threads);
    return further < p->blocks ? further : b;
}

/* Some blocks for all rows. */
static void product_chunk(const void *job, size_t index, size_t thread) {
    const product_t *p = job;
    const linear_t *l = p->l;
    const size_t strips = (p->rows + STRIP - 1) / STRIP, block_bytes = OUTPUTS * l->inputs * bytes(KEPT), end = chunk_begin(p, index + 1);
    (void)thread;
    for (size_t row = 0, s = 0; s < strips; s++) {
        const size_t take = (p->rows - row + strips - s - 1) / (strips - s);
        for (size_t b = chunk_begin(p, index); b < end; b++) {
            const size_t then = block_after(p, index, b, s + 1 < strips), n = b * OUTPUTS;
            const size_t valid = l->outputs - n < OUTPUTS ? l->outputs - n : OUTPUTS;
            float sums[STRIP * OUTPUTS];
            strip(take, l->weight + b * block_bytes, l->weight + then * block_bytes, p->x + row * l->inputs, sums, l->inputs);
            for (size_t r = 0; r < take; r++) put(p, row + r, n, sums + r * OUTPUTS, valid);
        }
        row += take;
    }
}

static void linear(const linear_t *l, const float *x, float *y, size_t rows, int add, void *split) {
    const size_t threads = atomic_load(&pool.threads);
    const product_t product = {l, x, y, rows, (l->outputs + OUTPUTS - 1) / OUTPUTS, threads, add, split};
    share(product_chunk, &product, threads * CHUNKS);
}

/* Returns 0 if this process may use the instructions. */
int specwire_prepare(void) { return 0; }

size_t specwire_packed_bytes(size_t outputs, size_t inputs) { return (outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS * inputs * bytes(KEPT); }
size_t specwire_split_bytes(size_t rows, size_t inputs) {
    (void)rows, (void)inputs;
    return 0;
}
