/* Repeats the calls of other functions, with requests at the same addresses. */

typedef struct {
    int64_t count;
    void (*const *functions)(const void *request); /* [count]; with workspace they return bytes that they need */
    const void *const *requests;                   /* [count] */
    const char *with_work;                         /* [count] */
} ReplayRequest;

/* Returns 0, or the bytes of workspace that a call needs; it and later ones have not been made. */
int64_t replay(const void *argument) {
    const ReplayRequest *request = argument;
    for (int64_t i = 0; i < request->count; i++) {
        int64_t needed = 0;
        if (request->with_work[i])
            needed = ((int64_t (*)(const void *))request->functions[i])(request->requests[i]);
        else
            request->functions[i](request->requests[i]);
        if (needed)
            return needed;
    }
    return 0;
}
