/* The layers of Llama and its relatives on a CPU with AVX2, AVX-512 or AMX: weights in int8, float16, bfloat16 or float32, arithmetic in
 * float32, few rows. See native_layers.py.
 *
 * Law. What a row becomes depends on its own text alone, to the last bit: not on how many rows there are, nor on how many
 * threads, nor on how its text was cut into passes. Every sum is taken in one order: products with weights in eight partial sums
 * over the inputs and one fixed tree, with AVX2 as with AVX-512; AMX, for weights in bfloat16, has an order of its own; values of
 * cells one after the other. So verifying a block gives the very scores that plain decoding would have given.
 *
 * Few rows are read, not computed. Weights lie in the order in which they are met, eight outputs beside each other, and are read once
 * per pass: eight outputs at a time for all rows, the weights to come being fetched meanwhile. Up to six rows take the time of one.
 * More are computed: a piece of the weights is made float32 once, and all rows meet it while it lies in the first cache.
 *
 * Work is shared out in chunks to whoever is there. The caller takes part and waits only for chunks that others have begun: on cores
 * that other processes use as well, a helper that gets no time must not hold up a step.
 */

#define _GNU_SOURCE

#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    LINE = 64,       /* bytes of a cache line */
    CHUNKS = 4,      /* of a product per thread, each half as large as the one before but the last: whoever is done waits for little */
    REGISTERS = 8,   /* of values of a cell, where a head is a multiple of so many */
    PIECE = 16,      /* rows that one thread takes at a time, of what lies between the products: few are not worth sharing */
    CELLS = 16,      /* of the cache, met by all queries of a unit before the next ones */
};
/* From native.py come LANES, float32 numbers of a partial sum; UNIT_TOKENS, tokens of a slot that attend together; FETCH, which cache
 * gets the weights to come; and KEPT. */

/* How weights are kept: of a block of outputs first LANES inputs of each, then the next LANES, and so on. */
enum {
    INT8 = 1,
    FLOAT16 = 2,
    BFLOAT16 = 3, /* 2 * LANES inputs at a time: the word of 32 bits that holds input j in its low half holds j + LANES in its high one */
    FLOAT32 = 4,
    REST = 5, /* bfloat16 by LANES: the last ones, where inputs are no multiple of 2 * LANES */
};
/* One of the first four is KEPT, that of all weights here: so each library is small and soon compiled. */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* One product: y = x W' + bias. */
typedef struct {
    const char *weight;     /* as specwire_pack leaves them */
    const float *bias;      /* [outputs] or NULL */
    size_t outputs, inputs; /* inputs: a multiple of LANES */
    const float *scale;     /* [outputs]: what an output's sum is multiplied by, or NULL */
} linear_t;

typedef struct {
    linear_t qkv, out, gate_up, down;
    const float *before_attention, *before_mlp; /* [hidden] */
    const float *query_norm, *key_norm;         /* [head_dim] or NULL */
    float *cells;                               /* [slots, 2 * kv_heads, cells per slot, head_dim], keys before values */
} layer_t;

typedef struct {
    size_t hidden, heads, kv_heads, head_dim, cells_per_slot, num_layers;
    float eps, scaling;
    const layer_t *layers;
    const float *embeddings; /* [vocabulary, hidden] */
    linear_t head;
    const float *last_norm;  /* [hidden] */
    const float *cos, *sin;  /* [positions, head_dim]; the first half of sin negated */
} body_t;

/* One pass of `rows` tokens, ordered by slot and position, and its memory. */
typedef struct {
    size_t rows, wanted_rows;
    const int64_t *tokens, *slots, *positions; /* [rows] */
    const int64_t *wanted;                     /* [wanted_rows]: tokens whose scores are asked for */
    float *result;                             /* [wanted_rows, outputs of the head] */
    float *states;                             /* [rows, hidden] */
    float *normed;                             /* [rows, hidden] */
    float *wide;                               /* [rows, the most outputs] */
    float *mixed;                              /* [rows, (heads + 2 * kv_heads) * head_dim] */
    float *narrow;                             /* [rows, the most inputs] */
    float *scores;                             /* [threads, UNIT_TOKENS * heads / kv_heads, cells per slot rounded up to LANES] */
    int64_t *units;                            /* [rows + 1] */
    void *split;                               /* specwire_split_bytes(rows, the most inputs) */
} pass_t;

