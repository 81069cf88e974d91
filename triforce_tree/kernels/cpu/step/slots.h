/* Commits of accepted paths; see kernels/step/kv_slots.py. */

typedef struct {
    char *slots;      /* [layers, batch, heads, size] of ``bytes``, dense; the strides are bytes too */
    int64_t layer, sequence, head, slot, bytes;
} MovedSlots;

typedef struct {
    char *work;
    int64_t work_bytes;
    MovedSlots kv[2];
    const int64_t *index, *start; /* [batch, places], ``index_batch`` elements apart, and [batch] */
    int64_t index_batch, layers, batch, heads, size, places, ring;
    const int32_t *table; /* [batch, pages], dense, or NULL */
    int64_t pages, page;
} MoveRequest;

/* Returns the slot of a position of sequence b, or -1 if there is none. */
static inline int64_t moved_slot(const MoveRequest *request, int64_t b, int64_t position) {
    return written_slot(position, request->size, request->ring, request->table, b, request->pages, request->page);
}

/* Returns the bytes that ``work`` needs if it has less, else 0 after moving all slots. */
int64_t move_kv(const void *argument) {
    const MoveRequest *request = argument;
    const int64_t places = request->places, most = request->kv[0].bytes > request->kv[1].bytes ? 0 : 1;
    const int64_t needed = places * request->kv[most].bytes;
    if (request->work_bytes < needed)
        return needed;
    for (int64_t b = 0; b < request->batch; b++) {
        int64_t from[places], to[places], count = 0;
        for (int64_t i = 0; i < places; i++) {
            const int64_t offset = request->index[b * request->index_batch + i];
            /* A slot that is its own target is neither read nor written. */
            if (offset < 0 || offset == i)
                continue;
            from[count] = moved_slot(request, b, request->start[b] + offset);
            to[count] = moved_slot(request, b, request->start[b] + i);
            count += from[count] >= 0 && to[count] >= 0;
        }
        for (int64_t layer = 0; count && layer < request->layers; layer++)
            for (int part = 0; part < 2; part++)
                for (int64_t head = 0; head < request->heads; head++) {
                    const MovedSlots *moved = &request->kv[part];
                    char *slots = moved->slots + layer * moved->layer + b * moved->sequence + head * moved->head;
                    for (int64_t i = 0; i < count; i++)
                        memcpy(request->work + i * moved->bytes, slots + from[i] * moved->slot, moved->bytes);
                    for (int64_t i = 0; i < count; i++)
                        memcpy(slots + to[i] * moved->slot, request->work + i * moved->bytes, moved->bytes);
                }
    }
    return 0;
}
