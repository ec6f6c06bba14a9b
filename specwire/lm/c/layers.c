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

/* Queries of a unit that meet a key or a value together, at most. Their sums fill the registers that are left. */
#ifdef __AVX512F__
typedef __m512 lanes_t;
enum { QUERIES = 6, WIDTH = 16 };
INLINE lanes_t load_lanes(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store_lanes(float *to, lanes_t v) { _mm512_storeu_ps(to, v); }
INLINE lanes_t all_lanes(float number) { return _mm512_set1_ps(number); }
INLINE lanes_t add_lanes(lanes_t x, lanes_t y, lanes_t sum) { return _mm512_fmadd_ps(x, y, sum); }
#else
typedef __m256 lanes_t;
enum { QUERIES = 3, WIDTH = 8 };
INLINE lanes_t load_lanes(const float *from) { return _mm256_loadu_ps(from); }
INLINE void store_lanes(float *to, lanes_t v) { _mm256_storeu_ps(to, v); }
INLINE lanes_t all_lanes(float number) { return _mm256_set1_ps(number); }
INLINE lanes_t add_lanes(lanes_t x, lanes_t y, lanes_t sum) { return _mm256_fmadd_ps(x, y, sum); }
#endif

/* The tokens of a unit at the heads that share keys, in the order of tokens. */
typedef struct {
    const float *query; /* [dim] */
    float *scores;      /* of each cell */
    float *result;      /* [dim] */
    size_t sees;        /* cells */
    float sum;          /* of shares */
} asker_t;

#ifdef __AVX512F__
/* Pairs of neighbours in each quarter of two registers, as _mm256_hadd_ps has them. */
INLINE __m512 add_pairs(__m512 x, __m512 y) { return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd)); }

/* Products of `count` queries with four keys, to their scores from `cell` on: two keys to a register, LANES partial sums of each. */
INLINE void four_scores(const asker_t *askers, const int count, const float *const keys[4], size_t dim, float scaling, size_t cell) {
    __m512 sums[QUERIES][2];
    UNROLL for (int q = 0; q < count; q++) sums[q][0] = sums[q][1] = _mm512_setzero_ps();
    for (size_t j = 0; j < dim; j += LANES) {
        const __m512 low = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(keys[0] + j)), _mm256_loadu_ps(keys[1] + j), 1);
        const __m512 high = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(keys[2] + j)), _mm256_loadu_ps(keys[3] + j), 1);
        UNROLL for (int q = 0; q < count; q++) {
            const __m512 query = _mm512_broadcast_f32x8(_mm256_loadu_ps(askers[q].query + j));
            sums[q][0] = _mm512_fmadd_ps(query, low, sums[q][0]);
            sums[q][1] = _mm512_fmadd_ps(query, high, sums[q][1]);
        }
    }
    UNROLL for (int q = 0; q < count; q += 2) { /* quarters: keys 0 and 2 of two queries, their other lanes, keys 1 and 3, theirs */
        const __m512 mine = add_pairs(sums[q][0], sums[q][1]), other = q + 1 < count ? add_pairs(sums[q + 1][0], sums[q + 1][1]) : mine;
        const __m512 parts = add_pairs(mine, other), all = _mm512_add_ps(parts, _mm512_shuffle_f32x4(parts, parts, 0xb1));
        const __m512 scaled = _mm512_mul_ps(all, _mm512_set1_ps(scaling));
        const __m128 even = _mm512_castps512_ps128(scaled), odd = _mm512_extractf32x4_ps(scaled, 2);
        _mm_storeu_ps(askers[q].scores + cell, _mm_unpacklo_ps(even, odd));
        if (q + 1 < count) _mm_storeu_ps(askers[q + 1].scores + cell, _mm_unpackhi_ps(even, odd));
    }
}
#else
INLINE void four_scores(const asker_t *askers, const int count, const float *const keys[4], size_t dim, float scaling, size_t cell) {
    __m256 sums[QUERIES][4];
    UNROLL for (int q = 0; q < count; q++) UNROLL for (int c = 0; c < 4; c++) sums[q][c] = _mm256_setzero_ps();
    for (size_t j = 0; j < dim; j += LANES) {
        __m256 queries[QUERIES];
        UNROLL for (int q = 0; q < count; q++) queries[q] = _mm256_loadu_ps(askers[q].query + j);
        UNROLL for (int c = 0; c < 4; c++) {
            const __m256 key = _mm256_loadu_ps(keys[c] + j);
            UNROLL for (int q = 0; q < count; q++) sums[q][c] = _mm256_fmadd_ps(queries[q], key, sums[q][c]);
        }
    }
    UNROLL for (int q = 0; q < count; q++) {
        const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(sums[q][0], sums[q][1]), _mm256_hadd_ps(sums[q][2], sums[q][3]));
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
        _mm_storeu_ps(askers[q].scores + cell, _mm_mul_ps(four, _mm_set1_ps(scaling)));
    }
}
#endif

