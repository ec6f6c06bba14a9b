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