INLINE float sum_of_lanes(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/* e^x within 2 ulp; 0 below -87, which is less than what a sum of float32 numbers can tell from 0 (Cephes' expf). */
INLINE __m256 exp_of_lanes(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.0f);
    const __m256 vanishes = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(least, x)); /* in this order: what is no number stays none */
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), x);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(x, x), x), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(vanishes, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

/* ---------------------------------------------------------------- sharing work out */

typedef void (*chunk_t)(const void *job, size_t chunk, size_t thread);

enum {
    HELPERS = 255,   /* at most */
    TURNS = 5000,    /* that an idle helper looks for work before it sleeps: a tenth of a millisecond, as between two calls */
    PATIENCE = 2000, /* turns that the caller waits for begun chunks before it offers its core */
};

static struct {
    pthread_mutex_t one_at_a_time; /* callers */
    pthread_mutex_t sleeping;
    pthread_cond_t wake;
    atomic_int sleepers;
    atomic_uint_fast64_t next; /* number of the job << 32 | its next chunk: a late helper cannot take a chunk of another job */
    atomic_size_t done;        /* chunks of the job */
    _Atomic(chunk_t) run;      /* these four change only between jobs */
    _Atomic(const void *) job;
    atomic_uint_fast32_t chunks;
    atomic_size_t threads;
    size_t helpers; /* that were ever started */
    int process;    /* that started them: a forked child has none */
} pool = {.one_at_a_time = PTHREAD_MUTEX_INITIALIZER, .sleeping = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* Takes chunks of job `number` as long as there are any. What it reads of the job is of that job if the exchange succeeds: until a
 * taken chunk is done the next job does not begin. */
static void take_chunks(uint64_t number, size_t thread) {
    for (;;) {
        uint64_t next = atomic_load(&pool.next);
        const chunk_t run = atomic_load(&pool.run);
        const void *job = atomic_load(&pool.job);
        if (next >> 32 != number || (uint32_t)next >= atomic_load(&pool.chunks)) return;
        if (!atomic_compare_exchange_weak(&pool.next, &next, next + 1)) continue;
        run(job, (uint32_t)next, thread);
        atomic_fetch_add(&pool.done, 1);
    }
}

static void *help(void *argument) {
    const size_t thread = (size_t)argument;
    uint64_t seen = 0;
    for (;;) {
        uint64_t number;
        for (int turn = 0; (number = atomic_load(&pool.next) >> 32) == seen && turn < TURNS; turn++) _mm_pause();
        if (number == seen) {
            pthread_mutex_lock(&pool.sleeping);
            atomic_fetch_add(&pool.sleepers, 1);
            while ((number = atomic_load(&pool.next) >> 32) == seen) pthread_cond_wait(&pool.wake, &pool.sleeping);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleeping);
        }
        seen = number;
        if (thread < atomic_load(&pool.threads)) take_chunks(number, thread);
    }
    return NULL;
}

/* Runs all chunks of a job, 0 .. chunks - 1, in any order. Held: one_at_a_time. */
static void share(chunk_t run, const void *job, size_t chunks) {
    if (chunks == 1 || atomic_load(&pool.threads) == 1) {
        for (size_t chunk = 0; chunk < chunks; chunk++) run(job, chunk, 0);
        return;
    }
    const uint64_t last = atomic_load(&pool.next) >> 32, number = (uint32_t)(last + 1);
    atomic_store(&pool.next, last << 32 | UINT32_MAX); /* whoever still looks at the last job finds nothing left of it */
    atomic_store(&pool.run, run);
    atomic_store(&pool.job, job);
    atomic_store(&pool.chunks, chunks);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.next, number << 32);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleeping);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleeping);
    }
    take_chunks(number, 0);
    for (int turn = 1; atomic_load(&pool.done) < chunks; turn++)
        if (turn % PATIENCE)
            _mm_pause();
        else
            sched_yield();
}

/* The caller has the pool to itself until `leave`. Too few helpers are no error. */
static void enter(size_t threads) {
    pthread_mutex_lock(&pool.one_at_a_time);
    if (pool.process != getpid()) pool.helpers = 0, pool.process = getpid(), atomic_store(&pool.sleepers, 0);
    if (threads > HELPERS + 1) threads = HELPERS + 1;
    atomic_store(&pool.threads, threads);
    for (pthread_t id; pool.helpers + 1 < threads; pool.helpers++) {
        if (pthread_create(&id, NULL, help, (void *)(pool.helpers + 1))) break;
        pthread_detach(id);
    }
}

