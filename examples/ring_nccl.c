/* Ring attention over NCCL, one GPU per rank: transports/ra_nccl.h. Attention itself is computed by
 * the CPU; NCCL carries the messages. You will see what every rank sent and received in a forward
 * and a backward pass, and that all numbers are those of one rank, bit for bit. Exits with 1 if
 * not.
 *
 *   cc -O2 -std=c99 -I. -I/usr/local/cuda/include -o ring_nccl examples/ring_nccl.c \
 *       -L/usr/local/cuda/lib64 -lnccl -lcudart -lpthread -lm
 *   d=$(mktemp -d); for r in 0 1 2 3; do ./ring_nccl -n 4 --rank $r --directory $d & done; wait
 *
 * Each rank compares its rows with those of one rank. It uses the GPU with the number of the rank;
 * --device N chooses another. On several machines the directory is one that all see. --tokens N
 * --heads N --kv-heads N --dim N --chunk N --full --seconds N change the task. */
#define RINGATTN_IMPLEMENTATION
#include "transports/ra_nccl.h"
#include "transports/ring_check.h"

/* One rank, in this process. */
static ra_status on_rank(const ring_task *t, ra_nccl_desc *nd, ring_figures *f, float *all) {
    ra_plan *plan = NULL;
    ra_nccl *nccl = NULL;
    ra_error why;
    ra_desc d;
    ra_status s;
    memset(&why, 0, sizeof why);
    ring_describe(&d, t, nd->rank, nd->ranks, &why);
    d.grad_return = RA_RETURN_RING;    /* NCCL connects neighbours here */
    s = ra_plan_create(&plan, &d, NULL);
    if (!s) {
        nd->message_bytes = ra_nccl_message_bytes(plan, nd->ranks);
        nd->shape = (uint64_t)t->tokens;
        nd->deadline_ns = ra_deadline_ms(1000 * t->seconds);
        nd->error = &why;
        s = ra_nccl_open(&nccl, nd);
    }
    if (s)
        fprintf(stderr, "rank %d: %s: %s %s\n", nd->rank, ra_status_text(s), why.field, why.text);
    else s = ring_attend(t, plan, ra_nccl_transport(nccl), nd->rank, all, f);
    ra_nccl_close(nccl);
    ra_plan_destroy(plan);
    return s;
}

static int run(const ring_task *t, ra_nccl_desc *nd) {
    float *all = (float *)calloc(ring_floats(t), sizeof *all);
    ring_figures f;
    memset(&f, 0, sizeof f);
    int bad = !all || on_rank(t, nd, &f, all) || ring_judge_one(t, &f, nd->rank, all);
    free(all);
    return bad;
}

int main(int argc, char **argv) {
    ring_task t = ring_task_default();
    ra_nccl_desc nd;
    int device = -1;
    memset(&nd, 0, sizeof nd);
    nd.ranks = 1;
    for (int i = 1, took; i < argc; i += took) {
        took = ring_option(&t, argc, argv, i);
        if (took) continue;
        took = 2;
        if (!strcmp(argv[i], "-n") && i + 1 < argc) nd.ranks = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--rank") && i + 1 < argc) nd.rank = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--device") && i + 1 < argc) device = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--directory") && i + 1 < argc) nd.directory = argv[i + 1];
        else {
            fprintf(stderr, "unknown argument %s, see the top of examples/ring_nccl.c\n", argv[i]);
            return 2;
        }
    }
    if (nd.ranks < 1 || t.tokens < 1 || t.heads < 1 || t.kv_heads < 1 || t.dim < 1) {
        fprintf(stderr, "at least one rank, token, head and dimension\n");
        return 2;
    }
    nd.device = device < 0 ? nd.rank : device;
    return run(&t, &nd);
}
