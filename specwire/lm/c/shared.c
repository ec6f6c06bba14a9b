/* The layers of Llama and its relatives on a CPU with AVX2, AVX-512 or AMX: weights in int8, float16, bfloat16 or float32, arithmetic in
 * float32 (with AMX the inputs of products have sixteen bits), few rows. See native_layers.py. Three files make one library: this one,
 * sums.c or halves.c, and layers.c.
 *
 * Law. What a row becomes depends on its own text alone, to the last bit: not on how many rows there are, nor on how many
 * threads, nor on how its text was cut into passes. Every sum is taken in one order: products with weights in eight partial sums
 * over the inputs and one fixed tree, with AVX2 as with AVX-512; AMX, for weights in bfloat16, has an order of its own; values of
 * cells one after the other. So verifying a block gives the very scores that plain decoding would have given.
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
    BLOCK = 16,      /* outputs that are computed together, at most */
    CHUNKS = 4,      /* of a product per thread, each half as large as the one before but the last: whoever is done waits for little */
    REGISTERS = 4,   /* of values of a cell that are met together, where a head is a multiple of so many */
    PIECE = 16,      /* rows that one thread takes at a time, of what lies between the products: few are not worth sharing */
    CELLS = 16,      /* of the cache, met by all queries of a unit before the next ones */
};
/* From native.py come LANES, float32 numbers of a register that everything but products is made for; UNIT_TOKENS, tokens of a slot that
 * attend together; FETCH, which cache gets the weights to come; and KEPT, how weights are kept. */

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
    HELPERS = 255,     /* at most */
    TURNS = 5000,      /* that an idle helper looks for work before it sleeps: a tenth of a millisecond, as between two calls */
    PATIENCE = 2000,   /* turns that the caller waits for begun chunks before it offers its core */
    ROUNDING = 0x1f80, /* MXCSR as a process begins: to nearest, small numbers kept. Others may have set it for their thread */
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
    size_t helpers; /* that were ever started by this process */
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
    _mm_setcsr(ROUNDING);
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

/* A forked child has no helpers, and locks that somebody held who is not there. */
static void after_fork(void) {
    pthread_mutex_init(&pool.one_at_a_time, NULL);
    pthread_mutex_init(&pool.sleeping, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.sleepers, 0);
    pool.helpers = 0;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

/* The caller has the pool to itself until `leave`, and rounds as helpers do. Too few helpers are no error. Returns what to give back. */
static unsigned enter(size_t threads) {
    pthread_mutex_lock(&pool.one_at_a_time);
    const unsigned rounding = _mm_getcsr();
    _mm_setcsr(ROUNDING);
    if (threads > HELPERS + 1) threads = HELPERS + 1;
    atomic_store(&pool.threads, threads);
    for (pthread_t id; pool.helpers + 1 < threads; pool.helpers++) {
        if (pthread_create(&id, NULL, help, (void *)(pool.helpers + 1))) break;
        pthread_detach(id);
    }
    return rounding;
}

static void leave(unsigned rounding) {
    _mm_setcsr(rounding);
    pthread_mutex_unlock(&pool.one_at_a_time);
}

/* ---------------------------------------------------------------- products with weights */

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
INLINE void put_some(const product_t *p, size_t row, size_t output, const float *sums, const size_t count) {
    float *to = p->y + row * p->l->outputs + output, results[BLOCK];
    const float *bias = p->l->bias, *scale = p->l->scale;
    for (size_t j = 0; j < count; j++) results[j] = scale ? sums[j] * scale[output + j] : sums[j];
    if (bias)
        for (size_t j = 0; j < count; j++) results[j] += bias[output + j];
    if (p->add)
        for (size_t j = 0; j < count; j++) to[j] += results[j];
    else
        for (size_t j = 0; j < count; j++) to[j] = results[j];
}

INLINE void put(const product_t *p, size_t row, size_t output, const float *sums, size_t count) {
    if (count == BLOCK)
        put_some(p, row, output, sums, BLOCK); /* a number that the compiler knows */
    else
        put_some(p, row, output, sums, count);
}