static void leave(void) { pthread_mutex_unlock(&pool.one_at_a_time); }

/* ---------------------------------------------------------------- products with weights */

#ifdef __AMX_BF16__

/* Of weights in bfloat16 and float32 inputs. A number of 24 bits is the sum of three of eight: each row of x becomes three rows of
 * bfloat16, products with them are exact, and what the three give is added. So five rows of x fill a tile of fifteen, which meets
 * sixteen outputs in as many cycles: any few rows cost what reading the weights costs. */

enum {
    OUTPUTS = 16,
    INPUTS = 32,      /* of a tile */
    TILE = 1024,      /* bytes */
    PARTS = 3,        /* of a number */
    TILE_ROWS = 5,    /* of x; PARTS times as many of a tile */
    TOGETHER = 4,     /* tiles of rows that meet a tile of weights; they hold their sums */
    AHEAD = 16384,    /* bytes from the weights that are met to those that are fetched */
};

/* All have fifteen rows of 64 bytes but 7, weights, which has sixteen. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tiles = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {15, 15, 15, 15, 15, 15, 15, 16}};

INLINE size_t steps_of(size_t inputs) { return (inputs + INPUTS - 1) / INPUTS; }

/* A row of x becomes three of a tile: [rows / TILE_ROWS, inputs / INPUTS, tile]. What is left of a tile stays what it was, and so does what
 * becomes of it: rows do not see each other. */
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

/* A tile of weights holds, for each two inputs, those of OUTPUTS: [outputs / OUTPUTS, inputs / INPUTS, INPUTS / 2, OUTPUTS, 2]. */
static void pack(const char *from, size_t outputs, size_t inputs, char *to) {
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

#else

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

/* The order of weights of outputs by inputs, KEPT. */
static void pack(const char *from, size_t outputs, size_t inputs, char *to) {
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

#endif /* what AMX does otherwise */

/* y [rows, outputs] = x [rows, inputs] W' + bias, on top of what y holds if `add`. */
typedef struct {
    const linear_t *l;
    const float *x;
    float *y;
    size_t rows, blocks;
    size_t threads; /* that take chunks in turn */
    int add;
    void *split;
} product_t;

/* The first block of a chunk. Half of the blocks are the first chunks of all threads, half of the rest their second, and so on. */
INLINE size_t chunk_begin(const product_t *p, size_t chunk) {
    const size_t level = chunk / p->threads, before = p->blocks - (p->blocks >> level);
    if (level >= CHUNKS) return p->blocks;
    const size_t after = level + 1 == CHUNKS ? p->blocks : p->blocks - (p->blocks >> (level + 1));
    return before + (after - before) * (chunk % p->threads) / p->threads;
}

/* What becomes of the sums over all inputs, of a row and `count` outputs from some on. */
INLINE void put(const product_t *p, size_t row, size_t output, const float *sums, size_t count) {
    float *to = p->y + row * p->l->outputs + output, results[OUTPUTS];
    const float *bias = p->l->bias, *scale = p->l->scale;
    for (size_t j = 0; j < count; j++) results[j] = scale ? sums[j] * scale[output + j] : sums[j];
    if (bias)
        for (size_t j = 0; j < count; j++) results[j] += bias[output + j];
    if (p->add)
        for (size_t j = 0; j < count; j++) to[j] += results[j];
    else
        for (size_t j = 0; j < count; j++) to[j] = results[j];
}

#ifdef __AMX_BF16__

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

#else

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

#endif

static void linear(const linear_t *l, const float *x, float *y, size_t rows, int add, void *split) {
    const size_t threads = atomic_load(&pool.threads);
    const product_t product = {l, x, y, rows, (l->outputs + OUTPUTS - 1) / OUTPUTS, threads, add, split};
#ifdef __AMX_BF16__
    share(split_rows, &product, (rows + PIECE - 1) / PIECE);
#endif
    share(product_chunk, &product, threads * CHUNKS);
}

/* ---------------------------------------------------------------- what lies between the products */

/* y = x / sqrt(mean(x^2) + eps) * weight (RMSNorm, arXiv:1910.07467). x and y may be the same. */
INLINE void norm(const float *x, const float *weight, float *y, size_t size, float eps) {
    __m256 sum = _mm256_setzero_ps();
    for (size_t k = 0; k < size; k += LANES) {
        const __m256 v = _mm256_loadu_ps(x + k);
        sum = _mm256_fmadd_ps(v, v, sum);
    }
    const __m256 scale = _mm256_set1_ps(1.0f / sqrtf(sum_of_lanes(sum) / (float)size + eps));
    for (size_t k = 0; k < size; k += LANES)
        _mm256_storeu_ps(y + k, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + k), scale), _mm256_loadu_ps(weight + k)));
}

