/* Growth of a token tree between the forwards of a draft model. */

/* Returns 0 where x is below the limit, else y. */
static inline vec zero_below(vec x, float limit, vec y) {
#ifdef __AVX512F__
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, broadcast(limit), _CMP_NLT_UQ), y);
#else
    return _mm256_and_ps(_mm256_cmp_ps(x, broadcast(limit), _CMP_NLT_UQ), y);
#endif
}

/* Computes out [length], the softmax of x / temperature, and returns the largest element; all are NaN if x has NaN. */
static float softmax_of(const float *x, float temperature, int64_t length, float *out) {
    const int64_t whole = length / LANES * LANES;
    const vec heat = broadcast(temperature);
    float top = -INFINITY;
    vec most = broadcast(top);
    for (int64_t i = 0; i < whole; i += LANES) {
        const vec score = load(x + i) / heat;
        store(out + i, score);
        most = max_of(score, most);
    }
    for (int64_t i = whole; i < length; i++)
        out[i] = x[i] / temperature, top = fmaxf(top, out[i]);
    top = fmaxf(top, max_in(most));
    /* Smaller exponentials become 0, so that impossible tokens have probability 0. */
    const float tiny = -87;
    vec sums = broadcast(0);
    float sum = 0;
    for (int64_t i = 0; i < whole; i += LANES) {
        const vec score = load(out + i) - broadcast(top), each = zero_below(score, tiny, exp_of(score));
        store(out + i, each);
        sums += each;
    }
    for (int64_t i = whole; i < length; i++)
        out[i] = out[i] - top < tiny ? 0 : expf(out[i] - top), sum += out[i];
    sum += sum_of(sums);
    for (int64_t i = 0; i < whole; i += LANES)
        store(out + i, load(out + i) / broadcast(sum));
    for (int64_t i = whole; i < length; i++)
        out[i] /= sum;
    return 1 / sum;
}

/* Returns whether a is larger than b, where NaN is the largest number. */
static inline int above(float a, float b) { return a > b || (a != a && b == b); }

/* Finds the ``count`` (at most ``length``) largest of non-negative x / by, or of x if ``by`` is NULL, in descending
 * order, of equals the lower index first. */
static void largest_of(const float *x, const float *by, int64_t length, int64_t count, int64_t *found, float *values) {
    int64_t held = 0;
    for (int64_t at = 0; at < length; at += LANES) {
        const int part = min_of(LANES, length - at);
        float own[LANES];
        if (part == LANES) {
            vec block = load(x + at);
            if (by)
                block = block / load(by + at);
            if (held == count && !any_above(block, values[count - 1]))
                continue;
            store(own, block);
        } else
            for (int i = 0; i < part; i++)
                own[i] = by ? x[at + i] / by[at + i] : x[at + i];
        for (int i = 0; i < part; i++) {
            if (held == count && !above(own[i], values[count - 1]))
                continue;
            int64_t place = held < count ? held++ : count - 1;
            for (; place > 0 && above(own[i], values[place - 1]); place--)
                values[place] = values[place - 1], found[place] = found[place - 1];
            values[place] = own[i], found[place] = at + i;
        }
    }
}

typedef struct {
    const float *logits;      /* [batch, nodes, vocabulary]; the last dimension of all tensors is dense */
    int64_t logits_batch, logits_node;
    const float *exponential; /* [batch, nodes, vocabulary], or NULL */
    int64_t exponential_batch, exponential_node;
    float *probs;             /* [batch, nodes, vocabulary] */
    int64_t probs_batch, probs_node;
    const float *temperature; /* [batch], or NULL */
    int64_t *draws;           /* [batch, nodes, count] */
    float *chances;           /* [batch, nodes, count] */
    float first, later;       /* of kernels/step/draws.py */
    int64_t batch, nodes, vocabulary, count, threads;
} ExpandRequest;

enum { LEAST_SHARED = 65536 }; /* fewest logits that threads share */

static void expand_node(const void *argument, int64_t row, int64_t worker) {
    const ExpandRequest *request = argument;
    const int64_t vocabulary = request->vocabulary, count = request->count, most = min_of(count, vocabulary);
    const int64_t b = row / request->nodes, node = row % request->nodes;
    const float temperature = request->temperature ? request->temperature[b] : 1;
    float *probs = request->probs + b * request->probs_batch + node * request->probs_node;
    float *chances = request->chances + row * count;
    int64_t *draws = request->draws + row * count;
    const float *logits = request->logits + b * request->logits_batch + node * request->logits_node;
    const float top = softmax_of(logits, temperature, vocabulary, probs);
    const float *noise = NULL;
    if (request->exponential)
        noise = request->exponential + b * request->exponential_batch + node * request->exponential_node;
    largest_of(probs, noise, vocabulary, most, draws, chances);
    if (noise) {
        float left = 1, chance = request->first + (1 - request->first) * top * top * top;
        for (int64_t i = 0; i < most; i++) {
            const float own = left * chance;
            if (chances[i] > 0)
                chances[i] = own;
            else
                draws[i] = -1, chances[i] = 0;
            left -= own, chance = request->later / (i + 2);
        }
    }
    for (int64_t i = most; i < count; i++)
        draws[i] = -1, chances[i] = 0;
}

