/* Steps of examples/ring_train.c for check.py, which does the same in PyTorch.
 *
 *   steps OUT TEXT options       options: those of ring_train; --steps N
 *
 * OUT has int64 numbers: layers, heads, kv heads, dim, hidden, feed, tied, steps, sequences,
 * context, weights. Then f32: the first weights; the gradient of step 0; the last weights. Then
 * f64: the loss of each step. Then the bytes of every sequence, [steps][sequences][context + 1]. */
#define RING_TRAIN_NO_MAIN
#include "examples/ring_train.c"

typedef struct steps { train t; float *w, *grad, *last; double *loss; uint8_t *text; } steps;

static ra_status steps_rank(ra_world *world, int rank, void *user) {
    steps *x = (steps *)user;
    train *t = &x->t;
    char why[TRAIN_WHY] = "";
    ranks_desc d;
    worker *w = (worker *)calloc(1, sizeof *w);
    if (!w) return RA_E_NOMEM;
    memset(&d, 0, sizeof d);
    d.kind = RANKS_THREADS;
    d.rank = rank;
    d.ranks = (int32_t)t->ranks;
    d.world = world;
    w->t = t;
    ra_status s = mesh_open(&w->m, &d, 1, NULL, why);
    if (!s) s = train_join(w, why);
    if (!s) s = train_begin(w, why);
    const int64_t context = train_context(t, 0), n = train_sequences(t, 0);
    if (!s && rank == 0) memcpy(x->w, w->n.w, (size_t)w->n.size * sizeof *x->w);
    for (int64_t k = 0; k < t->steps && !s; k++) {
        for (int64_t i = 0; i < n && rank == 0; i++)
            memcpy(x->text + (k * n + i) * (context + 1), train_sequence(w, k, i, context).text,
                   (size_t)context + 1);
        s = train_step(w);
        if (!s && k == 0)
            memcpy(x->grad + w->n.own, w->grad, (size_t)w->n.owned * sizeof *x->grad);
        if (!s && rank == 0) x->loss[k] = t->loss;
    }
    if (!s && rank == 0) memcpy(x->last, w->n.w, (size_t)w->n.size * sizeof *x->last);
    if (s) fprintf(stderr, "rank %d: %s %s\n", rank, ra_status_text(s), why);
    seat_close(&w->s);
    (void)mesh_close(&w->m);
    net_close(&w->n);
    free(w->squares); free(w->leaf); free(w->grad);
    free(w);
    return s;
}

int main(int argc, char **argv) {
    static steps x;
    net n;
    char why[TRAIN_WHY] = "";
    (void)train_run;
    if (argc < 3) return 1;
    if (!train_arguments(&x.t, argc - 1, argv + 1, 0, -1, why) || !train_read_texts(&x.t, why) ||
        !net_open(&n, &x.t.shape, 0, 1, 0)) {
        fprintf(stderr, "steps: %s\n", why);
        return 1;
    }
    const net_shape *m = &x.t.shape;
    const int64_t sequences = train_sequences(&x.t, 0), context = train_context(&x.t, 0);
    const int64_t head[] = { m->layers, m->heads, m->kv_heads, m->dim, m->hidden, m->feed, m->tied,
                             x.t.steps, sequences, context, n.size };
    const size_t size = (size_t)n.size, count = (size_t)x.t.steps;
    const size_t bytes = count * (size_t)(sequences * (context + 1));
    x.w = (float *)calloc(size * 3, sizeof *x.w);
    x.loss = (double *)calloc(count, sizeof *x.loss);
    x.text = (uint8_t *)calloc(bytes, 1);
    if (!x.w || !x.loss || !x.text) return 1;
    x.grad = x.w + size;
    x.last = x.grad + size;
    if (ra_world_run((int)x.t.ranks, steps_rank, &x, NULL)) return 1;
    FILE *f = fopen(argv[1], "wb");
    const int ok = f && fwrite(head, sizeof head, 1, f) == 1 &&
                   fwrite(x.w, sizeof *x.w, size * 3, f) == size * 3 &&
                   fwrite(x.loss, sizeof *x.loss, count, f) == count &&
                   fwrite(x.text, 1, bytes, f) == bytes;
    if (!ok || fclose(f)) return 1;
    free(x.w); free(x.loss); free(x.text);
    net_close(&n);
    train_close(&x.t);
    return 0;
}
