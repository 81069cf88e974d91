/* Traversal verification of token trees; see kernels/step/traversal.py for what is computed. */

enum { FIXED = -2 }; /* value of q_rows for a node that was proposed deterministically */

typedef struct {
    char *work;
    int64_t work_bytes;
    const int64_t *tokens, *parents, *q_rows; /* [batch, nodes], with *_batch elements between sequences */
    int64_t tokens_batch, parents_batch, rows_batch;
    const float *p, *q;           /* [batch, nodes, vocabulary] and [batch, ..., vocabulary], the last dimension dense */
    int64_t p_batch, p_node, q_batch, q_node;
    const float *uniforms, *exponential; /* [batch, nodes] and [batch, vocabulary] */
    int64_t uniforms_batch, exponential_batch;
    int64_t *path, *count, *next; /* [batch, depth + 1], [batch], [batch], dense */
    int64_t batch, nodes, vocabulary, depth;
} TraverseRequest;

typedef struct {
    const TraverseRequest *request;
    const int64_t *tokens, *parents, *rows;
    const float *p, *q, *uniforms;
    float *work;     /* [1 + 2 (depth + 1), vocabulary]: a residual, then the current p and q of each level */
    char *rejected;  /* [nodes] */
    int64_t *path;   /* accepted nodes by level */
    int64_t length;
} Traversal;

/* Sets left to max(weight * target - draft, 0), or to weight * target but 0 at ``token``; returns its sum. */
static float residual_of(float weight, const float *target, const float *draft, int64_t token, int64_t length,
                         float *left) {
    float total = 0;
    if (draft) {
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < length; i++) {
            const float mass = weight * target[i] - draft[i];
            /* The comparison keeps NaN. */
            left[i] = mass < 0 ? 0 : mass;
            total += left[i];
        }
        return total;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < length; i++) {
        left[i] = weight * target[i];
        total += i == token ? 0 : left[i];
    }
    left[token] = 0;
    return total;
}

/* Sets out to draft without a token, renormalised; zeros if no probability is left. */
static void without_token(const float *draft, int64_t token, int64_t length, float *out) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < length; i++) {
        out[i] = draft[i];
        total += i == token ? 0 : draft[i];
    }
    out[token] = 0;
    if (total > 0)
#pragma omp simd
        for (int64_t i = 0; i < length; i++)
            out[i] /= total;
}

/* Returns the probs of the next token if a node in the subtree of this node is accepted, else NULL. */
static const float *visit(Traversal *tree, int64_t node, float weight, int64_t level) {
    const TraverseRequest *request = tree->request;
    const int64_t nodes = request->nodes, vocabulary = request->vocabulary, row = tree->rows[node];
    const float *target = tree->p + node * request->p_node;
    const float *draft = row >= 0 ? tree->q + row * request->q_node : NULL;
    float *residual = tree->work, *left = residual + (1 + 2 * level) * vocabulary, *others = left + vocabulary;
    for (int64_t child = node + 1; child < nodes && level < request->depth; child++) {
        const int64_t token = tree->tokens[child];
        if (tree->parents[child] != node || token < 0)
            continue;
        const int fixed = row < 0 || tree->rows[child] == FIXED;
        const float proposed = fixed ? 1 : draft[token];
        int again = 0;
        for (int64_t other = node + 1; other < child && !again; other++)
            again = tree->parents[other] == node && tree->rejected[other] && tree->tokens[other] == token;
        if (again || !(proposed > 0))
            continue;
        const float own = weight * target[token] / proposed;
        const float *found = visit(tree, child, own > 1 ? 1 : own, level + 1);
        if (found) {
            tree->path[level] = node;
            return found;
        }
        tree->rejected[child] = 1;
        const float total = residual_of(weight, target, fixed ? NULL : draft, token, vocabulary, residual);
        if (total > 0) {
#pragma omp simd
            for (int64_t i = 0; i < vocabulary; i++)
                left[i] = residual[i] / total;
            target = left, weight = total / (1 - weight + total);
        } else
            weight = weight >= 1;
        if (!fixed) {
            without_token(draft, token, vocabulary, others);
            draft = others;
        }
    }
    if (node && !(tree->uniforms[node] < weight))
        return NULL;
    tree->path[level] = node, tree->length = level + 1;
    return target;
}

/* Returns the lowest index of the largest weight / exponential of positive weights, or 0 without any. */
static int64_t drawn_from(const float *weights, const float *exponential, int64_t length) {
    float most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < length; i++) {
        const float score = weights[i] > 0 ? weights[i] / exponential[i] : 0;
        most = score > most ? score : most;
    }
    for (int64_t i = 0; most > 0 && i < length; i++)
        if (weights[i] > 0 && weights[i] / exponential[i] == most)
            return i;
    return 0;
}

/* Returns the bytes that ``work`` needs if it has less, else 0 after computing the result. */
int64_t traverse_tree(const void *argument) {
    const TraverseRequest *request = argument;
    const int64_t needed = (2 * request->depth + 3) * request->vocabulary * sizeof(float) + LINE;
    if (request->work_bytes < needed)
        return needed;
    char rejected[request->nodes];
    for (int64_t b = 0; b < request->batch; b++) {
        memset(rejected, 0, request->nodes);
        Traversal tree = {
            .request = request,
            .tokens = request->tokens + b * request->tokens_batch,
            .parents = request->parents + b * request->parents_batch,
            .rows = request->q_rows + b * request->rows_batch,
            .p = request->p + b * request->p_batch,
            .q = request->q + b * request->q_batch,
            .uniforms = request->uniforms + b * request->uniforms_batch,
            .work = (float *)(((intptr_t)request->work + LINE - 1) / LINE * LINE),
            .rejected = rejected,
            .path = request->path + b * (request->depth + 1),
        };
        const float *after = visit(&tree, 0, 1, 0);
        for (int64_t i = tree.length; i <= request->depth; i++)
            tree.path[i] = -1;
        request->count[b] = tree.length;
        request->next[b] = drawn_from(after, request->exponential + b * request->exponential_batch, request->vocabulary);
    }
    return 0;
}

typedef struct {
    const int64_t *tokens, *parents, *best; /* [batch, nodes], with *_batch elements between sequences */
    int64_t tokens_batch, parents_batch, best_batch;
    int64_t *path, *count, *next; /* as in TraverseRequest */
    int64_t batch, nodes, depth;
} GreedyRequest;

/* Follows the target's most probable tokens as long as a child proposes them. */
void accept_greedy(const void *argument) {
    const GreedyRequest *request = argument;
    const int64_t nodes = request->nodes, depth = request->depth;
    for (int64_t b = 0; b < request->batch; b++) {
        const int64_t *tokens = request->tokens + b * request->tokens_batch;
        const int64_t *parents = request->parents + b * request->parents_batch;
        const int64_t *best = request->best + b * request->best_batch;
        int64_t *path = request->path + b * (depth + 1), length = 1, node = path[0] = 0;
        for (int64_t child = 1; child < nodes && length <= depth; child++)
            if (parents[child] == node && tokens[child] == best[node] && tokens[child] >= 0)
                path[length++] = node = child;
        for (int64_t i = length; i <= depth; i++)
            path[i] = -1;
        request->count[b] = length;
        request->next[b] = best[node];
    }
}