/* One layer over one pass, cut into pieces of rows or units. */
typedef struct {
    const body_t *body;
    const layer_t *layer;
    const pass_t *pass;
    const float *norm; /* weights of the norm, where it is one */
} work_t;

/* Rows of piece `index`. */
INLINE size_t piece_end(const pass_t *pass, size_t index) {
    return (index + 1) * PIECE < pass->rows ? (index + 1) * PIECE : pass->rows;
}

/* Queries and keys get their norms and are turned to their positions; keys and values go to their cells. */
static void turn_and_store(const void *job, size_t index, size_t thread) {
    const work_t *work = job;
    const body_t *body = work->body;
    const layer_t *layer = work->layer;
    const pass_t *pass = work->pass;
    (void)thread;
    const size_t dim = body->head_dim, half = dim / 2, turned = body->heads + body->kv_heads, width = turned + body->kv_heads;
    for (size_t r = index * PIECE; r < piece_end(pass, index); r++) {
        const float *cos = body->cos + pass->positions[r] * dim, *sin = body->sin + pass->positions[r] * dim;
        for (size_t h = 0; h < width; h++) {
            float *x = pass->mixed + (r * width + h) * dim;
            if (h < turned) {
                const float *weight = h < body->heads ? layer->query_norm : layer->key_norm;
                if (weight) norm(x, weight, x, dim, body->eps);
                for (size_t j = 0; j < half; j++) {
                    const float low = x[j], high = x[j + half];
                    x[j] = low * cos[j] + high * sin[j];
                    x[j + half] = high * cos[j + half] + low * sin[j + half];
                }
            }
            if (h >= body->heads) {
                const size_t head = pass->slots[r] * 2 * body->kv_heads + (h - body->heads);
                memcpy(layer->cells + (head * body->cells_per_slot + pass->positions[r]) * dim, x, dim * sizeof *x);
            }
        }
    }
}

/* silu(gate) * up, wide [rows, 2 * size] -> narrow [rows, size]. Below -88 silu is 1e-36 or less, and not exact. */
static void gate(const void *job, size_t index, size_t thread) {
    const work_t *work = job;
    const pass_t *pass = work->pass;
    const size_t size = work->layer->down.inputs;
    (void)thread;
    for (size_t r = index * PIECE; r < piece_end(pass, index); r++) {
        const float *gates = pass->wide + r * 2 * size, *ups = gates + size;
        for (size_t k = 0; k < size; k += LANES) {
            const __m256 g = _mm256_loadu_ps(gates + k), e = exp_of_lanes(_mm256_sub_ps(_mm256_setzero_ps(), g));
            const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
            _mm256_storeu_ps(pass->narrow + r * size + k, _mm256_mul_ps(silu, _mm256_loadu_ps(ups + k)));
        }
    }
}

/* states -> normed. */
static void norm_states(const void *job, size_t index, size_t thread) {
    const work_t *work = job;
    const size_t hidden = work->body->hidden;
    (void)thread;
    for (size_t r = index * PIECE; r < piece_end(work->pass, index); r++)
        norm(work->pass->states + r * hidden, work->norm, work->pass->normed + r * hidden, hidden, work->body->eps);
}

/* ---------------------------------------------------------------- attention */

/* Products of a query with four keys. */
INLINE __m128 four_scores(const float *query, const float *const keys[4], size_t dim) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (size_t j = 0; j < dim; j += LANES) {
        const __m256 q = _mm256_loadu_ps(query + j);
        UNROLL for (int c = 0; c < 4; c++) sums[c] = _mm256_fmadd_ps(q, _mm256_loadu_ps(keys[c] + j), sums[c]);
    }
    const __m256 low = _mm256_hadd_ps(sums[0], sums[1]), high = _mm256_hadd_ps(sums[2], sums[3]), all = _mm256_hadd_ps(low, high);
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