void expand_nodes(const void *argument) {
    const ExpandRequest *request = argument;
    const int64_t rows = request->batch * request->nodes;
    share(expand_node, request, rows, rows * request->vocabulary >= LEAST_SHARED ? request->threads : 1);
}

typedef struct {
    int64_t *tokens, *parents, *mask_words; /* [batch, nodes] and [batch, nodes, words]; all tensors are dense */
    float *path_chances;                    /* [batch, nodes], with its own number of nodes */
    int64_t *ids, *mask;                    /* [batch, width]; [batch * width, mask_words], or NULL */
    const int64_t *draws;                   /* [batch, frontier, count] */
    const float *chances;                   /* [batch, frontier, count] */
    const int64_t *pairs;                   /* [2, width], or NULL */
    int64_t batch, nodes, path_nodes, words, mask_width, frontier, count, width, first, before;
} PlaceRequest;

/* Returns the chance of the path to a (parent, rank). */
static float path_chance(const PlaceRequest *request, int64_t b, int64_t place) {
    const float *paths = request->path_chances + b * request->path_nodes + request->first;
    return request->chances[b * request->frontier * request->count + place] * paths[place / request->count];
}

/* Marks the ``width`` (parent, rank) whose paths have the largest chances, of equals the lower index. */
static void best_places(const PlaceRequest *request, int64_t b, char *chosen) {
    const int64_t places = request->frontier * request->count;
    memset(chosen, 0, places);
    for (int64_t taken = 0; taken < request->width; taken++) {
        int64_t best = -1;
        float most = 0;
        for (int64_t place = 0; place < places; place++) {
            const float chance = path_chance(request, b, place);
            if (!chosen[place] && (best < 0 || above(chance, most)))
                best = place, most = chance;
        }
        chosen[best] = 1;
    }
}

/* Writes ``before`` ones, then the bits of ``words`` that fit. */
static void shifted_bits(const int64_t *words, int64_t count, int64_t before, int64_t *out, int64_t length) {
    const int64_t skipped = before / 64, shift = before % 64;
    for (int64_t i = 0; i < length; i++) {
        const int64_t at = i - skipped;
        if (at < 0) {
            out[i] = -1;
            continue;
        }
        uint64_t bits = at < count ? (uint64_t)words[at] << shift : 0;
        if (shift)
            bits |= at ? at <= count ? (uint64_t)words[at - 1] >> (64 - shift) : 0 : ((uint64_t)1 << shift) - 1;
        out[i] = bits;
    }
}

void place_nodes(const void *argument) {
    const PlaceRequest *request = argument;
    const int64_t count = request->count, width = request->width, words = request->words;
    const int64_t start = request->first + request->frontier;
    char chosen[request->pairs ? 1 : request->frontier * count];
    for (int64_t b = 0; b < request->batch; b++) {
        int64_t *tokens = request->tokens + b * request->nodes, *parents = request->parents + b * request->nodes;
        int64_t *mask_words = request->mask_words + b * request->nodes * words;
        float *path_chances = request->path_chances + b * request->path_nodes;
        if (!request->pairs)
            best_places(request, b, chosen);
        for (int64_t i = 0, place = -1; i < width; i++) {
            if (request->pairs)
                place = request->pairs[i] * count + request->pairs[width + i];
            else
                do
                    place++;
                while (!chosen[place]);
            const int64_t above = place / count, node = start + i, parent = request->first + above;
            const int64_t token = request->draws[b * request->frontier * count + place];
            tokens[node] = token, parents[node] = parent;
            path_chances[node] = path_chance(request, b, place);
            memcpy(mask_words + node * words, mask_words + parent * words, words * sizeof(int64_t));
            mask_words[node * words + node / 64] |= (uint64_t)1 << node % 64;
            request->ids[b * width + i] = token >= 0 ? token : 0;
            if (request->mask)
                shifted_bits(mask_words + node * words, words, request->before,
                             request->mask + (b * width + i) * request->mask_width, request->mask_width);
        }
    }
}

typedef struct {
    int64_t *ids, *positions, *root, *at; /* [batch, newest], [batch, columns], [batch, ...], [depth, batch] */
    int32_t *lengths;                     /* [batch] */
    const int64_t *tokens, *end, *dropped, *offsets, *ahead; /* [batch, ...], [batch], [batch], [columns], [depth] */
    int64_t batch, newest, columns, depth, root_batch, tokens_batch;
} BeginRequest;

void begin_tree(const void *argument) {
    const BeginRequest *request = argument;
    for (int64_t b = 0; b < request->batch; b++) {
        const int64_t end = request->end[b], place = end - request->dropped[b];
        int64_t *ids = request->ids + b * request->newest;
        for (int64_t i = 0; i < request->newest; i++) {
            const int64_t from = end + request->offsets[i];
            ids[i] = request->tokens[b * request->tokens_batch + (from > 0 ? from : 0)];
        }
        for (int64_t i = 0; i < request->columns; i++)
            request->positions[b * request->columns + i] = place + request->offsets[i];
        request->root[b * request->root_batch] = ids[request->newest - 1];
        for (int64_t d = 0; d < request->depth; d++)
            request->at[d * request->batch + b] = place + request->ahead[d];
        request->lengths[b] = place - request->newest + 1;
    }
}