/* Scores of cells begin .. end - 1. */
INLINE void add_scores(const asker_t *askers, const int count, const float *keys, size_t begin, size_t end, size_t dim, float scaling) {
    for (size_t c = begin; c < end; c += 4) {
        const float *four[4]; /* a cell that is not there is the last once more; nobody looks at its score */
        for (size_t i = 0; i < 4; i++) four[i] = keys + (c + i < end ? c + i : end - 1) * dim;
        four_scores(askers, count, four, dim, scaling, c);
    }
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

/* Results += shares of cells begin .. end - 1, one after the other. */
INLINE void add_values_of(
    const asker_t *askers, const int count, const float *values, size_t begin, size_t end, size_t dim, const size_t width, const int registers
) {
    for (size_t j = 0; j < dim; j += registers * width) {
        if (width == WIDTH) {
            lanes_t sums[QUERIES][REGISTERS];
            UNROLL for (int q = 0; q < count; q++) UNROLL for (int n = 0; n < registers; n++) sums[q][n] = load_lanes(askers[q].result + j + n * WIDTH);
            for (size_t c = begin; c < end; c++) {
                lanes_t shares[QUERIES];
                UNROLL for (int q = 0; q < count; q++) shares[q] = all_lanes(askers[q].scores[c]);
                UNROLL for (int n = 0; n < registers; n++) {
                    const lanes_t value = load_lanes(values + c * dim + j + n * WIDTH);
                    UNROLL for (int q = 0; q < count; q++) sums[q][n] = add_lanes(shares[q], value, sums[q][n]);
                }
            }
            UNROLL for (int q = 0; q < count; q++) UNROLL for (int n = 0; n < registers; n++) store_lanes(askers[q].result + j + n * WIDTH, sums[q][n]);
        } else
            for (int q = 0; q < count; q++) {
                __m256 sum = _mm256_loadu_ps(askers[q].result + j);
                for (size_t c = begin; c < end; c++)
                    sum = _mm256_fmadd_ps(_mm256_set1_ps(askers[q].scores[c]), _mm256_loadu_ps(values + c * dim + j), sum);
                _mm256_storeu_ps(askers[q].result + j, sum);
            }
    }
}

INLINE void add_values(const asker_t *askers, const int count, const float *values, size_t begin, size_t end, size_t dim) {
    if (dim % (REGISTERS * WIDTH) == 0)
        add_values_of(askers, count, values, begin, end, dim, WIDTH, REGISTERS);
    else if (dim % WIDTH == 0)
        add_values_of(askers, count, values, begin, end, dim, WIDTH, 1);
    else
        add_values_of(askers, count, values, begin, end, dim, LANES, 1);
}

/* Tokens first .. last - 1, all of one slot, at one head of keys and all heads of queries that share it. Cells that all of them see
 * are met by QUERIES at a time; the last few are their own tokens', and each token sees its own share of them. */
static void attend_unit(
    const body_t *body, const layer_t *layer, const pass_t *pass, size_t first, size_t last, size_t kv_head, size_t thread
) {
    const size_t dim = body->head_dim, shared = body->heads / body->kv_heads, width = body->heads + 2 * body->kv_heads;
    const size_t stride = (body->cells_per_slot + LANES - 1) / LANES * LANES, count = (last - first) * shared;
    const float *keys = layer->cells + (pass->slots[first] * 2 * body->kv_heads + kv_head) * body->cells_per_slot * dim;
    const float *values = keys + body->kv_heads * body->cells_per_slot * dim;
    const size_t common = pass->positions[first] + 1, end = pass->positions[last - 1] + 1;
    asker_t askers[count];
    for (size_t q = 0; q < count; q++) {
        const size_t t = first + q / shared, head = kv_head * shared + q % shared;
        askers[q] = (asker_t){
            .query = pass->mixed + (t * width + head) * dim,
            .scores = pass->scores + (thread * UNIT_TOKENS * shared + q) * stride,
            .result = pass->narrow + (t * body->heads + head) * dim,
            .sees = pass->positions[t] + 1,
        };
    }
#define MEET(call) \
    for (size_t begin = 0; begin < met; begin += CELLS) { \
        const size_t until = begin + CELLS < met ? begin + CELLS : met; \
        size_t q = 0; \
        for (; q + QUERIES <= count; q += QUERIES) call(QUERIES); \
        if (QUERIES > 3 && q + 3 <= count) { call(3); q += 3; } \
        for (; q < count; q++) call(1); \
    }
#define SCORES(some) add_scores(askers + q, some, keys, begin, until, dim, body->scaling)
#define VALUES(some) add_values(askers + q, some, values, begin, until, dim)
    size_t met = end;
    MEET(SCORES)
    for (size_t q = 0; q < count; q++) {
        askers[q].sum = exponentials(askers[q].scores, askers[q].sees);
        memset(askers[q].result, 0, dim * sizeof(float));
    }
    met = common;
    MEET(VALUES)
#undef VALUES
#undef SCORES
#undef MEET
    for (size_t q = 0; q < count; q++) {
        if (askers[q].sees > common) add_values(askers + q, 1, values, common, askers[q].sees, dim);
        for (size_t j = 0; j < dim; j++) askers[q].result[j] /= askers[q].sum;
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

/* `split`: specwire_split_bytes. */
void specwire_linear(const linear_t *l, const float *x, float *y, size_t rows, void *split, int threads) {
    const unsigned rounding = enter(threads);
    linear(l, x, y, rows, 0, split);
    leave(rounding);
}

/* Tokens to scores. */
void specwire_forward(const body_t *body, const pass_t *pass, int threads) {
    const size_t rows = pass->rows, hidden = body->hidden, units = cut_into_units(pass), pieces = (rows + PIECE - 1) / PIECE;
    const unsigned rounding = enter(threads);
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
    leave(rounding);
}