/* Scores to shares, in place; the last register is filled up with minus infinity. Returns what their sum is. */
INLINE float exponentials(float *scores, size_t count) {
    const size_t end = (count + LANES - 1) / LANES * LANES;
    for (size_t c = count; c < end; c++) scores[c] = -INFINITY;
    __m256 best = _mm256_set1_ps(-INFINITY);
    for (size_t c = 0; c < end; c += LANES) best = _mm256_max_ps(_mm256_loadu_ps(scores + c), best);
    float lanes[LANES], most = -INFINITY;
    _mm256_storeu_ps(lanes, best);
    for (int c = 0; c < LANES; c++) most = lanes[c] > most ? lanes[c] : most;
    __m256 sum = _mm256_setzero_ps();
    for (size_t c = 0; c < end; c += LANES) {
        const __m256 e = exp_of_lanes(_mm256_sub_ps(_mm256_loadu_ps(scores + c), _mm256_set1_ps(most)));
        _mm256_storeu_ps(scores + c, e);
        sum = _mm256_add_ps(sum, e);
    }
    return sum_of_lanes(sum);
}

/* y += shares of `count` cells, one after the other. */
INLINE void add_values(const float *shares, const float *values, float *y, size_t count, size_t dim, const size_t registers) {
    for (size_t j = 0; j < dim; j += registers * LANES) {
        __m256 sums[REGISTERS];
        UNROLL for (size_t n = 0; n < registers; n++) sums[n] = _mm256_loadu_ps(y + j + n * LANES);
        for (size_t c = 0; c < count; c++) {
            const __m256 share = _mm256_set1_ps(shares[c]);
            UNROLL for (size_t n = 0; n < registers; n++)
                sums[n] = _mm256_fmadd_ps(share, _mm256_loadu_ps(values + c * dim + j + n * LANES), sums[n]);
        }
        UNROLL for (size_t n = 0; n < registers; n++) _mm256_storeu_ps(y + j + n * LANES, sums[n]);
    }
}

/* Tokens first .. last - 1, all of one slot, at one head of keys and all heads of queries that share it. */
static void attend_unit(
    const body_t *body, const layer_t *layer, const pass_t *pass, size_t first, size_t last, size_t kv_head, size_t thread
) {
    const size_t dim = body->head_dim, shared = body->heads / body->kv_heads, width = body->heads + 2 * body->kv_heads;
    const size_t stride = (body->cells_per_slot + LANES - 1) / LANES * LANES;
    const float *keys = layer->cells + (pass->slots[first] * 2 * body->kv_heads + kv_head) * body->cells_per_slot * dim;
    const float *values = keys + body->kv_heads * body->cells_per_slot * dim;
    float *scores = pass->scores + thread * UNIT_TOKENS * shared * stride;
    const size_t end = pass->positions[last - 1] + 1;
    const __m128 scaling = _mm_set1_ps(body->scaling);
    for (size_t begin = 0; begin < end; begin += CELLS)
        for (size_t t = first; t < last; t++) {
            const size_t mine = pass->positions[t], until = begin + CELLS < mine + 1 ? begin + CELLS : mine + 1;
            for (size_t h = 0; h < shared; h++) {
                const float *query = pass->mixed + (t * width + kv_head * shared + h) * dim;
                float *to = scores + ((t - first) * shared + h) * stride;
                for (size_t c = begin; c < until; c += 4) {
                    const float *four[4]; /* a cell that is not there is the last once more; nobody looks at its score */
                    for (size_t i = 0; i < 4; i++) four[i] = keys + (c + i < mine ? c + i : mine) * dim;
                    _mm_storeu_ps(to + c, _mm_mul_ps(four_scores(query, four, dim), scaling));
                }
            }
        }
    float sums[UNIT_TOKENS * shared];
    for (size_t t = first; t < last; t++)
        for (size_t h = 0; h < shared; h++) {
            const size_t q = (t - first) * shared + h;
            sums[q] = exponentials(scores + q * stride, pass->positions[t] + 1);
            memset(pass->narrow + (t * body->heads + kv_head * shared + h) * dim, 0, dim * sizeof(float));
        }
    for (size_t begin = 0; begin < end; begin += CELLS)
        for (size_t t = first; t < last; t++) {
            const size_t mine = pass->positions[t] + 1, until = begin + CELLS < mine ? begin + CELLS : mine;
            for (size_t h = 0; h < shared && begin < until; h++) {
                const float *shares = scores + ((t - first) * shared + h) * stride + begin;
                float *y = pass->narrow + (t * body->heads + kv_head * shared + h) * dim;
                if (dim % (REGISTERS * LANES) == 0)
                    add_values(shares, values + begin * dim, y, until - begin, dim, REGISTERS);
                else
                    add_values(shares, values + begin * dim, y, until - begin, dim, 1);
            }
        }
    for (size_t t = first; t < last; t++)
        for (size_t h = 0; h < shared; h++) {
            float *y = pass->narrow + (t * body->heads + kv_head * shared + h) * dim;
            const float sum = sums[(t - first) * shared + h];
            for (size_t j = 0; j < dim; j++) y[j] /= sum;
        }
}

/* Each token sees the cells of its slot up to its own: mixed -> narrow [rows, heads * head_dim]. */
static void attend(const void *job, size_t index, size_t thread) {
    const work_t *work = job;
    const size_t unit = index / work->body->kv_heads;
    const int64_t *units = work->pass->units;
    attend_unit(
        work->body, work->layer, work->pass, units[unit], units[unit + 1], index % work->body->kv_heads, thread
    );
}

/* Tokens that attend together: neighbours of one slot. Returns how many units there are. */
static size_t cut_into_units(const pass_t *pass) {
    size_t units = 0;
    for (size_t r = 0; r < pass->rows; r++)
        if (r == 0 || pass->slots[r] != pass->slots[r - 1] || r - (size_t)pass->units[units - 1] == UNIT_TOKENS)
            pass->units[units++] = (int64_t)r;
    pass->units[units] = (int64_t)pass->rows;
    return units;
}

/* ---------------------------------------------------------------- what native.py calls */

/* Compared with the structures of native.py. */
const size_t specwire_sizes[] = {sizeof(linear_t), sizeof(layer_t), sizeof(body_t), sizeof(pass_t)};

#ifdef __AMX_BF16__

/* Asks the system for the tiles, for all threads. Returns 0 if this process may use them. */
int specwire_prepare(void) { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

size_t specwire_packed_bytes(size_t outputs, size_t inputs) { return (outputs + OUTPUTS - 1) / OUTPUTS * steps_of(inputs) * TILE; }
size_t specwire_split_bytes(size_t rows, size_t inputs) { return (rows + TILE_ROWS - 1) / TILE_ROWS * steps_of(inputs) * TILE; }

#else

int specwire_prepare(void) { return 0; }

size_t specwire_packed_bytes(size_t outputs, size_t inputs) { return (outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS * inputs * bytes(KEPT); }
size_t specwire_split_bytes(size_t rows, size_t inputs) { return 0 * rows * inputs; }

#endif

/* Weights [outputs, inputs] to specwire_packed_bytes, in the order in which they are met. */
void specwire_pack(const char *from, size_t outputs, size_t inputs, char *to) { pack(from, outputs, inputs, to); }

/* `split`: specwire_split_bytes. */
void specwire_linear(const linear_t *l, const float *x, float *y, size_t rows, void *split, int threads) {
    enter(threads);
    linear(l, x, y, rows, 0, split);
    leave();
}

/* Tokens to scores. */
void specwire_forward(const body_t *body, const pass_t *pass, int threads) {
    const size_t rows = pass->rows, hidden = body->hidden, units = cut_into_units(pass), pieces = (rows + PIECE - 1) / PIECE;
    enter(threads);
    for (size_t r = 0; r < rows; r++)
        memcpy(pass->states + r * hidden, body->embeddings + pass->tokens[r] * hidden, hidden * sizeof(float));
    for (const layer_t *layer = body->layers; layer < body->layers + body->num_layers; layer++) {
        const work_t attention = {body, layer, pass, layer->before_attention}, mlp = {body, layer, pass, layer->before_mlp};
        share(norm_states, &attention, pieces);
        linear(&layer->qkv, pass->normed, pass->mixed, rows, 0, pass->split);
        share(turn_and_store, &attention, pieces);
        share(attend, &attention, units * body->kv_heads);
        linear(&layer->out, pass->narrow, pass->states, rows, 1, pass->split);
        share(norm_states, &mlp, pieces);
        linear(&layer->gate_up, pass->normed, pass->wide, rows, 0, pass->split);
        share(gate, &mlp, pieces);
        linear(&layer->down, pass->narrow, pass->states, rows, 1, pass->split);
    }
    for (size_t r = 0; r < pass->wanted_rows; r++)
        norm(pass->states + pass->wanted[r] * hidden, body->last_norm, pass->normed + r * hidden, hidden, body->eps);
    if (pass->wanted_rows) linear(&body->head, pass->normed, pass->result, pass->wanted_rows, 0, pass->split);
    leave();
}
